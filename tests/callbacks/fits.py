"""A tiny model, packed batches, and a clock that only moves when told: what the monitor's tests fit."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.callbacks import THDThroughputMonitor
from lightning_thd.flops import FlopsModel
from tests.tiny import quiet_trainer

VOCAB = 31
CONFIG = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


class Clock:
    """Seconds that pass only in ``sleep``."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def pack(*lengths: int, pad_to: int | None = None) -> THDBatch:
    return THDBatch.collate([{"input_ids": [1] * length} for length in lengths], pad_to=pad_to)


class Batches(Dataset[Any]):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def loader(batches: list[Any]) -> DataLoader[Any]:
    return DataLoader(Batches(batches), batch_size=None)


class Config:
    """The attributes of a transformers config, without transformers."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Model(nn.Module):
    """As large as a step needs; its config says that it is the Llama above."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 4)
        self.head = nn.Linear(4, VOCAB)
        if config is not None:
            self.config = Config(**config)


class Module(L.LightningModule):
    """Each training step takes ``seconds`` of the clock, each validation step ten times as long."""

    def __init__(self, clock: Clock, *, config: dict[str, Any] | None = CONFIG, seconds: float = 0.5) -> None:
        super().__init__()
        self.model = Model(config)
        self.clock = clock
        self.seconds = seconds

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.clock.sleep(self.seconds)
        if isinstance(batch, THDStep):
            batch = batch.microbatches[0]
        ids = batch if isinstance(batch, torch.Tensor) else batch.input_ids
        return self.model.head(self.model.embed(ids)).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.sleep(10 * self.seconds)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> int:
        self.clock.sleep(10 * self.seconds)
        return batch_idx

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.clock.sleep(1000)


class Memory(Logger):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if any(key.partition("/")[2].startswith(("device/", "packing/")) for key in metrics):
            self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to keep."""


def trainer(tmp_path: Any, *callbacks: L.Callback, **settings: Any) -> L.Trainer:
    defaults = {"max_epochs": 1, "log_every_n_steps": 2, "use_distributed_sampler": False}
    return quiet_trainer(default_root_dir=tmp_path, callbacks=list(callbacks), **{**defaults, **settings})


FLOPS = FlopsModel.from_config(CONFIG)
PEAK = 1e9
UNEQUAL = [pack(5, 3), pack(8), pack(2, 2, 2, pad_to=8), pack(1, 7), pack(6), pack(4, 3, pad_to=9)]


def flops_of(batches: list[Any]) -> int:
    return sum(FLOPS.training_flops(batch.stats).model for batch in batches)


def monitor(clock: Clock, **settings: Any) -> THDThroughputMonitor:
    defaults: dict[str, Any] = {"peak": PEAK, "warmup_steps": 0, "all_keys": True}
    return THDThroughputMonitor(clock=clock, **{**defaults, **settings})
