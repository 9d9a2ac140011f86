"""Strategies x layouts x features: what each cell trains or gives, and what one process makes of it."""

from __future__ import annotations

import math
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_thd import Packs, Sequences, THDBatch, THDDataModule, THDStrategyMixin, causal_lm_loss
from lightning_thd.packing import PackPlanner
from lightning_thd.strategies import THDDDPStrategy, THDModelParallelStrategy, THDSingleDeviceStrategy
from lightning_thd.strategies.norms import grad_norm
from tests.strategies.jobs import CAPACITY, CLIP, Job, Layout, full_parameters, make_optimizer, make_trainer
from tests.tiny import largest_error, planned, sequences, train_alone

STEP = Sequences(12)
STEPS = 3
SAMPLES = sequences(14, labels=True, seed=5)
LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "dp2": {"dp": 2},
    "cp2": {"cp": 2},
    "tp2": {"tp": 2},
    "dp2cp2": {"dp": 2, "cp": 2},
    "cp2tp2": {"cp": 2, "tp": 2},
    "replicas2": {"dp": 2, "replicas": 2},
    "pp2": {"pp": 2},
}


class OwnDDP(THDStrategyMixin, DDPStrategy):
    """A user's class on DDP; sizes are attributes."""


class OwnModelParallel(THDStrategyMixin, ModelParallelStrategy):
    """A user's class on FSDP2; sizes are attributes."""


class OwnOneDevice(THDStrategyMixin, SingleDeviceStrategy):
    """A user's class on one device; Lightning's constructor wants the device."""


def layout_of(name: str) -> Layout:
    axes = {axis: size for axis, size in LAYOUTS[name].items() if axis != "replicas"}
    return Layout(**axes)


KINDS: dict[str, Callable[[], Any]] = {
    "thd": THDSingleDeviceStrategy,
    "own_one_device": lambda: OwnOneDevice(device=torch.device("cpu")),
    "thd_ddp": THDDDPStrategy,
    "own_ddp": OwnDDP,
    "thd_model_parallel": THDModelParallelStrategy,
    "own_model_parallel": OwnModelParallel,
}


def strategy_of(strategy: str, name: str) -> Strategy:
    """Make a strategy of one of the matrix's rows, with the sizes of a layout."""
    axes = LAYOUTS[name]
    made = KINDS[strategy]()
    made.context_parallel_size = axes.get("cp", 1)
    made.tensor_parallel_size = axes.get("tp", 1)
    made.pipeline_parallel_size = axes.get("pp", 1)
    made.data_parallel_replicas = axes.get("replicas", 1)
    assert isinstance(made, Strategy)
    return made


class Plain(Job):
    """Logs without ``sync_dist``, as people do, and tests as it validates."""

    def training_step(self, batch: THDBatch, batch_idx: int) -> Any:
        loss = causal_lm_loss(self.model, batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
        self.log("val/loss", causal_lm_loss(self.model, batch), sync_dist=True)

    def test_step(self, batch: THDBatch, batch_idx: int) -> None:
        self.log("test/loss", causal_lm_loss(self.model, batch), sync_dist=True)


class Normed(Plain):
    """Keeps the norms of its gradients, as Lightning's documentation shows."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self.model, 2).items()
        self.norms |= {f"logged {self.global_step} {name}": norm.double() for name, norm in norms}


class Frozen(Plain):
    """Trains the second layer and the head alone."""

    def __init__(self) -> None:
        super().__init__()
        self.model.model.embed_tokens.requires_grad_(False)
        self.model.model.layers[0].requires_grad_(False)


class Recomputed(Plain):
    """Computes activations again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})


class CompiledInside(Plain):
    """Compiles the model, not itself."""

    def configure_model(self) -> None:
        self.model.compile(backend="eager")


class Adapted(Plain):
    """Trains low-rank adapters of attention's products."""

    def __init__(self) -> None:
        super().__init__()
        import peft

        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        self.model = peft.get_peft_model(self.model, config).double()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, eps=1e-5)


class Manual(Plain):
    """Steps and clips by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: THDBatch, batch_idx: int) -> dict[str, Tensor]:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = causal_lm_loss(self.model, batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
        optimizer.step()
        return {"loss": loss.detach()}


class LogsEverywhere(Plain):
    """Logs in every hook that may, in every way that has a meaning on one process."""

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        loss = causal_lm_loss(self.model, batch)
        for reduction in ("mean", "max", "min"):
            for synced in (False, True):
                for on_step, on_epoch in ((True, False), (False, True), (True, True)):
                    name = f"train/{reduction}{synced:d}{on_step:d}{on_epoch:d}"
                    self.log(
                        name, loss, on_step=on_step, on_epoch=on_epoch, reduce_fx=reduction, sync_dist=synced
                    )
        self.log("train/sum", loss, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("train/function", loss.detach(), on_epoch=True, reduce_fx=torch.mean)
        self.log("train/number", 3, on_epoch=True, sync_dist=True)
        self.log("train/prog", loss.item(), prog_bar=True, logger=False)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("hook/batch_start", float(batch_idx), sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("hook/batch_end", outputs["loss"].detach(), on_epoch=True, sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("hook/before_step", 1.5, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("hook/epoch_end", 2.5, sync_dist=True)

    def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
        loss = causal_lm_loss(self.model, batch)
        self.log("val/loss", loss)
        self.log("val/synced", loss, sync_dist=True)
        self.log("val/step", loss, on_step=True, on_epoch=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("hook/val_end", self.trainer.callback_metrics["val/loss"], sync_dist=True)


class Sums(Plain):
    """Logs sums over batches and ranks."""

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        loss = causal_lm_loss(self.model, batch)
        self.log("train/sum", loss, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return loss


class Watching(Plain):
    """Lowers its rate when the validation loss does not fall."""

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.model)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=9.0
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss"}}


class Grouped(Plain):
    """Has groups of nothing, the embedding, the head and the rest, each with a rate that falls by step."""

    def configure_optimizers(self) -> Any:
        named = dict(self.model.named_parameters())
        ends = [[p for name, p in named.items() if part in name] for part in ("embed", "lm_head")]
        rest = [p for name, p in named.items() if "embed" not in name and "lm_head" not in name]
        groups = [{"params": part, "lr": 1e-3 * (i + 1)} for i, part in enumerate([[], *ends, rest])]
        optimizer = torch.optim.AdamW(groups, eps=1e-5)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Measured(Plain):
    """Logs metric objects in training and validation."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.largest = MaxMetric()
        self.val_mean = MeanMetric()
        words = self.model.config.vocab_size
        accuracy = {"num_classes": words, "average": "micro", "ignore_index": -100}
        self.val = MetricCollection({"right": MulticlassAccuracy(**accuracy)}, prefix="val/")

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        loss = causal_lm_loss(self.model, batch)
        self.mean(loss.detach(), weight=1.0 / batch.loss_scale)
        self.largest(float(batch_idx))
        self.log("train/mean", self.mean, on_step=False, on_epoch=True)
        self.log("train/largest", self.largest, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
        logits = self.model(**batch.hf_kwargs()).logits[0]
        self.val(logits, batch.targets)
        self.log_dict(self.val)
        self.val_mean.update(causal_lm_loss(self.model, batch), weight=1.0 / batch.loss_scale)
        self.log("val/mean", self.val_mean)


class Counting(Plain):
    """Counts loss tokens by a sum over batches and ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = SumMetric()
        self.seen = SumMetric()

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        self.tokens(float(batch.loss_tokens))
        self.log("train/tokens", self.tokens, on_step=False, on_epoch=True)
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss

    def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
        self.seen(float(batch.loss_tokens))
        self.log("val/tokens", self.seen)


class Thaw(BaseFinetuning):
    """Freezes a layer, and would train it later."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        model: Any = pl_module.model
        self.freeze(model.model.layers[0])

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: Any) -> None:
        """Train nothing more."""


class FreezesLater(Plain):
    """Stops training the embedding after the first epoch."""

    def on_train_epoch_start(self) -> None:
        self.model.model.embed_tokens.requires_grad_(self.current_epoch == 0)


class Fused(Plain):
    """Updates weights by one kernel for all of them."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-5, fused=True)


@dataclass(kw_only=True)
class Cell:
    """One row's strategy and layout, and how to run on it."""

    strategy: str
    layout: str
    folder: str
    multiple: int = 1

    @property
    def dp(self) -> int:
        return layout_of(self.layout).dp

    def trainer(self, **options: Any) -> L.Trainer:
        defaults = {"num_sanity_val_steps": 0, "strategy": strategy_of(self.strategy, self.layout)}
        return make_trainer(layout_of(self.layout), **{**defaults, **options})

    def fit(self, module: Job, step: Packs | Sequences = STEP, **options: Any) -> L.Trainer:
        path = options.pop("ckpt_path", None)
        trainer = self.trainer(**options)
        trainer.fit(module, given(step, multiple=self.multiple), ckpt_path=path)
        return trainer


def given(step: Packs | Sequences = STEP, *, multiple: int = 1) -> THDDataModule:
    """Make the data of a run; with lengths of a ``multiple`` no layout pads, and all have the same packs."""
    train = sequences(80, labels=True)
    val = sequences(8, seed=7)
    for sample in [*train, *val] if multiple > 1 else ():
        length = -(-len(sample["input_ids"]) // multiple) * multiple
        sample.update({name: np.resize(values, length) for name, values in sample.items()})
    return THDDataModule(train, capacity=CAPACITY, global_batch=step, val=val, test=SAMPLES, predict=SAMPLES)


def weights_after(module_type: type[Job], step: Packs | Sequences = STEP, **options: Any) -> Any:
    def run(cell: Cell) -> dict[str, Tensor]:
        module = module_type()
        taken = {key: value() if callable(value) else value for key, value in options.items()}
        trainer = cell.fit(module, step, **taken)
        if "max_epochs" not in options:
            assert trainer.global_step == options.get("max_steps", STEPS)
        return full_parameters(module.model) | logged(trainer)

    return run


def logged(trainer: L.Trainer) -> dict[str, Tensor]:
    """Return what callbacks see, under names of its own: Lightning keeps it in fp32."""
    return {f"logged {key}": value.double() for key, value in trainer.callback_metrics.items()}


def evaluate(cell: Cell, stage: str) -> dict[str, Tensor]:
    trainer = cell.trainer()
    module = Plain()
    (logged,) = getattr(trainer, stage)(module, given(), verbose=False)
    return {f"logged {key}": torch.tensor(value).double() for key, value in logged.items()}


def predict(cell: Cell) -> dict[str, Tensor]:
    trainer = cell.trainer()
    module = Plain()
    rows = {i: row for batch in trainer.predict(module, given()) or () for i, row in batch}
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, rows)
        rows = {i: row for of_rank in everyone for i, row in of_rank.items()}
    assert sorted(rows) == list(range(len(SAMPLES)))
    return {str(i): row for i, row in rows.items()}


def resume(cell: Cell, kind: type[Job] = Plain) -> dict[str, Tensor]:
    saver = ModelCheckpoint(cell.folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    cell.fit(kind(), max_steps=2, callbacks=[saver], enable_checkpointing=True)
    module = kind()
    trainer = cell.fit(module, max_steps=4, ckpt_path=f"{cell.folder}/step=2.ckpt")
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return full_parameters(module.model) | {"logged rates": torch.tensor(rates, dtype=torch.float64)}


def lr_find(cell: Cell) -> dict[str, Tensor]:
    module = Plain()
    module.lr = 1e-3
    trainer = cell.trainer(gradient_clip_val=None, max_steps=8)
    before = full_parameters(module.model)
    cwd = Path.cwd()
    os.chdir(cell.folder)  # Lightning keeps what it had there
    try:
        finder = Tuner(trainer).lr_find(module, given(), num_training=6, min_lr=1e-5)
    finally:
        os.chdir(cwd)
    assert finder is not None
    after = full_parameters(module.model)
    assert largest_error(after, {name: before[name] for name in after}) == 0.0
    return {"logged losses": torch.tensor(finder.results["loss"], dtype=torch.float64)}


def stop_early(cell: Cell) -> dict[str, Tensor]:
    module = Plain()
    stop = EarlyStopping("val/loss", min_delta=10.0, patience=1, check_on_train_epoch_end=False)
    trainer = cell.fit(module, callbacks=[stop], val_check_interval=1, max_steps=8)
    assert trainer.global_step == 2
    return full_parameters(module.model) | {"logged best": stop.best_score.double()}


def manual(cell: Cell) -> dict[str, Tensor]:
    """Train a pack a rank; one process makes of the same packs one step by hand."""
    module = Manual()
    cell.fit(module, Packs(cell.dp), gradient_clip_val=None)
    return full_parameters(module.model)


def packs_by_hand(step: Packs, dp: int, layout: Layout) -> dict[str, Tensor]:
    """Train on the sequences of every step's packs, one by one: alignment changes which these are."""
    samples = sequences(80, labels=True)
    lengths = [len(sample["input_ids"]) for sample in samples]
    planner = PackPlanner(lengths, CAPACITY, global_batch=step, align=layout.align)
    model = Job().model
    batches = ([samples[i] for i in ids] for ids in planned(planner, STEPS, dp))
    return train_alone(model, batches, make_optimizer(model), clip=CLIP)[0]


def accumulate(cell: Cell) -> dict[str, Tensor]:
    module = Plain()
    cell.fit(module, Packs(4), accumulate_grad_batches=4 // cell.dp)
    return full_parameters(module.model)


def swa(cell: Cell) -> dict[str, Tensor]:
    average = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1)
    run = weights_after(Plain, callbacks=[average], max_steps=-1, max_epochs=3, limit_train_batches=2)
    return dict(run(cell))


def ema(cell: Cell) -> dict[str, Tensor]:
    """Average weights, and go on from a checkpoint with them; returns the norms of gradients too."""
    options: dict[str, Any] = {"max_steps": 3, "val_check_interval": 2, "num_sanity_val_steps": 1}
    saver = ModelCheckpoint(cell.folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    module = Normed()
    again = Plain()
    callbacks = [EMAWeightAveraging(decay=0.5), saver]
    trainer = cell.fit(module, callbacks=callbacks, enable_checkpointing=True, **options)
    path = f"{cell.folder}/step=2.ckpt"
    cell.fit(again, callbacks=[EMAWeightAveraging(decay=0.5)], ckpt_path=path, **options)
    resumed = {f"resumed {name}": value for name, value in full_parameters(again.model).items()}
    return full_parameters(module.model) | resumed | logged(trainer) | module.norms


def fit_twice(cell: Cell) -> dict[str, Tensor]:
    """Fit, go on with the same Trainer, and again with another, in between an evaluation."""
    module = Plain()
    trainer = cell.trainer(max_steps=2)
    trainer.fit(module, given(multiple=cell.multiple))
    trainer.fit_loop.epoch_loop.max_steps = 3
    trainer.fit(module, given(multiple=cell.multiple))
    cell.trainer().validate(module, given(multiple=cell.multiple), verbose=False)
    cell.trainer().predict(module, given(multiple=cell.multiple))
    cell.trainer(max_steps=2).fit(module, given(multiple=cell.multiple))
    return full_parameters(module.model)


def packs_validated_in_between(cell: Cell) -> dict[str, Tensor]:
    module = Plain()
    options = {**EPOCHS, "check_val_every_n_epoch": None, "val_check_interval": 3, "limit_train_batches": 4}
    trainer = cell.fit(module, Packs(2 * cell.dp), accumulate_grad_batches=2, **options)
    return full_parameters(module.model) | logged(trainer)


EPOCHS: dict[str, Any] = {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 2}
FEATURES: dict[str, Callable[[Cell], dict[str, Tensor]]] = {
    "fit": weights_after(Plain),
    "validate": lambda cell: evaluate(cell, "validate"),
    "test": lambda cell: evaluate(cell, "test"),
    "predict": predict,
    "resume": resume,
    "groups": lambda cell: resume(cell, Grouped),
    "ema": ema,
    "swa": swa,
    "lr_find": lr_find,
    "early stopping": stop_early,
    "clip norm": weights_after(Plain, gradient_clip_val=0.1),
    "clip value": weights_after(Plain, gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "frozen": weights_after(Frozen),
    "lora": weights_after(Adapted),
    "recomputed": weights_after(Recomputed),
    "accumulate": accumulate,
    "manual": manual,
    "compile": weights_after(CompiledInside),
    "logs": weights_after(LogsEverywhere, val_check_interval=1, max_steps=3),
    "sums": weights_after(Sums, val_check_interval=2, max_steps=4),
    "plateau": weights_after(Watching, **EPOCHS),
    "fit twice": fit_twice,
    "metrics": weights_after(Measured, val_check_interval=2, max_steps=4),
    "counts": weights_after(Counting, val_check_interval=2, max_steps=4),
    "thawed": weights_after(Plain, callbacks=lambda: [Thaw()]),
    "frozen later": weights_after(FreezesLater, **EPOCHS),
    "validated in between": packs_validated_in_between,
    "fused": weights_after(Fused),
}
BY_HAND = ("manual", "accumulate")
# Here lengths are such that no layout pads: the values of single packs are compared.
UNPADDED = set(list(FEATURES)[list(FEATURES).index("logs") :])
ROWS = [
    *[("thd", "one"), ("own_one_device", "one")],
    *[(name, layout) for name in ("thd_ddp", "own_ddp") for layout in ("dp2", "cp2", "dp2cp2")],
    *[
        (name, layout)
        for name in ("thd_model_parallel", "own_model_parallel")
        for layout in LAYOUTS
        if layout not in ("one", "pp2")
    ],
    ("thd_model_parallel", "pp2"),
]


def run_cell(feature: str, strategy: str, layout: str, folder: str) -> dict[str, Tensor]:
    """Run one cell on this rank."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(dist.get_rank())
    place = Path(folder) / strategy / layout / feature.replace(" ", "_")
    place.mkdir(parents=True, exist_ok=True)
    result = FEATURES[feature](cell_of(feature, strategy, layout, str(place)))
    return result if layout_of(layout).pp == 1 else of_all_stages(result)


def cell_of(feature: str, strategy: str, layout: str, folder: str) -> Cell:
    return Cell(strategy=strategy, layout=layout, folder=folder, multiple=4 if feature in UNPADDED else 1)


def of_all_stages(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add what the other stages have found; what several have must be the same."""
    stages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(stages, found)
    whole: dict[str, Tensor] = {}
    for name, value in (item for stage in stages for item in stage.items()):
        torch.testing.assert_close(value, whole.setdefault(name, value), rtol=1e-9, atol=0.0)
    return whole


def one_process(features: list[str]) -> dict[str, dict[str, Tensor]]:
    """Return what one process makes of the features, on Lightning's own loop or by hand."""
    warnings.filterwarnings("ignore")
    results: dict[str, dict[str, Tensor]] = {}
    for feature in features:
        with tempfile.TemporaryDirectory() as folder:
            if feature not in BY_HAND:
                results[feature] = FEATURES[feature](cell_of(feature, "thd", "one", folder))
                continue
            for dp, cp in ((1, 1), (1, 2), (2, 1), (2, 2)):
                step = Packs(dp if feature == "manual" else 4)
                results[f"{feature} {dp} {cp}"] = packs_by_hand(step, dp, Layout(dp=dp, cp=cp))
    return results


def oracle_of(feature: str, layout: str) -> str:
    """Name what ``one_process`` has found for a cell."""
    place = layout_of(layout)
    return f"{feature} {place.dp} {place.cp}" if feature in BY_HAND else feature


def error_of(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, float]:
    """Return the largest relative errors of weights and of what Lightning logged, in fp32."""
    found = {name: value for name, value in found.items() if "context_parallel/" not in name}
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    logs = {name for name in wanted if name.startswith("logged ")}
    parts = [{n: v for n, v in found.items() if (n in logs) == kind} for kind in (False, True)]
    errors = [largest_error(part, {n: wanted[n] for n in part}) if part else 0.0 for part in parts]
    return tuple(math.inf if math.isnan(error) else error for error in errors)  # type: ignore[return-value]
