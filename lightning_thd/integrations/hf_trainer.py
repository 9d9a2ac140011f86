"""A Hugging Face Trainer class -> the same class on packs: its data, its loss, its FLOPs, its logs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_thd._imports import require
from lightning_thd.batch import THDBatch
from lightning_thd.callbacks.measuring.across_ranks import communication_device
from lightning_thd.callbacks.measuring.device_peak import compute_dtype, resolve_peak
from lightning_thd.callbacks.measuring.models import find_model
from lightning_thd.callbacks.measuring.stage import Setting, Stage
from lightning_thd.data import THDDataModule
from lightning_thd.data.store.index import MapDataset
from lightning_thd.loss import causal_lm_loss
from lightning_thd.packing import Packs

_MASKS = ("completion_mask", "assistant_masks")  # TRL's columns: 1 where a token is to be learned


def packed_trainer(trainer_class: type | None = None) -> type:
    """Make a Hugging Face Trainer class train on packs.

    ``packed_trainer()(model=model, args=args, train_dataset=dataset, capacity=8192)``, and the same around
    TRL's ``SFTTrainer`` with ``packing=False``. ``per_device_train_batch_size`` is unused: a batch is a pack.

    Args:
        trainer_class: ``transformers.Trainer`` by default, or a subclass.

    Returns:
        A subclass that takes, beside the arguments of its base, ``capacity`` (most tokens of a pack),
        ``peak`` (see ``THDThroughputMonitor``) and ``data_kwargs``, further arguments of ``THDDataModule``.
        Gradient accumulation, several devices, resuming, reporters and evaluation work as in its base; the
        loss of a step is the mean over its loss tokens, whatever ``average_tokens_across_devices`` says.
    """
    base = trainer_class or require("transformers", feature="packed_trainer").Trainer
    return type(f"Packed{base.__name__}", (_PackedTrainerMixin, base), {"__doc__": base.__doc__})


class _WithLabels:
    """Turns a dataset's masks of learned tokens, where it has them, into labels."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> dict[str, Any]:
        sample = self._dataset[i]
        kept = {name: sample[name] for name in ("input_ids", "labels") if name in sample}
        masks = [np.asarray(sample[name]) for name in _MASKS if name in sample]
        if masks and "labels" not in kept:
            learned = np.logical_and.reduce(masks)
            kept["labels"] = np.where(learned, np.asarray(sample["input_ids"]), -100)
        return kept


class _Loader(DataLoader[Any]):
    """Loads batches by keys from a batch sampler, so that Trainer and Accelerate can skip them on resume."""

    def set_epoch(self, epoch: int) -> None:
        sampler = self.batch_sampler
        cast("_Keys", sampler).set_epoch(epoch)


class _Keys:
    """Presents the cursor of a ``THDLoader`` as a batch sampler of one key a batch."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

    def __len__(self) -> int:
        return len(self._cursor)

    def __iter__(self) -> Iterator[list[Any]]:
        return ([key] for key in self._cursor)

    def set_epoch(self, epoch: int) -> None:
        self._cursor.set_epoch(epoch)


class _Sized:
    """Presents the batches of a rank as a dataset with a length, which Trainer asks for."""

    def __init__(self, steps: Any, length: int) -> None:
        self._steps, self._length = steps, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: Any) -> THDBatch:
        return cast("THDBatch", self._steps[key])


def _first(items: list[THDBatch]) -> dict[str, THDBatch]:
    return {"batch": items[0]}


class _PackedTrainerMixin:
    loss_is_scaled_for_ga = False  # Trainer divides by the accumulation steps, as loss_scale expects
    args: Any
    model: nn.Module
    state: Any
    accelerator: Any

    def __init__(
        self,
        *args: Any,
        capacity: int,
        peak: Literal["auto", "measure"] | float = "auto",
        data_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("data_collator") is not None:
            raise ValueError(
                f"data_collator={type(kwargs['data_collator']).__name__} would pad or stack what is packed "
                "here. Leave it out: packed_trainer collates by itself."
            )
        super().__init__(*args, **kwargs)
        self._capacity, self._peak, self._data_kwargs = capacity, peak, dict(data_kwargs or {})
        self._stage = Stage("train", "training", time.perf_counter)
        self._setting: Setting | None = None
        self._refuse_settings()

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of this rank's training packs."""
        accumulate = self.args.gradient_accumulation_steps
        data = THDDataModule(
            self._dataset(self.train_dataset),  # type: ignore[attr-defined]
            capacity=self._capacity,
            num_workers=self.args.dataloader_num_workers,
            **{"seed": self.args.seed, **self._data_kwargs},
        )
        data.attach(
            rank=self.args.process_index,
            ranks=self.args.world_size,
            accumulate=accumulate,
            model=self.model,
        )
        data.setup("fit")
        return self._wrap(data.train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return a loader of this rank's evaluation packs, which hold every sequence once."""
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset  # type: ignore[attr-defined]
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]  # type: ignore[attr-defined]
        data = THDDataModule(val=self._dataset(dataset), capacity=self._capacity)
        data.attach(rank=self.args.process_index, ranks=self.args.world_size)
        data.setup("validate")
        return self._wrap(data.val_dataloader())

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, THDBatch],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Return the pack's share of the step's mean loss."""
        return causal_lm_loss(model, inputs["batch"].to(self.args.device))

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Train on a pack and add its tokens to the throughput counters."""
        self._stage.resume(self._ready)
        loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        self._stage.meter.add(inputs["batch"])
        return cast("Tensor", loss)

    def floating_point_ops(self, inputs: dict[str, THDBatch]) -> int:
        """Return the FLOPs of a pack from the lengths of its sequences; 0 where the model's are not known."""
        flops_model = self._ready.model
        if flops_model is None:
            return 0
        stats = inputs["batch"].stats.from_lengths(inputs["batch"].lengths, windows=flops_model.windows)
        return int(flops_model.training_flops(stats).model)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add throughput, MFU and packing to the Trainer's own logs."""
        if "loss" in logs and self._setting is not None:
            ours = self._stage.close(self._setting)  # reporters put "train/" before every key themselves
            logs = {**logs, **{key.removeprefix("train/"): value for key, value in ours.items()}}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return and log the mean loss over all loss tokens of the evaluation set."""
        begin = time.perf_counter()
        with self._paused(), torch.no_grad():
            total = torch.zeros(3, dtype=torch.float64)
            was_training = self.model.training
            self.model.eval()
            for inputs in self.get_eval_dataloader(eval_dataset):
                batch = inputs["batch"].to(self.args.device)
                total[0] += float(causal_lm_loss(self.model, batch.replace(loss_scale=1.0)))
                total[1] += 1.0 / batch.loss_scale if batch.loss_scale else 0.0  # their weight
                total[2] += batch.loss_tokens
            self.model.train(was_training)
            if dist.is_initialized():
                total = total.to(communication_device(None, self.args.device))
                dist.all_reduce(total)
        metrics = {
            f"{metric_key_prefix}_loss": float(total[0] / total[1]) if total[1] else 0.0,
            f"{metric_key_prefix}_loss_tokens": float(total[2]),
            f"{metric_key_prefix}_runtime": time.perf_counter() - begin,
        }
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(  # type: ignore[attr-defined]
            self.args,
            self.state,
            self.control,  # type: ignore[has-type]
            metrics,
        )
        return metrics

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._paused():
            super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _paused(self) -> Iterator[None]:
        setting = self._setting
        running = setting is not None and self._stage.pause(setting)
        yield
        if running and setting is not None:
            self._stage.resume(setting)

    @property
    def _ready(self) -> Setting:
        if self._setting is None:
            device = torch.device(self.args.device)
            self._setting = Setting(
                model=find_model(self.model, causal="half", tokens="real", recompute="auto"),
                peak=resolve_peak(self._peak, device, compute_dtype(self, self.model)),
                group=None,
                device=device,
                wire=communication_device(None, device),
                devices=self.args.world_size,
                ranks=self.args.world_size,
            )
        return self._setting

    @property
    def precision(self) -> str:
        """Return the Trainer's precision under Lightning's name."""
        return "bf16-mixed" if self.args.bf16 else "16-mixed" if self.args.fp16 else "32-true"

    def _dataset(self, dataset: Any) -> MapDataset:
        if dataset is None:
            raise ValueError("The Trainer has no dataset to pack. Pass train_dataset (and eval_dataset).")
        if not hasattr(dataset, "__len__"):
            raise ValueError(
                f"{type(dataset).__name__} has no length, so its sequences cannot be planned. "
                "Pass a map-style dataset."
            )
        return cast("MapDataset", _WithLabels(dataset))

    def _wrap(self, loader: Any) -> DataLoader[Any]:
        inner = loader._loader
        return _Loader(
            cast("Any", _Sized(inner.dataset, len(loader))),
            batch_sampler=cast("Any", _Keys(loader._cursor)),
            collate_fn=_first,
            num_workers=inner.num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.device(self.args.device).type == "cuda",
        )

    def _refuse_settings(self) -> None:
        config = getattr(self.accelerator, "parallelism_config", None)
        if config is not None and (config.cp_enabled or config.sp_enabled or config.tp_enabled):
            raise ValueError(
                f"packed_trainer runs data parallel, but the accelerator has {config}. Its context "
                "parallelism would let documents see each other. Use Lightning with THDModelParallelStrategy."
            )
        for name in ("packing", "padding_free"):
            if getattr(self.args, name, False):
                raise ValueError(
                    f"{type(self.args).__name__}({name}=True) packs by itself, before packed_trainer does. "
                    f"Set {name}=False; capacity={self._capacity} says how long a pack is."
                )
        if isinstance(self._data_kwargs.get("global_batch"), Packs):
            return
        if self._data_kwargs.get("global_batch") is not None:
            raise ValueError(
                f"global_batch={self._data_kwargs['global_batch']}: a Trainer's step is a fixed number of "
                "packs. Use gradient_accumulation_steps, or prepare_thd for Sequences(n)."
            )
