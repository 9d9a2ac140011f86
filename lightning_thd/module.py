"""A Hugging Face causal language model -> a LightningModule that trains it on packed batches."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, cast

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from lightning_thd._checks import choice, described, refuse_missing
from lightning_thd._imports import require
from lightning_thd._private import set_private
from lightning_thd._trainer import trainer_of
from lightning_thd.batch import THDBatch
from lightning_thd.callbacks.loggers import logs_now
from lightning_thd.loss import causal_lm_loss
from lightning_thd.loss.router_balance import RouterBalance, checked_balance
from lightning_thd.parallel.fsdp import layers_of
from lightning_thd.strategies.checkpoints import read_folder

ATTENTION = "thd"
# What FSDP1 and activation checkpointing add to the names of parameters.
_WRAPPERS = r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\."


def adamw(
    groups: Iterable[Tensor] | Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float]
) -> torch.optim.AdamW:
    """Build AdamW; it is fused if all parameters are unsharded floats on a CPU or CUDA device."""
    items: list[Any] = list(groups)  # parameters, or dicts of options with "params"
    parameters: list[Tensor] = []
    for item in items:
        parameters += item["params"] if isinstance(item, dict) else [item]
    fused = bool(parameters) and all(_may_fuse(parameter) for parameter in parameters)
    optimizer = torch.optim.AdamW(items, lr=lr, betas=betas, fused=fused or None)
    if fused:
        # Lightning refuses to clip in mixed precision if the optimizer unscales gradients itself. With this
        # flag off, GradScaler and Lightning unscale before the step, as for any other optimizer.
        set_private(optimizer, "torch.optim.AdamW._step_supports_amp_scaling", False)
    return optimizer


def warmup_and_cosine(step: int, *, steps: int, warmup_fraction: float, final: float) -> float:
    """Return a step's share of the peak rate: a linear rise, then half a cosine down to ``final``."""
    # Stateless: a schedule that restored its number of steps would be wrong in a resumed run with more steps.
    warmup = min(steps - 1, max(1, round(warmup_fraction * steps)))
    if step < warmup:
        return (step + 1) / (warmup + 1)
    passed = min(1.0, (step - warmup) / (steps - warmup))
    return final + (1 - final) * (1 + math.cos(math.pi * passed)) / 2


def _may_fuse(parameter: Tensor) -> bool:
    """Return whether torch's fused AdamW takes a parameter: a DTensor or quantized weight has a subclass."""
    is_plain = type(parameter) in (Tensor, nn.Parameter)
    return is_plain and parameter.device.type in ("cpu", "cuda") and parameter.is_floating_point()


_MISSPELT = 0.93  # if difflib finds two names at least this similar, one is a misspelling of the other


def _refuse_misspelt(arguments: Iterable[str], make: Callable[[], Any]) -> None:
    """Refuse arguments whose names resemble known ones, because a config silently accepts any name."""
    try:
        default = make()
    except Exception:  # a few configs cannot be made without arguments
        return

    names = (*default.to_dict(), *vars(default), *default.attribute_map)
    read_names = {name.lstrip("_") for name in names}
    for name in arguments:
        if name.lstrip("_") in read_names or hasattr(type(default), name):
            continue
        similar = get_close_matches(name, read_names, 1, _MISSPELT)
        if similar:
            raise ValueError(
                f"config holds {name!r}, which {type(default).__name__} does not read; did you mean "
                f"{similar[0]!r}?"
            )


class CausalLMModule(L.LightningModule):
    """Trains any Hugging Face causal language model on packs with AdamW, warm-up and cosine decay.

    Your own module needs only ``loss = causal_lm_loss(self.model, batch)``. Checkpoints hold the arguments:
    call ``CausalLMModule.load_from_checkpoint(path)``, and pass ``model=`` again if it was a module or a
    function.

    Args:
        model: a model built with ``attn_implementation="thd"``, a function that makes one, or the path or
            name of a saved model. The function is called in ``configure_model``, on the right device and
            dtype. A saved model is loaded in the dtype of the Trainer's precision (fp32 for ``"32-true"`` and
            ``"bf16-mixed"``), whatever dtype it was saved in.
        config: arguments of a Hugging Face config, with ``model_type``, instead of ``model``; weights are
            initialised in the dtype of the Trainer's precision.
        lr: peak learning rate.
        weight_decay: weight decay of AdamW for matrices; vectors are not decayed.
        betas: betas of AdamW.
        warmup_fraction: share of all steps, at least one step, in which the learning rate rises to ``lr``.
        final_lr_fraction: the learning rate after the last step, as a share of ``lr``.
        compile: ``layers`` compiles the model's layers with torch.compile; ``off`` runs eagerly. One compiled
            graph serves all layers and packs of any size.
        router_balance: the tokens over which experts are balanced, see ``causal_lm_loss``. Evaluation losses
            do not contain the balancing losses "sequence" and "step".

    Raises:
        ValueError: if not exactly one of ``model`` and ``config`` is given, or an argument is invalid.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module] | str | None = None,
        *,
        config: dict[str, Any] | None = None,
        lr: float = 3e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_fraction: float = 0.05,
        final_lr_fraction: float = 0.1,
        compile: Literal["off", "layers"] = "off",
        router_balance: RouterBalance | None = None,
    ) -> None:
        # The hyperparameters of checkpoints: all arguments but modules and functions, such as ``self``.
        arguments = {
            name: value for name, value in locals().items() if value is not None and not callable(value)
        }
        super().__init__()
        choice(compile, "compile", "off", "layers")
        checked_balance(router_balance)
        if (model is None) == (config is None):
            raise ValueError(
                f"CausalLMModule got model={described(model)} and config={described(config)}. Give exactly "
                "one of them."
            )
        if isinstance(model, str):
            refuse_missing(model, "Pass the folder of a saved model or its name, or config={...}.")
        if config is not None and "model_type" not in config:
            raise ValueError(
                f"config={config}: it names no model_type, for example {{'model_type': 'qwen3', ...}}."
            )
        for name, share in (("warmup_fraction", warmup_fraction), ("final_lr_fraction", final_lr_fraction)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name}={share}; wanted a share of all steps or of lr, from 0 to 1.")

        self.model: nn.Module | None = model if isinstance(model, nn.Module) else None
        self._make = model if not isinstance(model, nn.Module) else None  # a function, a path or a name
        self._config = config
        self._compile = compile
        self.lr = lr
        self.weight_decay = weight_decay
        self.betas = betas
        self.warmup_fraction = warmup_fraction
        self.final_lr_fraction = final_lr_fraction
        self.router_balance = router_balance
        self._matrices = set[str]()  # names of the parameters with two or more dimensions
        self._accumulated: Tensor | float = 0.0  # sum of a step's batch losses, each divided by their number
        # With several evaluation sets, each batch's summed loss and the weighted number of its loss tokens.
        self._losses: list[tuple[Tensor, float]] = []
        self.save_hyperparameters(arguments, logger=False)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Load a file as Lightning does, or a folder of sharded weights, which Lightning cannot open."""
        if isinstance(checkpoint_path, str | Path) and Path(checkpoint_path).is_dir():
            checkpoint = read_folder(Path(checkpoint_path), weights_only=kwargs.get("weights_only"))
            checkpoint_path = io.BytesIO()
            torch.save(checkpoint, checkpoint_path)
            checkpoint_path.seek(0)
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)

    def configure_model(self) -> None:
        """Build the model; the strategy has set the default device and dtype when it calls this hook."""
        if self.model is None:
            self.model = self._build().train()
        self._matrices |= {name for name, p in self.named_parameters() if p.ndim >= 2}  # FSDP1 flattens them
        if self._compile == "layers":
            for layer in layers_of(self.model):
                layer.compile(dynamic=True)
            self._compile = "off"  # Lightning calls this hook once for fit and once more for test

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        """Return the microbatch's loss; log it, unless batches accumulate: see ``on_train_batch_end``."""
        loss = causal_lm_loss(self._built, batch, router_balance=self.router_balance)
        trainer = trainer_of(self)
        if trainer is None or trainer.accumulate_grad_batches == 1:
            self.log("train/loss", loss.detach(), on_step=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the loss of accumulated batches, and show the loss in the progress bar when it is logged."""
        # Lightning logs once a step, after the last batch, and divides each loss by the number of batches.
        # With prog_bar=True it would read the loss from the device in every step.
        trainer = self.trainer
        batches = trainer.accumulate_grad_batches
        if batches > 1 and "loss" in outputs:
            before = self._accumulated if batch_idx % batches else 0.0
            self._accumulated = before + outputs["loss"].detach()
            self.log("train/loss", self._accumulated, on_step=True, on_epoch=False, sync_dist=True)

        if logs_now(trainer) and "train/loss" in trainer.callback_metrics:
            # The Trainer keeps what it shows in this dict.
            trainer.progress_bar_metrics["train/loss"] = float(trainer.callback_metrics["train/loss"])

    def validation_step(self, batch: THDBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the mean loss over all loss tokens of the evaluation set, or of each named set."""
        self._log_loss("val", batch, batch_idx, dataloader_idx)

    def test_step(self, batch: THDBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the mean loss over all loss tokens of the evaluation set, or of each named set."""
        self._log_loss("test", batch, batch_idx, dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        """Log the mean loss over the loss tokens of all validation sets, if there are several."""
        self._log_mean("val")

    def on_test_epoch_end(self) -> None:
        """Log the mean loss over the loss tokens of all test sets, if there are several."""
        self._log_mean("test")

    def _log_loss(self, stage: str, batch: THDBatch, batch_idx: int, dataloader_idx: int) -> None:
        """Log a batch's loss under its set's name, and keep it for the mean over several sets."""
        if batch_idx == dataloader_idx == 0:
            self._losses.clear()  # an interrupted evaluation leaves losses behind
        # With labels of sequences, self.log would weigh a batch by their number, not by its loss tokens.
        extras = {name: value for name, value in batch.extras.items() if name != "labels"}
        batch = batch.replace(extras=extras)
        if self.router_balance != "microbatch":
            batch = batch.replace(token_scale=0.0)  # leaves out the balancing loss
        loss = causal_lm_loss(self._built, batch, router_balance=self.router_balance)

        datamodule = getattr(self.trainer, "datamodule", None)
        set_names = getattr(datamodule, "set_names", {}).get(stage)
        options: Any = {"batch_size": next(iter(batch)).size(0), "on_epoch": True, "sync_dist": True}
        if not set_names:
            self.log(f"{stage}/loss", loss, prog_bar=stage == "val", **options)
            return
        self.log(f"{stage}/loss/{set_names[dataloader_idx]}", loss, add_dataloader_idx=False, **options)
        weight = 1.0 / batch.loss_scale if batch.loss_scale else 0.0  # the weighted number of loss tokens
        self._losses.append((loss.detach() * weight, weight))

    def _log_mean(self, stage: str) -> None:
        """Log one mean over several loaders and all ranks, because Lightning cannot compute it."""
        if not self._losses:
            return
        total = sum(weight for _, weight in self._losses)
        mean = torch.stack([loss for loss, _ in self._losses]).sum() / (total or 1.0)
        self._losses.clear()
        # With integer weights, Lightning rounds the mean over ranks down; with floats it is exact.
        batch_size: Any = total
        self.log(f"{stage}/loss", mean, prog_bar=stage == "val", batch_size=batch_size, sync_dist=True)

    def predict_step(
        self, batch: THDBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> list[tuple[int, Tensor]]:
        """Return (dataset index, logits ``[length, V]``) of every sequence."""
        inputs = batch.hf_kwargs()
        inputs.pop("labels", None)  # one per sequence, for classifiers
        logits = self._built(**inputs).logits
        return list(zip(batch.sequence_ids, batch.unpack(logits), strict=True))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return AdamW with linear warm-up and cosine decay over the Trainer's steps."""
        matrices: list[Tensor] = []
        vectors: list[Tensor] = []
        for name, parameter in self.named_parameters():
            if name.endswith("_flat_param") and self.weight_decay:
                raise ValueError(
                    "FSDP1 has joined matrices, which weight_decay is for, and vectors in one parameter. Set "
                    "FSDPStrategy(use_orig_params=True), or weight_decay=0."
                )
            if not parameter.requires_grad:
                continue
            if parameter.ndim >= 2 or re.sub(_WRAPPERS, "", name) in self._matrices:
                matrices.append(parameter)
            else:
                vectors.append(parameter)
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        optimizer = adamw(groups, lr=self.lr, betas=self.betas)

        steps = self.trainer.estimated_stepping_batches
        if math.isinf(steps):
            raise MisconfigurationException(
                "CausalLMModule decays its learning rate over all steps, but the Trainer does not know their "
                "number (a stream has no length). Set max_steps=, or override configure_optimizers."
            )
        shape: Any = {"warmup_fraction": self.warmup_fraction, "final": self.final_lr_fraction}
        rate = partial(warmup_and_cosine, steps=max(2, int(steps)), **shape)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @property
    def _built(self) -> nn.Module:
        """Return the model; raise if ``configure_model`` has not built it yet."""
        if self.model is None:
            raise RuntimeError("The model is not built yet. Call configure_model() first; a Trainer does.")
        return self.model

    def _build(self) -> nn.Module:
        """Build the model from the function, the path or the config that the user gave."""
        if callable(self._make):
            return self._make()

        transformers = require("transformers", feature="CausalLMModule with a config or a path")
        auto = transformers.AutoModelForCausalLM
        # Load in the Trainer's precision: else weights saved in bf16 would train in bf16 under "32-true".
        options = {"attn_implementation": ATTENTION, "dtype": torch.get_default_dtype()}
        if isinstance(self._make, str):
            return cast("nn.Module", auto.from_pretrained(self._make, **options))

        arguments = dict(self._config or {})
        kind = arguments.pop("model_type")
        _refuse_misspelt(arguments, partial(transformers.AutoConfig.for_model, kind))
        config = transformers.AutoConfig.for_model(kind, **arguments)
        return cast("nn.Module", auto.from_config(config, **options))
