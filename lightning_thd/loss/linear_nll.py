"""Hidden states and the head's weight -> one scalar: the cross entropy over a pack, without logits.

T slots, H hidden size, V vocabulary. Where the scalar's gradients can be made in the forward pass they are
(``nll_tiles``, 6THV operations); under tensor parallelism, in fp16, or where nothing needs a gradient, the
loss is put together from ``linear_logprobs``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd._static import shapes_are_static
from lightning_thd.loss import backends
from lightning_thd.loss.checks import refuse_double_backward
from lightning_thd.loss.dtensors import plain
from lightning_thd.loss.linear_logprobs import row_logprobs
from lightning_thd.loss.prepare import Call, Prepared, Settings, make_head, prepare
from lightning_thd.loss.tiles.budget import stash_rows, tile_shape
from lightning_thd.loss.tiles.gradient_sums import HeadGradients
from lightning_thd.loss.tiles.logit_map import LogitMap
from lightning_thd.loss.tiles.nll import Penalties, nll_and_gradients
from lightning_thd.loss.tiles.products import is_native, without_autocast


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
) -> NLL:
    """Do the work of ``fused_linear_cross_entropy``; ``token_weights`` may be one number for all."""
    prepared = prepare(call)
    settings = prepared.settings
    weights = _row_weights(token_weights, prepared)
    if mean:
        weights = weights / (plain(call.targets) != call.ignore_index).sum().clamp_min(1)
    if backend != "auto":
        alike = not isinstance(token_weights, Tensor) or token_weights.ndim == 0
        loss = backends.run(backend, prepared, weights, penalties, alike=alike)
        return NLL(loss, torch.zeros_like(loss))
    operands = prepared.operands
    wants_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)
    if wants_gradient and settings.tp_group is None and settings.compute != torch.float16:
        rest = (prepared.targets, weights, settings, penalties, call.chunk)
        return NLL(*_LinearNLL.apply(*operands, *rest))  # type: ignore[no-untyped-call]
    found = row_logprobs(operands, prepared.targets, settings, mean=penalties.label_smoothing > 0)
    losses = weights * penalties.loss(found.logp, found.lse, found.mean_logit)
    if prepared.counts is not None:
        losses = torch.where(prepared.counts, losses, 0.0)
    z_part = (
        penalties.z_part(weights, found.lse.detach()) if penalties.z_loss else torch.zeros_like(losses.sum())
    )
    return NLL(losses.sum(), z_part.detach())


def _row_weights(token_weights: Tensor | float | None, prepared: Prepared) -> Tensor:
    """Bring the weights of the tokens to the rows that are multiplied, zero where a row does not count."""
    targets, kept, counts = prepared.targets, prepared.kept, prepared.counts
    dtype = prepared.settings.accumulator
    if token_weights is None or not isinstance(token_weights, Tensor) or token_weights.ndim == 0:
        one = 1.0 if token_weights is None else token_weights
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


class _LinearNLL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low_x: Tensor | None,
        low_weight: Tensor | None,
        targets: Tensor,
        weights: Tensor,
        settings: Settings,
        penalties: Penalties,
        chunk: int | Literal["auto"],
    ) -> tuple[Tensor, Tensor]:
        ctx.rest = (settings, penalties, chunk)
        saved = (hidden, weight, bias, low_x, low_weight, targets, weights)
        ctx.save_for_backward(*saved)
        loss, z_part, ctx.found = _loss_and_gradients(ctx, saved)
        ctx.mark_non_differentiable(z_part)
        return loss, z_part

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("fused_linear_cross_entropy")
        # Handed out once, to be scaled in place; a second backward through a retained graph makes them again.
        found, ctx.found = ctx.found, None
        if found is None:
            *_, found = _loss_and_gradients(ctx, ctx.saved_tensors)
        upstream = grads[0]
        _, _, bias, _, low_weight, _, _ = ctx.saved_tensors
        parts = [found.hidden, found.weight, found.bias, *found.low_rank]
        if upstream.device.type != "cpu" or shapes_are_static() or float(upstream) != 1.0:
            parts = [None if part is None else part.mul_(upstream.to(part.dtype)) for part in parts]
        for index, like in ((2, bias), (4, low_weight)):
            part = parts[index]
            parts[index] = None if part is None else part.to(like.dtype)
        return (*parts, None, None, None, None, None)


def _loss_and_gradients(ctx: Any, saved: tuple[Any, ...]) -> tuple[Tensor, Tensor, HeadGradients]:
    *operands, targets, weights = saved
    hidden = operands[0]
    settings, penalties, chunk = ctx.rest
    native = is_native(settings.compute, hidden.device)
    rows = stash_rows(
        hidden.shape[0],
        settings.columns,
        device=hidden.device,
        itemsize=settings.compute.itemsize if native else settings.accumulator.itemsize,
        chunk=chunk,
    )
    tile = tile_shape(
        hidden.shape[0],
        settings.columns,
        device=hidden.device,
        itemsize=settings.accumulator.itemsize,
        chunk=rows,
    )
    head = replace(make_head(tuple(operands), targets, settings), tile=tile)
    needs = ctx.needs_input_grad
    with without_autocast(hidden.device):
        return nll_and_gradients(
            head,
            targets,
            weights,
            penalties,
            needs=(needs[0], needs[1], needs[2], needs[3] or needs[4]),
        )
