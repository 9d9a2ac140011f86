"""Hidden states and the head's weight -> one scalar: the cross entropy over a pack, without logits.

T slots, R rows (selected tokens), H hidden size, V vocabulary. Tiles of logits become gradients while they
are in memory (``tiles/nll``, 6THV operations). Under tensor parallelism, in fp16, without a head weight (the
input then is logits), or if nothing needs a gradient, the loss is computed from ``row_logprobs``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd._checks import choice, instance, real_number
from lightning_thd._static import RUN
from lightning_thd.flops.listen import LISTENERS, projecting, reported
from lightning_thd.loss.arguments import CheckedRows, LossArgs, check_rows, plain, refuse_double_grad
from lightning_thd.loss.linear_logprobs import row_logprobs
from lightning_thd.loss.tiles.logits import Head, HeadGradients, LogitMap, Needs
from lightning_thd.loss.tiles.nll import Penalties, nll_and_gradients
from lightning_thd.loss.tiles.products import without_autocast
from lightning_thd.loss.watch import SlotLosses

# Bytes of the logits that the scalar loss keeps at a time. CPU: 64 MiB are 512 rows of a 32k vocabulary.
_CPU_STASH_BYTES = 64 * 2**20
_ACCELERATOR_STASH_BYTES = 512 * 2**20
# A head, its targets and weights ``[R]``, and which operands need gradients -> a scalar and the gradients.
Job = Callable[[Head, Tensor, Tensor, Needs], tuple[Tensor, HeadGradients]]


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    valid_vocab_size: int | None = None,
    token_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["sum", "mean"] = "sum",
    tp_group: dist.ProcessGroup | None = None,
    chunk: int | Literal["auto"] = "auto",
    loss_tokens: int | None = None,
) -> Tensor:
    """Compute ``F.cross_entropy(logits, targets)`` of a pack without its logits.

    ``token_weights`` ``[T]`` are factors of each token's loss, without gradient. ``label_smoothing`` is the
    share of the target's mass that is spread over the vocabulary, ``z_loss`` the factor of each token's
    squared log-sum-exp (lse). ``reduction="mean"`` divides the sum by the number of targets that are not
    ``ignore_index``, also those of weight 0. All other arguments are those of ``fused_linear_logprobs``.

    Returns:
        fp32 ``[]`` (fp64 for fp64 inputs). Hidden ``[[0.]]``, weight ``[[1.], [2.]]`` and target 0
        give ``0.6931``.
    """
    instance(weight, "weight", Tensor, advice="Pass the head's weight, not logits.")
    advice = "For one value per token use fused_linear_logprobs(...).logp."
    choice(reduction, "reduction", "sum", "mean", advice=advice)
    logit_map = LogitMap(logit_scale, softcap, temperature, valid_vocab_size)
    args = LossArgs(hidden, weight, targets, bias, logit_map, ignore_index, tp_group, chunk, loss_tokens)
    penalties = Penalties(label_smoothing=label_smoothing, z_loss=z_loss)
    loss: Tensor = linear_nll(args, penalties, token_weights=token_weights, mean=reduction == "mean")
    return loss


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_nll(
    args: LossArgs,
    penalties: Penalties,
    *,
    token_weights: Tensor | float | None,
    mean: bool = False,
    see: Callable[[SlotLosses], None] | None = None,
) -> Tensor:
    """Compute ``fused_linear_cross_entropy`` from its arguments; ``see`` gets detached losses of rows."""
    if LISTENERS:
        with projecting((args.hidden, args.weight)):
            return _weighted_nll(args, penalties, token_weights, mean=mean, see=see)
    return _weighted_nll(args, penalties, token_weights, mean=mean, see=see)


def _weighted_nll(
    args: LossArgs,
    penalties: Penalties,
    token_weights: Tensor | float | None,
    *,
    mean: bool,
    see: Callable[[SlotLosses], None] | None,
) -> Tensor:
    checked, weights = check_weighted(args, token_weights, mean=mean)
    operands = checked.operands
    targets = checked.targets
    settings = checked.settings
    wants_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)
    tiled = settings.tp_group is None and settings.compute != torch.float16 and not settings.of_logits

    if wants_gradient and tiled:
        losses = None if see is None else torch.zeros_like(weights)
        job = partial(nll_and_gradients, penalties=penalties, seen=losses)
        loss = scalar_loss(*operands, targets, weights, settings, job, "fused_linear_cross_entropy")
    else:
        rows = row_logprobs(operands, targets, settings, mean=penalties.label_smoothing > 0)
        weighted = weights * penalties.loss(rows.logp, rows.lse, rows.mean_logit)
        if checked.counts is not None:
            weighted = torch.where(checked.counts, weighted, 0.0)
        loss = weighted.sum()
        losses = weighted.detach()

    if see is not None and losses is not None:
        see(SlotLosses(losses, weights, checked.kept))
    return loss


def check_weighted(
    args: LossArgs, token_weights: Tensor | float | None, *, mean: bool
) -> tuple[CheckedRows, Tensor]:
    """Prepare the arguments, and return the weights of the rows, ``[R]``, 0 for ignored targets."""
    per_token = token_weights if isinstance(token_weights, Tensor) and token_weights.ndim > 0 else None
    targets = plain(args.targets) if per_token is not None or mean else args.targets
    if per_token is not None:
        if per_token.numel() != targets.numel():
            raise ValueError(
                f"token_weights is {list(per_token.shape)}, wanted one per token, {list(targets.shape)}."
            )
        weightless = per_token.detach().reshape(targets.shape) == 0
        args = replace(args, targets=torch.where(weightless, args.ignore_index, targets))
    elif type(token_weights) is float and math.isfinite(token_weights):
        pass  # the usual factor of a batch, for which a plain step calls no check
    elif not isinstance(token_weights, Tensor | None):
        token_weights = real_number(token_weights, "token_weights")

    checked = check_rows(args)
    dtype = checked.settings.accumulator
    if per_token is not None:
        weights = per_token.detach().flatten().to(dtype)
        if checked.kept is not None:
            weights = weights[checked.kept]
    elif isinstance(token_weights, Tensor):
        weights = torch.ones(checked.targets.shape, dtype=dtype, device=checked.targets.device)
        weights = weights * token_weights
    else:
        weight = 1.0 if token_weights is None else token_weights
        weights = torch.full(checked.targets.shape, weight, dtype=dtype, device=checked.targets.device)

    if checked.counts is not None:
        weights = torch.where(checked.counts, weights, 0.0)
    if mean:
        weights = weights / (targets != args.ignore_index).sum().clamp_min(1)
    return checked, weights


class _ScalarLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        # hidden, weight, bias, targets, weights of rows; settings, job, name: see ``scalar_loss``
        *_, ctx.settings, ctx.job, ctx.name = arguments
        ctx.save_for_backward(*arguments[:5])  # so that autograd detects in-place changes
        loss, ctx.gradients = _run(ctx, arguments[:5])
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_double_grad(ctx.name)

        saved = ctx.saved_tensors  # read once, because torch.utils.checkpoint allows no second read
        # Gradients are scaled in place, so they serve one backward pass; a second one computes them again.
        gradients = ctx.gradients
        ctx.gradients = None
        if gradients is None:
            _, gradients = reported(_run)(ctx, saved)

        upstream = grads[0]
        # Only a CPU's value is read to save a multiplication; reading another device would wait for it.
        if upstream.device.type != "cpu" or getattr(RUN, "static", False) or float(upstream) != 1.0:
            for gradient in (gradients.hidden, gradients.weight, gradients.bias):
                if gradient is not None:
                    gradient.mul_(upstream)
        return (*gradients.like(saved[:3]), None, None, None, None, None)


# Operands, targets, weights ``[R]``, settings, a job and the name of the public function -> a scalar whose
# gradients are computed in the forward pass.
scalar_loss: Callable[..., Tensor] = _ScalarLoss.apply


def _run(ctx: Any, saved: tuple[Any, ...]) -> tuple[Tensor, HeadGradients]:
    """Run a job on tiles of ``chunk`` rows; "auto" fills the budget, but takes at least ``fewest``."""
    hidden, weight, _, targets, weights = saved
    settings = ctx.settings
    if hidden.device.type == "cpu":
        budget = _CPU_STASH_BYTES
        fewest = 256
    else:
        budget = _ACCELERATOR_STASH_BYTES
        fewest = 2048

    if settings.chunk == "auto":
        stash_dtype = settings.compute if settings.native else settings.accumulator
        columns = max(1, weight.shape[0])  # with padding: ranks of ``tp_group`` must cut the same tiles
        chunk = max(fewest, budget // (columns * stash_dtype.itemsize) // 64 * 64)  # a multiple of 64 rows
    else:
        chunk = settings.chunk
    chunk = max(1, min(hidden.shape[0], chunk))

    head = Head.of(saved[:3], targets, settings, chunk=chunk)
    with without_autocast(hidden.device):
        result: tuple[Tensor, HeadGradients] = ctx.job(head, targets, weights, ctx.needs_input_grad[:3])
    return result
