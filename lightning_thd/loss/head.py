"""A language model under its wrappers -> the model itself, its head's operands, its head's settings.

T slots, H hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_thd._find import text_config, unwrapped
from lightning_thd.loss.dtensors import is_dtensor, local_hidden, plain, vocabulary_group
from lightning_thd.loss.lazy_logits import Deferred, LazyLogits, Product, Products, deferred
from lightning_thd.loss.prepare import Call
from lightning_thd.loss.tiles.logits import LogitMap
from lightning_thd.models.refusals import refuse_losing_adapters

LINEAR_FORWARD = nn.Linear.forward


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
    """Hidden states, weight, bias and LoRA of a head, as plain tensors on this rank."""

    hidden: Tensor  # ``[..., T, H]``
    weight: Tensor  # ``[V, H]``, or this rank's rows of it
    bias: Tensor | None = None  # ``[V]``, or this rank's part of it
    # the head's other products, ``(x [..., T, r], weight [V, r])``, a LoRA's for example
    low_rank: tuple[Tensor, Tensor] | None = None
    tp_group: dist.ProcessGroup | None = None  # ranks that share the vocabulary
    partial_hidden: bool = False  # the caller reduces the gradient of ``hidden`` over the group
    vocabulary: int  # V over all ranks

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


def run_head(head: Any, forward: Callable[..., Any] | None, hidden: Tensor) -> LazyLogits:
    """Run a head and return the sum of products that its logits are; refuse another one.

    ``forward`` was put on the head object by somebody else; None if nobody did. It runs as it is, in every
    call: adapters, quantisation in training, factors and biases are in the products.
    """
    head = getattr(head, "_orig_mod", head)  # torch.compile's wrapper
    for module in head.modules():
        plan, mesh = module.__dict__.get("_hf_tp_plan"), module.__dict__.get("_hf_device_mesh")
        if plan is not None and mesh is not None and mesh.size() > 1 and not is_dtensor(module.weight):
            raise ValueError(
                f"transformers cut the model's head over {mesh.size()} ranks ({plan!r}) and left plain "
                "weights, of which a loss would see only this rank's vocabulary. Install "
                "transformers>=5.16, which leaves DTensors, or cut the model by "
                "THDModelParallelStrategy(tensor_parallel_size=...)."
            )
    forward = functools.partial(type(head).forward, head) if forward is None else forward
    plain_linear = type(head).forward is LINEAR_FORWARD and isinstance(forward, functools.partial)
    if plain_linear or (isinstance(head, nn.Linear) and is_dtensor(head._parameters.get("weight"))):
        weight = head.weight  # read once: a parametrization may move with every read
        return deferred(Products((Product(hidden, weight),), head.bias), (*hidden.shape[:-1], len(weight)))
    with Deferred(hidden.shape[:-1].numel()):
        found = forward(hidden)
    if isinstance(found, LazyLogits) and found.products is not None:
        return found
    kind = f"{type(head).__module__}.{type(head).__name__}"
    raise ValueError(
        f"The model's head is a {kind} whose forward is not hidden @ weight.T + bias, or a sum of such "
        "products, which is what causal_lm_loss computes in its place. Use the model's own logits for this "
        "head, or leave it out when you wrap or quantise layers (FP8Precision: keep=)."
    )


def head_operands(logits: LazyLogits) -> HeadOperands:
    """Return the operands of a head's products, in its forward call, when FSDP2 has gathered its weight."""
    assert logits.products is not None
    terms, bias = sorted(logits.products.terms, key=lambda term: -term.x.shape[-1]), logits.products.bias
    hidden, weight = terms[0]
    group, partial = None, False
    if type(weight) is not nn.Parameter and is_dtensor(weight):
        group = vocabulary_group(weight)
        weight, bias = plain(weight), None if bias is None else plain(bias)
    if type(hidden) is not Tensor and is_dtensor(hidden):
        hidden, partial = local_hidden(hidden, group, len(terms) == 1)
    low_rank: tuple[Tensor, Tensor] | None = None
    if len(terms) > 1:
        x, up = ([plain(part) for part in parts] for parts in zip(*terms[1:], strict=True))
        low_rank = (torch.cat(x, dim=-1), torch.cat(up, dim=1)) if len(x) > 1 else (x[0], up[0])
    return HeadOperands(
        hidden=hidden,
        weight=weight,
        bias=bias,
        low_rank=low_rank,
        tp_group=group,
        partial_hidden=partial,
        vocabulary=weight.shape[0] * (1 if group is None else dist.get_world_size(group)),
    )
