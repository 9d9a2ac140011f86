"""A language model under its wrappers -> the model itself, its head's operands, its head's settings.

T slots, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_thd._find import text_config, unwrapped
from lightning_thd.loss.dtensors import is_dtensor, local_hidden, plain, vocabulary_group
from lightning_thd.loss.prepare import Call
from lightning_thd.loss.tiles.logits import LogitMap
from lightning_thd.models.refusals import refuse_losing_adapters

LINEAR_FORWARD = nn.Linear.forward


def language_model(model: nn.Module) -> Any:
    """Unwrap DDP, torch.compile and PEFT down to the model that owns the head, or refuse it."""
    inner: Any = unwrapped(model, on_peft=refuse_losing_adapters)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if not isinstance(head, nn.Module) or not hasattr(inner, "config"):
        raise ValueError(
            f"causal_lm_loss got a {type(inner).__name__}, wanted a Hugging Face causal language model. Load "
            "it as AutoModelForCausalLM, or call loss.fused_linear_cross_entropy(hidden, weight, "
            "batch.targets) on the last hidden states."
        )
    return inner


def guess_logit_map(inner: Any) -> LogitMap:
    """Read the usual logit scale and cap from the config; the model's call checks them."""
    config = text_config(inner.config)
    scale = getattr(config, "logit_scale", None) or 1.0
    if getattr(config, "logits_scaling", None):
        scale /= config.logits_scaling
    softcap = getattr(config, "final_logit_softcapping", None)
    return LogitMap(scale=float(scale), softcap=None if softcap is None else float(softcap))


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOperands:
    """Hidden states, weight and bias of a head as plain tensors on this rank, or logits without a weight."""

    hidden: Tensor  # ``[..., T, H]``; logits ``[..., T, V]`` if ``weight`` is None
    weight: Tensor | None  # ``[V, H]``, or this rank's rows of it
    bias: Tensor | None = None  # ``[V]``, or this rank's part of it
    tp_group: dist.ProcessGroup | None = None  # ranks that share the vocabulary
    partial_hidden: bool = False  # the caller reduces the gradient of ``hidden`` over the group
    vocabulary: int  # V over all ranks

    def at(self, slots: Tensor) -> HeadOperands:
        """Return operands with the hidden states of some slots, int64 ``[R]``, each perhaps several times."""
        return replace(self, hidden=self.hidden.flatten(0, -2).index_select(0, slots))

    def call(self, targets: Tensor, logit_map: LogitMap, loss_tokens: int | None) -> Call:
        """Build the arguments of a fused loss, with one target a slot; ``loss_tokens`` as in ``Call``."""
        return Call(
            hidden=self.hidden,
            weight=self.weight,
            targets=targets.view(self.hidden.shape[:-1]),
            bias=self.bias,
            logit_map=logit_map,
            tp_group=self.tp_group,
            partial_hidden=self.partial_hidden,
            loss_tokens=loss_tokens,
        )


def plain_linear(head: Any, forward: object) -> nn.Linear | None:
    """Return the linear layer that a head is, in its forward call, or None if it is more than that.

    ``forward`` was put on the head object by somebody else; None if nobody did.
    """
    if hasattr(head, "_orig_mod"):  # torch.compile's wrapper, whose forward is its own
        head = head._orig_mod
        forward = head.__dict__.get("forward")
    copies = head._modules.get("modules_to_save")
    if copies is not None:  # PEFT trains a copy of the head
        active = [] if head.disable_adapters else head.active_adapters
        head = copies[active[0]] if active and active[0] in copies else head.original_module
        forward = forward or head.__dict__.get("forward") or head._forward_pre_hooks or head._forward_hooks
    if type(head).forward is not LINEAR_FORWARD:
        return None
    weight = head._parameters.get("weight")
    if type(weight) is not nn.Parameter and is_dtensor(
        weight
    ):  # tensor parallelism puts a forward of its own on the head
        linear: nn.Linear = head
        return linear
    cut = getattr(head, "_hf_device_mesh", None)  # transformers before 5.16 leaves plain shards and hooks
    kind = type(weight)
    quantised = weight is not None and kind is not nn.Parameter and not kind.__module__.startswith("torch.")
    return None if forward or quantised or (cut is not None and cut.size() > 1) else head


def head_operands(head: nn.Linear, hidden: Tensor) -> HeadOperands:
    """Return the operands of a head, in its forward call, when FSDP2 has gathered its weight."""
    weight: Tensor = head.weight  # read once: a parametrization may move with every read
    bias: Tensor | None = head.bias
    group, partial = None, False
    if type(weight) is not nn.Parameter and is_dtensor(weight):
        group = vocabulary_group(weight)
        weight, bias = plain(weight), None if bias is None else plain(bias)
    if type(hidden) is not Tensor and is_dtensor(hidden):
        hidden, partial = local_hidden(hidden, group)
    return HeadOperands(
        hidden=hidden,
        weight=weight,
        bias=bias,
        tp_group=group,
        partial_hidden=partial,
        vocabulary=weight.shape[0] * (1 if group is None else dist.get_world_size(group)),
    )
