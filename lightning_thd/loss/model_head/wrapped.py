"""A language model under its wrappers -> the model itself, its head's operands, its head's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_thd.loss.dtensors import is_dtensor, local_hidden, plain, vocabulary_group
from lightning_thd.loss.prepare import Call
from lightning_thd.loss.tiles.logit_map import LogitMap
from lightning_thd.models.inputs.adapters import refuse_losing_adapters


def language_model(model: nn.Module) -> Any:
    """Unwrap DDP, torch.compile and PEFT down to the module that owns the head.

    Raises:
        ValueError: when there is none, or it would leak across sequences.
    """
    inner: Any = model
    while True:
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif hasattr(inner, "get_base_model"):
            refuse_losing_adapters(inner)
            inner = inner.get_base_model()
        elif not hasattr(inner, "get_output_embeddings") and isinstance(
            getattr(inner, "module", None), nn.Module
        ):
            inner = inner.module
        else:
            break
    if not hasattr(inner, "get_output_embeddings") or not hasattr(inner, "config"):
        raise ValueError(
            f"causal_lm_loss got a {type(inner).__name__}, wanted a Hugging Face causal language model "
            "(with get_output_embeddings() and config). For another model, call "
            "loss.fused_linear_cross_entropy(hidden, weight, batch.targets) on its last hidden states."
        )
    if not isinstance(inner.get_output_embeddings(), nn.Module):
        raise ValueError(
            f"causal_lm_loss got a {type(inner).__name__} without a language model's head "
            f"(get_output_embeddings() gives {inner.get_output_embeddings()!r}). Load it as "
            "AutoModelForCausalLM."
        )
    _check_attention(inner)
    return inner


def _check_attention(inner: Any) -> None:
    implementation = getattr(text_config(inner), "_attn_implementation", None)
    if implementation == "thd":
        return
    raise ValueError(
        f"{type(inner).__name__} runs attn_implementation={implementation!r}, which can let packed sequences "
        "see each other without an error. Load it with attn_implementation='thd', or call "
        "model.set_attn_implementation('thd')."
    )


def text_config(inner: Any) -> Any:
    """Return the config of the language model, which for a multimodal model is its text part."""
    return inner.config.get_text_config(decoder=True)


def guess_logit_map(inner: Any) -> LogitMap:
    """Read the usual logit scale and cap from the config; the model's call checks them."""
    config = text_config(inner)
    scale = getattr(config, "logit_scale", None) or 1.0
    if getattr(config, "logits_scaling", None):
        scale /= config.logits_scaling
    softcap = getattr(config, "final_logit_softcapping", None)
    return LogitMap(scale=float(scale), softcap=None if softcap is None else float(softcap))


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOperands:
    """Hidden states, weight, bias and LoRA of a head, as plain tensors on this rank.

    Attributes:
        hidden: ``[..., T, H]``.
        weight: ``[V, H]``, or this rank's rows of it.
        bias: ``[V]``, likewise.
        low_rank: a LoRA's ``(x [..., T, r], weight [V, r])``.
        tp_group: ranks that share the vocabulary.
        partial_hidden: the caller reduces the gradient of ``hidden`` over the group.
        vocabulary: V over all ranks.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    low_rank: tuple[Tensor, Tensor] | None
    tp_group: dist.ProcessGroup | None
    partial_hidden: bool
    vocabulary: int

    def call(self, targets: Tensor, logit_map: LogitMap) -> Call:
        """Build the arguments of a fused loss, with one target a slot."""
        return Call(
            hidden=self.hidden,
            weight=self.weight,
            targets=targets.view(self.hidden.shape[:-1]),
            bias=self.bias,
            logit_map=logit_map,
            low_rank=self.low_rank,
            tp_group=self.tp_group,
            partial_hidden=self.partial_hidden,
        )


def head_operands(head: nn.Module, hidden: Tensor) -> HeadOperands:
    """Read a head's operands, perhaps PEFT's, during its forward call, when FSDP2 has gathered its weight.

    Raises:
        ValueError: for a head that does more than multiply and add.
    """
    head = _active_copy(head)
    base: Any = getattr(head, "base_layer", head)
    weight, bias = getattr(base, "weight", None), getattr(base, "bias", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise ValueError(
            f"The model's head is a {type(base).__name__} without a weight [V, H]; causal_lm_loss follows "
            "nn.Linear and its like, LoRA included. Use the model's own logits for this head."
        )
    _refuse_rows_of_hooks(base)
    low_rank = _low_rank(head, hidden) if base is not head else None
    group, partial = None, False
    if is_dtensor(weight):
        group = vocabulary_group(weight)
        weight, bias = plain(weight), None if bias is None else plain(bias)
    if is_dtensor(hidden):
        hidden, partial = local_hidden(hidden, group, low_rank is None)
    if low_rank is not None:
        low_rank = (plain(low_rank[0]), plain(low_rank[1]))
    ranks = 1 if group is None else dist.get_world_size(group)
    return HeadOperands(
        hidden=hidden,
        weight=weight,
        bias=bias,
        low_rank=low_rank,
        tp_group=group,
        partial_hidden=partial,
        vocabulary=weight.shape[0] * ranks,
    )


def base_of(head: nn.Module) -> Any:
    """Return the layer that multiplies by the head's weight, under PEFT's wrappers."""
    active: Any = _active_copy(head)
    return getattr(active, "base_layer", active)


def _refuse_rows_of_hooks(base: Any) -> None:
    """Refuse a head of which this rank holds some rows as a plain weight, and hooks gather the logits."""
    plan, mesh = getattr(base, "_hf_tp_plan", None), getattr(base, "_hf_device_mesh", None)
    if plan is None or mesh is None or mesh.size() == 1 or is_dtensor(base.weight):
        return
    raise ValueError(
        f"transformers cut the model's head over {mesh.size()} ranks ({plan!r}) and left plain weights, of "
        "which a loss would see this rank's vocabulary alone. Install transformers>=5.16, which leaves "
        "DTensors, or cut the model by THDModelParallelStrategy(tensor_parallel_size=...)."
    )


def _active_copy(head: Any) -> nn.Module:
    """Return the trained copy behind PEFT's ``modules_to_save``."""
    if hasattr(head, "modules_to_save") and hasattr(head, "original_module"):
        name = head.active_adapters[0] if getattr(head, "active_adapters", None) else None
        if getattr(head, "disable_adapters", False) or name not in head.modules_to_save:
            return _active_copy(head.original_module)
        return _active_copy(head.modules_to_save[name])
    module: nn.Module = head
    return module


def _low_rank(head: Any, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
    """Compute the inner product of active LoRA adapters and return it with their outer weights."""
    if not hasattr(head, "lora_A"):
        kind, place = type(head).__name__, type(head).__module__
        kind = f"{place}.{kind}" if place.startswith("peft.") else kind  # where many are called Linear
        raise ValueError(
            f"The model's head is wrapped in a {kind}; causal_lm_loss follows LoRA and modules_to_save. "
            "Leave lm_head out of target_modules, or use the model's own logits."
        )
    if head.disable_adapters and head.merged:
        head.unmerge()
    names = [name for name in head.active_adapters if name in head.lora_A]
    if head.disable_adapters or head.merged or not names:
        return None
    parts = []
    for name in names:
        if name in getattr(head, "lora_variant", ()) or getattr(head.lora_B[name], "bias", None) is not None:
            raise ValueError(
                f"The head's adapter {name!r} is a LoRA variant (DoRA or one with a bias), wanted plain "
                "LoRA. Leave lm_head out of target_modules, or use the model's own logits."
            )
        down, up = head.lora_A[name], head.lora_B[name].weight
        x = down(head.lora_dropout[name](hidden.to(down.weight.dtype))) * head.scaling[name]
        parts.append((x, up))
    x = torch.cat([x for x, _ in parts], dim=-1) if len(parts) > 1 else parts[0][0]
    up = torch.cat([up for _, up in parts], dim=1) if len(parts) > 1 else parts[0][1]
    return x, up
