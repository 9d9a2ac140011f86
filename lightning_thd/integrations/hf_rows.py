"""A padded batch of TRL's pair and group trainers -> one pack for the model, and its outputs as rows.

Their losses compare rows: chosen with rejected ones, or the completions of a group. So only the
model runs on a pack, of all rows of a batch. Data, losses, reference passes and metrics stay TRL's.

Legend: B rows, N columns, T real tokens of the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_thd._find import unwrapped
from lightning_thd.batch import THDBatch
from lightning_thd.integrations.hf_data import TrainerBase
from lightning_thd.integrations.hf_options import refuse_engines
from lightning_thd.models.announce import NAME, run_as_pack

# TRL's trainers whose rows go into one pack, by name: TRL is imported by whoever passes one.
ROW_TRAINERS = frozenset({"DPOTrainer", "RewardTrainer", "GRPOTrainer"})
_OF_ROWS = frozenset({"input_ids", "attention_mask", "labels", "fused_lm_head", "use_cache"})
_KEPT = frozenset({"output_router_logits", "num_items_in_batch", "return_dict"})

# Option: (whether a value is refused, why). All others mean what TRL says.
REFUSED_FOR_ROWS: dict[str, str] = {
    "padding_free": "packs by itself, before packed_trainer does",
    "use_liger_kernel": "replaces parts of the model that run on packs here",
    "torch_compile": "compiles the model for rows of one shape, and every pack has another",
    "deepspeed": "runs the model in an engine of its own",
    "neftune_noise_alpha": "scales its noise by the length of the row, which is the whole pack's",
    "use_transformers_continuous_batching": "generates with an attention that packs by itself",
    "use_transformers_paged": "generates with an attention that packs by itself",
}


class PackedRowsMixin(TrainerBase):  # type: ignore[misc]
    """Makes the models of a TRL trainer run every padded batch as one pack; ``packed_trainer`` applies it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ours = sorted(kwargs.keys() & {"capacity", "peak", "data_kwargs"})
        if ours:
            raise TypeError(
                f"{type(self).__name__} got {', '.join(ours)}, but a pack is what a batch of "
                "per_device_train_batch_size rows holds. Leave it out."
            )
        super().__init__(*args, **kwargs)
        refuse_engines(self)
        self._refuse_what_rows_cannot()
        self._pack_models()

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        self._pack_models()  # DPO's constructor may run its reference model already
        return super()._precompute_ref_logps(*args, **kwargs)

    def _pack_models(self) -> None:
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None:
                pack_rows(unwrapped(self.accelerator.unwrap_model(model)))

    def _refuse_what_rows_cannot(self) -> None:
        for name, why in REFUSED_FOR_ROWS.items():
            value = getattr(self.args, name, None)
            if value:
                raise ValueError(
                    f"{type(self.args).__name__}({name}={value!r}) {why}. Leave it at its default."
                )


def pack_rows(model: Any) -> None:
    """Make a transformers model run padded rows as one pack, in place; the rows it returns are the same.

    TRL's call for log-probabilities (``fused_lm_head=True``) and a sequence classifier's are packed. Any
    other, generation above all, runs on padded rows with the attention the model had before.
    """
    if getattr(model, "_thd_packs_rows", False):
        return
    others = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    model._thd_packs_rows = True
    model._thd_other_attention = "eager" if others == NAME else others
    model._thd_padded_forward = model.forward
    signature = inspect.signature(model.forward)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _forward_rows(self, *args, **kwargs)

    forward.__signature__ = signature.replace(  # type: ignore[attr-defined]  # which generation reads
        parameters=[itself, *signature.parameters.values()]
    )
    model.forward = MethodType(forward, model)  # bound, so that a copy's forward is the copy's


def _forward_rows(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a model's call for log-probabilities or classes as a pack, and any other as it was."""
    classifies = "ForSequenceClassification" in type(model).__name__
    if kwargs.get("fused_lm_head") or (classifies and kwargs.get("attention_mask") is not None):
        return _run(model, model._thd_padded_forward, kwargs)
    with _attention(model, model._thd_other_attention):
        return model._thd_padded_forward(*args, **kwargs)


def _run(model: Any, forward: Callable[..., Any], given: dict[str, Any]) -> Any:
    unknown = [name for name, value in given.items() if value is not None and name not in _OF_ROWS | _KEPT]
    if unknown or given.get("use_cache"):
        raise ValueError(
            f"{type(model).__name__} got {', '.join(unknown) or 'use_cache=True'} beside padded rows, and "
            "packed_trainer packs only rows of text. Use TRL's trainer as it is."
        )
    rows = given["input_ids"]
    mask = torch.ones_like(rows) if given.get("attention_mask") is None else given["attention_mask"]
    batch = THDBatch.from_padded(rows, mask, given.get("labels"))
    told = {name: given[name] for name in _KEPT if given.get(name) is not None}
    if given.get("fused_lm_head"):
        told |= {"fused_lm_head": True, "shift_labels": batch.targets[None]}
    output = run_as_pack(model, forward, batch, **told)
    if given.get("fused_lm_head"):
        for name, value in list(output.items()):
            if isinstance(value, Tensor) and value.ndim == 2 and value.shape == (1, sum(batch.lengths)):
                output[name] = _rows(value[0], mask.bool())
    return output


def _rows(values: Tensor, mask: Tensor) -> Tensor:
    """Arrange one value a token ``[T]`` as TRL's rows ``[B, N - 1]``, 0 for tokens that nothing predicts."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)[:, :-1]


@contextmanager
def _attention(model: nn.Module, name: str) -> Generator[None]:
    """Switch a model's layers from "thd" to another attention inside this context."""
    recomputes = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if torch.is_grad_enabled() and recomputes and model.training:
        raise ValueError(
            f"{type(model).__name__} was called on padded rows for something else than log-probabilities, "
            "with gradients and gradient checkpointing. Call it under torch.no_grad()."
        )
    configs = {id(config): config for module in model.modules() for config in _configs(module)}
    chosen = [config for config in configs.values() if config._attn_implementation == NAME]
    for config in chosen:
        config._attn_implementation_internal = name  # the public name would switch towers too
    try:
        yield
    finally:
        for config in chosen:
            config._attn_implementation_internal = NAME


def _configs(module: nn.Module) -> list[Any]:
    config: Any = getattr(module, "config", None)
    return [config] if hasattr(config, "_attn_implementation") else []
