"""Hidden states and the head's weight -> one scalar: the cross entropy over a pack, without logits.

T slots, H hidden size, V vocabulary. Where the scalar's gradients can be made in the forward pass they are
(``nll_tiles``, 6THV operations); under tensor parallelism, in fp16, or where nothing needs a gradient, the
loss is put together from ``linear_logprobs``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd._checks import real_number
from lightning_thd.loss import backends
from lightning_thd.loss.checks import check_call
from lightning_thd.loss.dtensors import plain
from lightning_thd.loss.linear_logprobs import row_logprobs
from lightning_thd.loss.prepare import Call, Prepared, prepare
from lightning_thd.loss.scalar_loss import Needs, scalar_loss
from lightning_thd.loss.tiles.gradient_sums import HeadGradients
from lightning_thd.loss.tiles.logit_map import LogitMap
from lightning_thd.loss.tiles.logits import Head
from lightning_thd.loss.tiles.nll import Penalties, nll_and_gradients
from lightning_thd.loss.watch import SlotLosses


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    low_rank: tuple[Tensor, Tensor] | None = None,
    ignore_index: int = -100,
    valid_vocab_size: int | None = None,
    token_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["sum", "mean"] = "sum",
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk: int | Literal["auto"] = "auto",
    backend: Literal["auto", "torch", "liger", "cce"] = "auto",
) -> Tensor:
    """Compute ``F.cross_entropy(logits, targets)`` of a pack without its logits.

    Args:
        hidden: ``[T, H]`` (or ``[..., H]``), fp32, bf16, fp16 or fp64.
        weight: ``[V, H]`` of the same dtype; under ``tp_group`` this rank's equal share of the rows.
        targets: int64 ``[T]`` (or ``[...]``), or ``ignore_index``.
        bias: ``[V]``.
        temperature: divides the logits after the cap.
        softcap: cap on the logits; None for none.
        logit_scale: factor before the cap.
        low_rank: a LoRA on the head, ``(x [T, r], weight [V, r])``.
        ignore_index: targets that do not count; their rows are left out of the products.
        valid_vocab_size: columns that exist, where the vocabulary is padded.
        token_weights: ``[T]``, a factor of each token's loss; gets no gradient.
        label_smoothing: share of the target's mass spread over the vocabulary.
        z_loss: factor of lse squared, added for each token.
        reduction: "sum", or "mean" over the tokens that count, whatever their weights (0 if none does).
        tp_group: ranks that share the vocabulary.
        sequence_parallel: see ``fused_linear_logprobs``.
        chunk: tokens of a tile.
        backend: "auto" is this module; "torch" is F.linear_cross_entropy, "liger" and "cce" the packages.

    Returns:
        fp32 ``[]`` (fp64 for fp64 inputs). Hidden ``[[0.]]``, weight ``[[1.], [2.]]``, target 0 give
        ``0.6931``.

    Raises:
        TypeError: for arguments of another type.
        ValueError: for arguments that do not fit, or that a chosen backend cannot honour.
    """
    if reduction not in ("sum", "mean"):
        raise ValueError(
            f"reduction is {reduction!r}, wanted 'sum' or 'mean'; for a value a token, "
            "use fused_linear_logprobs(...).logp."
        )
    call = Call(
        hidden=hidden,
        weight=weight,
        targets=targets,
        bias=bias,
        logit_map=LogitMap(
            scale=logit_scale, softcap=softcap, temperature=temperature, valid_vocab_size=valid_vocab_size
        ),
        low_rank=low_rank,
        ignore_index=ignore_index,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        chunk=chunk,
    )
    penalties = Penalties(label_smoothing=label_smoothing, z_loss=z_loss)
    loss: Tensor = linear_nll(
        call, penalties, token_weights=token_weights, mean=reduction == "mean", backend=backend
    ).loss
    return loss


class NLL(NamedTuple):
    """A loss and the part of it that the z-loss adds, ``[]`` each; the part has no gradient."""

    loss: Tensor
    z_part: Tensor


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_nll(
    call: Call,
    penalties: Penalties,
    *,
    token_weights: Tensor | float | None,
    mean: bool = False,
    backend: str = "auto",
    see: Callable[[SlotLosses], None] | None = None,
) -> NLL:
    """Compute ``fused_linear_cross_entropy`` from the arguments as one ``Call``.

    ``see`` is told the losses of single rows, detached.
    """
    given, call = call.targets, without_weightless(call, token_weights)
    prepared = prepare(call)
    settings = prepared.settings
    weights = row_weights(token_weights, prepared)
    if mean:
        weights = weights / (plain(given) != call.ignore_index).sum().clamp_min(1)
    if backend != "auto":
        alike = not isinstance(token_weights, Tensor) or token_weights.ndim == 0
        loss = backends.run(backend, prepared, weights, penalties, alike=alike)
        return NLL(loss, torch.zeros_like(loss))
    operands = prepared.operands
    wants_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)
    if wants_gradient and settings.tp_group is None and settings.compute != torch.float16:
        seen = None if see is None else torch.zeros_like(weights)
        found_now = NLL(
            *scalar_loss(operands, prepared.targets, settings, call.chunk, _NLLJob(weights, penalties, seen))
        )
        if see is not None and seen is not None:
            see(SlotLosses(seen, weights, prepared.kept))
        return found_now
    found = row_logprobs(operands, prepared.targets, settings, mean=penalties.label_smoothing > 0)
    losses = weights * penalties.loss(found.logp, found.lse, found.mean_logit)
    if prepared.counts is not None:
        losses = torch.where(prepared.counts, losses, 0.0)
    if see is not None:
        see(SlotLosses(losses.detach(), weights, prepared.kept))
    z_part = (
        penalties.z_part(weights, found.lse.detach()) if penalties.z_loss else torch.zeros_like(losses.sum())
    )
    return NLL(losses.sum(), z_part.detach())


def without_weightless(call: Call, token_weights: Tensor | float | None) -> Call:
    """Return the call with targets of weight 0 ignored, so that a NaN in their rows has no effect."""
    check_call(call)
    targets = plain(call.targets)
    if not isinstance(token_weights, Tensor) or token_weights.shape != targets.shape or not targets.ndim:
        return call
    return replace(call, targets=torch.where(token_weights.detach() == 0, call.ignore_index, targets))


def row_weights(token_weights: Tensor | float | None, prepared: Prepared) -> Tensor:
    """Select the token weights of the rows that are multiplied; 0 for ignored targets."""
    targets, kept, counts = prepared.targets, prepared.kept, prepared.counts
    dtype = prepared.settings.accumulator
    if token_weights is None or not isinstance(token_weights, Tensor) or token_weights.ndim == 0:
        one = 1.0 if token_weights is None else token_weights
        if not isinstance(one, Tensor):
            real_number(one, "token_weights")
        weights = torch.ones(targets.shape, dtype=dtype, device=targets.device) * one
    else:
        if token_weights.numel() != prepared.shape.numel():
            raise ValueError(
                f"token_weights is {list(token_weights.shape)}, wanted one a token, the shape of targets: "
                f"{list(prepared.shape)}."
            )
        weights = token_weights.detach().flatten().to(dtype)
        weights = weights if kept is None else weights[kept]
    return weights if counts is None else torch.where(counts, weights, 0.0)


class _NLLJob:
    name = "fused_linear_cross_entropy"

    def __init__(self, weights: Tensor, penalties: Penalties, seen: Tensor | None) -> None:
        self.further: tuple[Tensor, ...] = (weights,)
        self.penalties, self.seen = penalties, seen

    def run(self, head: Head, targets: Tensor, *, needs: Needs) -> tuple[Tensor, Tensor, HeadGradients]:
        weights = self.further[0]
        return nll_and_gradients(head, targets, weights, self.penalties, needs=needs, seen=self.seen)
