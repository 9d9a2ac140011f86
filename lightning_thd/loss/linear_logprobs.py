"""Hidden states and the head's weight -> log-probability, entropy and lse of every token, without logits.

T slots, R rows (selected tokens), H hidden size, V vocabulary. Besides its inputs, the forward pass keeps lse
and entropy, 8 bytes per token in fp32, and a bool per token and tile if it rounds on a CPU. The backward pass
computes the logits again. In total that is 8THV operations; ``linear_nll`` takes 6THV for one scalar.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd._checks import instance
from lightning_thd.flops.listen import projecting, reported
from lightning_thd.loss.arguments import LossArgs, check_rows, refuse_double_grad
from lightning_thd.loss.tiles.logits import Head, LogitMap, Operands, Settings
from lightning_thd.loss.tiles.logprobs import gradients, may_round, rounded_statistics, softmax_statistics
from lightning_thd.loss.tiles.products import without_autocast
from lightning_thd.loss.tiles.softmax import (
    LOWEST,
    MAX,
    SUM,
    TARGET,
    TOTAL,
    WEIGHTED,
    RowGradients,
    merge_ranks,
)


class LogProbs(NamedTuple):
    """Log-probability of the target, entropy and log-sum-exp of every token; three differentiable tensors.

    They are in nats, and 0 for ignored targets. ``entropy`` is None if it was not asked for.
    """

    logp: Tensor
    entropy: Any
    lse: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> LogProbs:
        """Apply a function to every tensor that was computed."""
        entropy = None if self.entropy is None else function(self.entropy)
        return LogProbs(function(self.logp), entropy, function(self.lse))


def fused_linear_logprobs(
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
    rows: Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    chunk: int | Literal["auto"] = "auto",
    loss_tokens: int | None = None,
    entropy: bool = True,
) -> LogProbs:
    """Compute log-probabilities of ``softmax(cap * tanh(scale * (x W^T + b) / cap) / temperature)``.

    Args:
        hidden: ``[T, H]`` (or ``[..., H]``), fp32, bf16, fp16 or fp64.
        weight: ``[V, H]`` of the same dtype (any under autocast); under ``tp_group`` this rank's equal share.
        targets: int64 ``[T]`` (or ``[...]``), indices into the whole vocabulary, or ``ignore_index``.
        bias: ``[V]``.
        temperature: divides the logits after the cap.
        softcap: cap on the logits, applied before the temperature; None for no cap.
        logit_scale: factor before the cap.
        ignore_index: target of tokens that do not count. If 5 % or more of the tokens have it, they are not
            computed, unless shapes are static.
        valid_vocab_size: number of real columns, if the vocabulary is padded.
        rows: int64 ``[R]`` indices, or bool ``[T]``: the tokens to compute, for example those of a response.
        tp_group: ranks that share the vocabulary: one collective forward, at most one backward.
        chunk: tokens of a tile; "auto" keeps two tiles within a byte budget. Results change by rounding only.
        loss_tokens: upper bound of the targets that count, if known; then Python does not wait for a GPU.
        entropy: whether to compute the entropy; False saves a pass over every tile.

    Returns:
        Three tensors of the shape of ``targets``, or ``[R]`` with ``rows``. Hidden ``[[0.]]``, weight
        ``[[1.], [2.]]`` and target 0 give log-probability ``-0.6931``, entropy ``0.6931``, lse ``0.6931``.

    Raises:
        ValueError: for shapes, dtypes, devices, targets or settings that do not fit.
    """
    instance(weight, "weight", Tensor, advice="Pass the head's weight, not logits.")
    logit_map = LogitMap(logit_scale, softcap, temperature, valid_vocab_size)
    args = LossArgs(
        hidden, weight, targets, bias, logit_map, ignore_index, tp_group, chunk, loss_tokens, rows
    )
    results: LogProbs = linear_logprobs(args, entropy=entropy)
    return results


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_logprobs(args: LossArgs, *, entropy: bool) -> LogProbs:
    """Compute ``fused_linear_logprobs`` from its arguments."""
    instance(entropy, "entropy", bool)
    checked = check_rows(args)
    with projecting((args.hidden, args.weight)):
        rows = row_logprobs(checked.operands, checked.targets, checked.settings, entropy=entropy)
    of_rows = LogProbs(rows.logp, rows.entropy if entropy else None, rows.lse)
    return of_rows.map(checked.restore)


class RowValues(NamedTuple):
    """The results of the softmax of checked rows, ``[R]`` each."""

    logp: Tensor
    entropy: Tensor
    lse: Tensor
    mean_logit: Tensor
    right: Tensor  # bool, whether no logit is above the target's


def row_logprobs(
    operands: Operands,
    targets: Tensor,
    settings: Settings,
    *,
    entropy: bool = False,
    mean: bool = False,
    right: bool = False,
) -> RowValues:
    """Compute ``RowValues`` of checked rows; entropy, mean and right are valid only if asked for."""
    if settings.of_logits:
        return _logits_logprobs(operands[0], targets, settings)

    values = _LinearLogprobs.apply(*operands, targets, settings, entropy, mean, right)  # type: ignore[no-untyped-call]
    return RowValues(*values)


def _logits_logprobs(logits: Tensor, targets: Tensor, settings: Settings) -> RowValues:
    """Compute ``RowValues`` of logits that the caller has already made, ``[R, V]``."""
    wide = logits.to(settings.accumulator)
    if settings.ignore_index is not None:  # a row that does not count may hold NaN
        wide = torch.where((targets != settings.ignore_index)[:, None], wide, 0.0)

    z = settings.logit_map.apply_(wide.clone())

    log_p = z.log_softmax(-1)
    lse = z.logsumexp(-1)
    logp = log_p.gather(1, targets.clamp(0, settings.vocabulary - 1)[:, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p.clamp_min(LOWEST)).sum(-1)
    return RowValues(logp, entropy, lse, z.mean(-1), logp >= log_p.amax(-1))


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        operands = arguments[:3]
        targets, settings, entropy, mean, right = arguments[3:]

        head = Head.of(operands, targets, settings)
        exact = None

        with without_autocast(head.hidden.device):
            if may_round(head) and not right:
                stats, exact = rounded_statistics(head, targets, entropy=entropy, total=mean)
            else:
                stats = softmax_statistics(head, targets, entropy=entropy, total=mean)
            if settings.tp_group is not None:
                stats, _ = merge_ranks(stats, stats[:0], head.weight.shape[0], settings.tp_group)

        log_sum = stats[SUM].log()
        lse = stats[MAX] + log_sum
        # Subtracting the largest logit and log(sum) one by one is exact if the target is nearly certain.
        logp = stats[TARGET] - stats[MAX] - log_sum
        if exact is not None:  # the target's exact logit may exceed a rounded largest logit
            logp = logp.clamp_max_(0.0)

        spread = torch.zeros_like(lse)
        if entropy:
            spread = (log_sum - stats[WEIGHTED] / stats[SUM]).clamp_min_(0.0)

        centre = stats[TOTAL] / settings.vocabulary
        likeliest = stats[TARGET] >= stats[MAX]

        ctx.settings = settings
        ctx.set_materialize_grads(False)  # outputs that nobody used have a gradient of None, not zeros
        ctx.save_for_backward(*operands, targets, lse, spread, exact)

        constant = [likeliest]
        if not entropy:
            constant.append(spread)
        if not mean:
            constant.append(centre)
        ctx.mark_non_differentiable(*constant)
        return logp, spread, lse, centre, likeliest

    @staticmethod
    @reported
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_grad("fused_linear_logprobs")
        *operands, targets, lse, entropy, exact = ctx.saved_tensors
        group = ctx.settings.tp_group
        head = Head.of(tuple(operands), targets, ctx.settings)
        row_gradients = _row_gradients(grads[:4], entropy, ctx.settings.vocabulary)

        with without_autocast(head.hidden.device):
            sums = gradients(head, targets, lse, row_gradients, needs=ctx.needs_input_grad[:3], exact=exact)
            of_hidden, of_weight, of_bias = sums.like(tuple(operands))
            # Each rank has summed over its part of the vocabulary only.
            if group is not None and of_hidden is not None and not ctx.settings.partial_hidden:
                dist.all_reduce(of_hidden, group=group)

        return (of_hidden, of_weight, of_bias, *[None] * 5)


def _row_gradients(grads: tuple[Tensor | None, ...], entropy: Tensor, vocabulary: int) -> RowGradients:
    """Combine the gradients of the four outputs into the factors that every tile applies.

    With log p = z - lse: d logp = onehot - p, d lse = p, d mean = 1 / V, d entropy = -p (log p + entropy).
    """
    g_logp, g_entropy, g_lse, g_mean = grads
    zeros = torch.zeros_like(entropy)
    g_logp = zeros if g_logp is None else g_logp
    g_lse = zeros if g_lse is None else g_lse

    direct = g_lse - g_logp
    slope: Tensor | None = None
    if g_entropy is not None:
        direct = direct - g_entropy * entropy
        slope = -g_entropy
    flat: Tensor | None = None
    if g_mean is not None:
        flat = g_mean / vocabulary
    return RowGradients(direct=direct, slope=slope, target=g_logp, flat=flat)
