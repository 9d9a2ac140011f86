"""A language model under its wrappers -> the model itself, its head's operands, its head's settings.

T slots, H hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from lightning_thd._find import text_config, unwrapped
from lightning_thd.loss.dtensors import is_dtensor, local_hidden, plain, vocabulary_group
from lightning_thd.loss.prepare import Call
from lightning_thd.loss.tiles.logits import LogitMap
from lightning_thd.models.refusals import refuse_losing_adapters

LINEAR_FORWARD = nn.Linear.forward
_ROWS = 16  # FP8 products take multiples of 16 rows
_ROUNDS = ("torchao", "transformer_engine", "bitsandbytes")  # libraries whose layers round on purpose
_ROUNDED, _EXACT = 0.1, 1e-3  # relative differences; TF32 stays below the second


def language_model(model: nn.Module) -> Any:
    """Unwrap DDP, torch.compile and PEFT down to the model that owns the head, or refuse it."""
    inner: Any = unwrapped(model, on_peft=refuse_losing_adapters)
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
    bias: Tensor | None = None
    low_rank: tuple[Tensor, Tensor] | None = None
    tp_group: dist.ProcessGroup | None = None
    partial_hidden: bool = False
    vocabulary: int

    def at(self, slots: Tensor) -> HeadOperands:
        """Return operands with the hidden states of some slots, int64 ``[R]``, each perhaps several times."""
        rows = [x.flatten(0, -2).index_select(0, slots) for x in (self.hidden, *(self.low_rank or ())[:1])]
        low_rank = None if self.low_rank is None else (rows[1], self.low_rank[1])
        return replace(self, hidden=rows[0], low_rank=low_rank)

    def call(self, targets: Tensor, logit_map: LogitMap, loss_tokens: int | None) -> Call:
        """Build the arguments of a fused loss, with one target a slot; ``loss_tokens`` as in ``Call``."""
        return Call(
            hidden=self.hidden,
            weight=self.weight,
            targets=targets.view(self.hidden.shape[:-1]),
            bias=self.bias,
            logit_map=logit_map,
            low_rank=self.low_rank,
            tp_group=self.tp_group,
            partial_hidden=self.partial_hidden,
            loss_tokens=loss_tokens,
        )


def head_operands(head: nn.Module, hidden: Tensor) -> HeadOperands:
    """Read a head's operands, perhaps PEFT's, during its forward call, when FSDP2 has gathered its weight."""
    if "modules_to_save" in head._modules:
        head = active_copy(head)
    base: Any = getattr(head, "base_layer", head)
    weight, bias = getattr(base, "weight", None), getattr(base, "bias", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise ValueError(
            f"The model's head is a {type(base).__name__} without a weight [V, H]; causal_lm_loss follows "
            "nn.Linear and its like, LoRA included. Use the model's own logits for this head."
        )
    distributed = type(weight) is not nn.Parameter and is_dtensor(weight)
    plan, mesh = base.__dict__.get("_hf_tp_plan"), base.__dict__.get("_hf_device_mesh")
    if plan is not None and mesh is not None and mesh.size() > 1 and not distributed:
        raise ValueError(
            f"transformers cut the model's head over {mesh.size()} ranks ({plan!r}) and left plain weights, "
            "of which a loss would see only this rank's vocabulary. Install transformers>=5.16, which "
            "leaves DTensors, or cut the model by THDModelParallelStrategy(tensor_parallel_size=...)."
        )
    low_rank = _low_rank(head, hidden) if base is not head else None
    group, partial = None, False
    if distributed:
        group = vocabulary_group(weight)
        weight, bias = plain(weight), None if bias is None else plain(bias)
    if type(hidden) is not Tensor and is_dtensor(hidden):
        hidden, partial = local_hidden(hidden, group, low_rank is None)
    if low_rank is not None:
        low_rank = (plain(low_rank[0]), plain(low_rank[1]))
    return HeadOperands(
        hidden=hidden,
        weight=weight,
        bias=bias,
        low_rank=low_rank,
        tp_group=group,
        partial_hidden=partial,
        vocabulary=weight.shape[0] * (1 if group is None else dist.get_world_size(group)),
    )


def active_copy(head: Any) -> nn.Module:
    """Return the trained copy behind PEFT's ``modules_to_save``; another head itself."""
    if "modules_to_save" not in head._modules or not hasattr(head, "original_module"):
        module: nn.Module = head
        return module
    name = head.active_adapters[0] if getattr(head, "active_adapters", None) else None
    if getattr(head, "disable_adapters", False) or name not in head.modules_to_save:
        return active_copy(head.original_module)
    return active_copy(head.modules_to_save[name])


def _low_rank(head: Any, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
    """Compute the inner product of active LoRA adapters and return it with their outer weights."""
    if not hasattr(head, "lora_A"):
        kind, place = type(head).__name__, type(head).__module__
        kind = f"{place}.{kind}" if place.startswith("peft.") else kind  # many methods have a class Linear
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


class LinearHeads:
    """The forwards of a model's heads that were compared with a product by their weight, and agreed.

    The loss multiplies hidden states by the head's weight itself. It would silently leave out what else a
    head does, such as normalising its weight or scaling its result.
    """

    def __init__(self) -> None:
        self._known: list[object] = [LINEAR_FORWARD]

    def check(self, base: Any, given: Callable[..., Any] | None, hidden: Tensor, weight: Tensor) -> None:
        """Refuse a head that does more than multiply and add."""
        forward = type(base).forward if given is None else given
        if any(forward is known for known in self._known) or not _can_read(hidden, weight):
            return
        probe = torch.linspace(-1.0, 1.0, _ROWS * weight.shape[1], device=hidden.device)
        probe = probe.view(1, _ROWS, weight.shape[1]).to(hidden.dtype)
        with torch.no_grad(), _disable_current_modes():  # modes count or record the step's own operators
            try:
                found = type(base).forward(base, probe) if given is None else given(probe)
            except Exception:  # a kernel for other devices, for example
                found = None
            bias = getattr(base, "bias", None)
            wanted = F.linear(probe.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))
            if found is None and not _more_than_hidden(forward, bound=given is not None):
                self._known.append(forward)
                return
            if isinstance(found, Tensor) and found.shape == wanted.shape:
                if not bool(wanted.any()):  # a head that starts at zero shows nothing yet
                    return
                off = float((found.double() - wanted.double()).norm() / wanted.double().norm())
                exact = hidden.dtype in (torch.float32, torch.float64) and found.dtype == hidden.dtype
                rounds = type(base).__module__.partition(".")[0] in _ROUNDS
                if off <= (_EXACT if exact and not rounds else _ROUNDED):
                    self._known.append(forward)
                    return
        raise ValueError(
            f"The model's head is a {type(base).__name__} whose forward is not hidden @ weight.T + bias, "
            "which is what causal_lm_loss computes in its place. Use the model's own logits for this head, "
            "or put what it does to its weight into a parametrization (torch.nn.utils.parametrize)."
        )


def _more_than_hidden(forward: Callable[..., Any], *, bound: bool) -> bool:
    """Return whether a forward cannot be called without more than hidden states."""
    wanted = [
        each
        for each in inspect.signature(forward).parameters.values()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    return len(wanted) > (1 if bound else 2)


def _can_read(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether values can be read here: from plain tensors with storage, outside a graph's capture."""
    plain = all(type(x) in (Tensor, nn.Parameter) and not x.is_meta for x in (hidden, weight))
    return plain and not (hidden.is_cuda and torch.cuda.is_current_stream_capturing())
