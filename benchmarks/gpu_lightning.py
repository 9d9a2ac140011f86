"""Training under Lightning on a GPU: padded rows, flattened rows with flash-attn, our packs, also in graphs.

A part of ``python -m benchmarks.gpu``. One corpus, bf16 weights, a fused AdamW, no checkpoints. A rate counts
real tokens between two synchronisations, the loader included, so padding does not count as work.
Padded rows are measured twice, at random and of like length.
"""

from __future__ import annotations

import gc
import logging
import random
import time
import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.gpu_parts import Row, part
from lightning_thd import CUDAGraphCallback, FlopsModel, THDDataModule, THDThroughputMonitor, causal_lm_loss
from lightning_thd._imports import available
from lightning_thd.flops import SeqStats, peak_flops

VOCABULARY, WARM, STEPS = 32_000, 8, 24
# name -> layers, hidden, heads, key-value heads, intermediate, tokens a step, median length of a document
CASES = {"1B": (20, 2048, 16, 8, 6144, 8_192, 400.0), "0.1B": (12, 640, 10, 5, 2048, 4_096, 200.0)}
PADDED, GROUPED = "padded rows, sdpa", "padded rows of like length, sdpa"
FLATTENED = "flattened rows, flash-attn 2"
GRAPHS = "packs, graphs"
COMPILED = "packs, graphs of compiled layers"


def corpus(tokens: int, middle: float) -> list[dict[str, Any]]:
    """Documents of log-normal lengths for all steps and more."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(middle), 0.8, 40_000), 8, tokens // 4).astype(int)
    enough = np.searchsorted(lengths.cumsum(), tokens * (STEPS + 8) * 2)
    return [{"input_ids": rng.integers(0, VOCABULARY, n)} for n in lengths[:enough]]


def build(case: str, attention: str) -> Any:
    """A Qwen3 with random weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    layers, hidden, heads, kv_heads, intermediate, *_ = CASES[case]
    torch.manual_seed(0)
    config = Qwen3Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=intermediate,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.bfloat16)


class Module(L.LightningModule):
    """A user's module: our loss on packs, the model's own loss on rows."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.train()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        if isinstance(batch, dict):
            batch = {name: value for name, value in batch.items() if name != "real"}
            loss: Tensor = self.model(**batch).loss
            return loss
        return causal_lm_loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW in one kernel."""
        return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=True)


class Clock(L.Callback):
    """Seconds, real tokens and squares of lengths of the steps after the first ones."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.seconds, self._steps, self._start = 0.0, 0, 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Count the batch."""
        if self._steps >= WARM:
            self.lengths += batch["real"] if isinstance(batch, dict) else batch.lengths

    def on_train_batch_end(self, *_: Any) -> None:
        """Begin after the first steps, end after the last."""
        self._steps += 1
        if self._steps in (WARM, STEPS):
            torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self._start
            self._start = time.perf_counter()


def _pad(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a batch of padded rows; a function of the module, because workers may get it by pickle."""
    ids = [torch.from_numpy(x["input_ids"]) for x in rows]
    filled = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)
    labels = filled.masked_fill(mask == 0, -100)
    return {
        "input_ids": filled,
        "attention_mask": mask,
        "labels": labels,
        "real": [len(x) for x in ids],
    }


def padded(documents: list[dict[str, Any]], tokens: int, *, by_length: bool = False) -> DataLoader[Any]:
    """Rows padded to the longest, as many as fill about ``tokens`` slots, or those of like length.

    Rows of like length are as many, in the batches of transformers' sampler for ``group_by_length``. They
    come in random order, because the sampler's begins with the longest rows and a run is short.
    """
    lengths = [len(x["input_ids"]) for x in documents]
    size = max(1, round(tokens / (1.5 * float(np.mean(lengths)))))  # rows of one step hold what a pack holds

    batches = [list(range(i, min(i + size, len(documents)))) for i in range(0, len(documents), size)]
    if by_length:
        from transformers.trainer_pt_utils import LengthGroupedSampler

        sampler = LengthGroupedSampler(size, lengths=lengths, generator=torch.Generator().manual_seed(0))
        order = list(sampler)
        batches = [order[i : i + size] for i in range(0, len(order), size)]
        random.Random(0).shuffle(batches)
    options: dict[str, Any] = {"collate_fn": _pad, "pin_memory": True, "num_workers": 2}
    return DataLoader(documents, batch_sampler=batches, **options)  # type: ignore[arg-type]


def flattened(documents: list[dict[str, Any]], tokens: int) -> DataLoader[Any]:
    """Documents one after the other as transformers' flattening collator gives them."""
    from transformers import DataCollatorWithFlattening

    flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    groups: list[list[dict[str, Any]]] = [[]]
    room = tokens
    for document in documents:
        length = len(document["input_ids"])
        if length > room:
            groups.append([])
            room = tokens
        groups[-1].append(document)
        room -= length

    def collate(rows: list[list[dict[str, Any]]]) -> dict[str, Any]:
        found = dict(flatten([{"input_ids": x["input_ids"].tolist()} for x in rows[0]]))
        return {**found, "real": [len(x["input_ids"]) for x in rows[0]]}

    return DataLoader(groups, 1, collate_fn=collate, pin_memory=True, num_workers=2)  # type: ignore[arg-type]


def ways(case: str) -> Iterator[tuple[str, str, Any, list[L.Callback]]]:
    """Yield name, attention, data and callbacks."""
    *_, tokens, middle = CASES[case]
    documents = corpus(tokens, middle)
    yield PADDED, "sdpa", padded(documents, tokens), []
    yield GROUPED, "sdpa", padded(documents, tokens, by_length=True), []
    if available("flash_attn.flash_attn_interface"):
        yield FLATTENED, "flash_attention_2", flattened(documents, tokens), []
    further: dict[str, list[L.Callback]] = {
        "packs": [],
        GRAPHS: [CUDAGraphCallback()],
        COMPILED: [CUDAGraphCallback(compile_layers=True)],
    }
    for name, more in further.items():
        data = THDDataModule(documents, capacity=tokens)  # type: ignore[arg-type]
        monitor = THDThroughputMonitor(warmup_steps=WARM, every_n_steps=STEPS)  # the clock's steps
        yield name, "thd", data, [monitor, *more]


def make_trainer(steps: int, callbacks: list[L.Callback]) -> L.Trainer:
    """A Trainer on one GPU that logs, saves and prints nothing."""
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options: Any = {"precision": "bf16-true", "accelerator": "gpu", "devices": 1}
    return L.Trainer(max_steps=steps, callbacks=callbacks, **options, **dict.fromkeys(names, False))


def measured(case: str) -> Iterator[Row]:
    """Yield rates, MFU and memory of every way, and ratios to the peers."""
    rates: dict[str, float] = {}
    peak = peak_flops(torch.cuda.get_device_name(), torch.bfloat16)
    for name, attention, data, callbacks in ways(case):
        torch.cuda.reset_peak_memory_stats()
        model, clock = build(case, attention), Clock()
        trainer = make_trainer(STEPS, [clock, *callbacks])
        try:
            trainer.fit(Module(model), data)
        except torch.OutOfMemoryError:  # the padded rows of 1B want more than 80 GB
            yield Row(case=f"{case}, {name}: out of memory", value=float("inf"), unit="GiB")
            del model, trainer, data
            gc.collect()
            torch.cuda.empty_cache()
            continue
        rates[name] = sum(clock.lengths) / clock.seconds
        yield Row(case=f"{case}, {name}", value=rates[name], unit="real tokens/s")
        memory = torch.cuda.max_memory_allocated() / 2**30
        yield Row(case=f"{case}, {name}: peak", value=memory, unit="GiB")
        flops = (
            FlopsModel.from_config(model.config).training_flops(SeqStats.from_lengths(clock.lengths)).model
        )
        if peak is not None:
            mfu = flops / clock.seconds / peak
            yield Row(case=f"{case}, {name}: MFU", value=mfu, unit="share")
            if callbacks:
                (monitor, *_) = callbacks
                assert isinstance(monitor, THDThroughputMonitor)
                told = monitor.latest.get("train/device/mfu", float("nan"))
                ratio, goal = told / mfu, "0.97 to 1.03"
                near = 0.97 <= ratio <= 1.03
                yield Row(
                    case=f"{case}, {name}: monitor's MFU / this", value=ratio, unit="x", goal=goal, met=near
                )
        if callbacks:
            ahead = 1.0 if name == "packs" else 1.1
            for peer, wanted in ((PADDED, 1.3), (GROUPED, 1.0), (FLATTENED, ahead)):
                if peer in rates:
                    times = rates[name] / rates[peer]
                    row = f"{case}, {name} / {peer}"
                    yield Row(case=row, value=times, unit="x", goal=f">= {wanted}", met=times >= wanted)
        del model, trainer, data
        gc.collect()
        torch.cuda.empty_cache()


def _quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


@part(
    "lightning_1b",
    shows="1B under Lightning, AdamW: padded, by length, flattened, packs, graphs, compiled layers",
    seconds=80,
    rank=28,
)
def one_billion() -> Iterator[Row]:
    """A model large enough that the device is busy."""
    _quiet()
    yield from measured("1B")


@part(
    "lightning_small", shows="0.1B on 4k tokens under Lightning, where the host counts", seconds=70, rank=35
)
def small() -> Iterator[Row]:
    """A model small enough that the host's time shows."""
    _quiet()
    yield from measured("0.1B")
