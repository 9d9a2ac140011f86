"""Hidden states and the head's weight -> one scalar: the cross entropy over a pack, without logits.

T slots, H hidden size, V vocabulary. Where the scalar's gradients can be made in the forward pass they are
(``nll_tiles``, 6THV operations); under tensor parallelism, in fp16, or where nothing needs a gradient, the
loss is put together from ``linear_logprobs``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd._static import shapes_are_static
from lightning_thd.loss import backends
from lightning_thd.loss.checks import refuse_double_backward
from lightning_thd.loss.linear_logprobs import make_head, row_logprobs
from lightning_thd.loss.prepare import Settings, prepare
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
        ValueError: for arguments that do not fit, or that a chosen backend cannot honour.
    """
    if reduction not in ("sum", "mean"):
        raise ValueError(
            f"reduction is {reduction!r}, wanted 'sum' or 'mean'; for a value a token, "
            "use fused_linear_logprobs(...).logp."
        )
    logit_map = LogitMap(
        scale=logit_scale, softcap=softcap, temperature=temperature, valid_vocab_size=valid_vocab_size
    )
    loss: Tensor = linear_nll(
        hidden,
        weight,
        targets,
        bias=bias,
        logit_map=logit_map,
        low_rank=low_rank,
        ignore_index=ignore_index,
        token_weights=token_weights,
        penalties=Penalties(label_smoothing=label_smoothing, z_loss=z_loss),
        mean=reduction == "mean",
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        chunk=chunk,
        backend=backend,
    )
    return loss


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_nll(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    logit_map: LogitMap,
    low_rank: tuple[Tensor, Tensor] | None,
    token_weights: Tensor | float | None,
    penalties: Penalties,
    ignore_index: int = -100,
    mean: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    partial_hidden: bool = False,
    chunk: int | Literal["auto"] = "auto",
    backend: str = "auto",
) -> Tensor:
    """Do the work of ``fused_linear_cross_entropy``; ``token_weights`` may be one number for all.

    ``partial_hidden`` leaves the gradient of ``hidden`` a partial sum over ``tp_group``.
    """
    rows, settings = prepare(
        hidden,
        weight,
        targets,
        bias=bias,
        logit_map=logit_map,
        low_rank=low_rank,
        ignore_index=ignore_index,
        rows=None,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        partial_hidden=partial_hidden,
        chunk=chunk,
    )
    weights = _row_weights(token_weights, rows.targets, rows.kept, rows.counts, settings.accumulator)
    if mean:
        weights = weights / (targets != ignore_index).sum().clamp_min(1)
    low_weight = None if low_rank is None else low_rank[1]
    operands = (rows.hidden, weight, bias, rows.low_rank, low_weight)
    if backend != "auto":
        return backends.run(backend, operands, rows.targets, weights, settings, penalties)
    wants_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)
    if wants_gradient and tp_group is None and settings.compute != torch.float16:
        return _scalar_loss(operands, rows.targets, weights, settings, penalties, chunk)
    logp, _, lse, mean_logit = row_logprobs(
        *operands, rows.targets, settings, entropy=False, mean=penalties.label_smoothing > 0
    )
    return (weights * penalties.loss(logp, lse, mean_logit)).sum()


def _row_weights(
    token_weights: Tensor | float | None,
    targets: Tensor,
    kept: Tensor | None,
    counts: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Bring the weights of the tokens to the rows that are multiplied, zero where a row does not count."""
    if token_weights is None or not isinstance(token_weights, Tensor) or token_weights.ndim == 0:
        one = 1.0 if token_weights is None else token_weights
        weights = torch.ones(targets.shape, dtype=dtype, device=targets.device) * one
    else:
        weights = token_weights.detach().flatten().to(dtype)
        weights = weights if kept is None else weights[kept]
        if weights.shape != targets.shape:
            raise ValueError(
                f"token_weights is {list(token_weights.shape)}, wanted one a token, the shape of targets."
            )
    return weights if counts is None else torch.where(counts, weights, 0.0)


def _scalar_loss(
    operands: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
    targets: Tensor,
    weights: Tensor,
    settings: Settings,
    penalties: Penalties,
    chunk: int | Literal["auto"],
) -> Tensor:
    rest = (targets, weights, settings, penalties, chunk)
    loss: Tensor = _LinearNLL.apply(*operands, *rest)  # type: ignore[no-untyped-call]
    return loss


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
    ) -> Tensor:
        ctx.rest = (settings, penalties, chunk)
        saved = (hidden, weight, bias, low_x, low_weight, targets, weights)
        ctx.save_for_backward(*saved)
        loss, ctx.found = _loss_and_gradients(ctx, saved)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("fused_linear_cross_entropy")
        # Handed out once, to be scaled in place; a second backward through a retained graph makes them again.
        found, ctx.found = ctx.found, None
        if found is None:
            _, found = _loss_and_gradients(ctx, ctx.saved_tensors)
        (upstream,) = grads
        _, _, bias, _, low_weight, _, _ = ctx.saved_tensors
        parts = [found.hidden, found.weight, found.bias, *found.low_rank]
        if upstream.device.type != "cpu" or shapes_are_static() or float(upstream) != 1.0:
            parts = [None if part is None else part.mul_(upstream.to(part.dtype)) for part in parts]
        for index, like in ((2, bias), (4, low_weight)):
            part = parts[index]
            parts[index] = None if part is None else part.to(like.dtype)
        return (*parts, None, None, None, None, None)


def _loss_and_gradients(ctx: Any, saved: tuple[Any, ...]) -> tuple[Tensor, HeadGradients]:
    hidden, weight, bias, low_x, low_weight, targets, weights = saved
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
    head = replace(make_head(hidden, weight, bias, low_x, low_weight, settings), tile=tile)
    needs = ctx.needs_input_grad
    with without_autocast(hidden.device):
        return nll_and_gradients(
            head,
            targets,
            weights,
            penalties,
            needs=(needs[0], needs[1], needs[2], needs[3] or needs[4]),
        )
