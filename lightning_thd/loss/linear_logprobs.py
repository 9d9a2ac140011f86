"""Hidden states and the head's weight -> log-probability, entropy and lse of every token, without logits.

T slots, H hidden size, V vocabulary. One autograd.Function computes all three, so that they can be
differentiated together or one by one, in any order. The forward pass keeps lse and entropy, 8 bytes a token.
The backward pass makes the logits again: 8THV operations, against the 6THV of ``linear_nll`` for one scalar.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd._checks import instance, whole_number
from lightning_thd.loss.prepare import Call, prepare, refuse_double_backward, scoring_head
from lightning_thd.loss.tiles.logits import LogitMap, Operands, Settings
from lightning_thd.loss.tiles.logprobs import (
    Top,
    TopTokens,
    gradients,
    may_round,
    rounded_statistics,
    softmax_statistics,
)
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


class _Three(NamedTuple):
    logp: Tensor
    entropy: Any
    lse: Tensor


class LogProbs(_Three):
    """Log-probability, entropy and log-sum-exp of every token; a tuple of three differentiable tensors.

    Attributes:
        logp: log-probability of the target, in nats; 0 for ignored targets.
        entropy: entropy of the whole distribution, in nats; 0 for ignored targets; None if not asked for.
        lse: log of the sum of exponentials of the logits; 0 for ignored targets.
        top: the likeliest tokens and their log-probabilities; None if not asked for.
    """

    top: Any = None

    def with_top(self, top: TopTokens | None) -> LogProbs:
        """Return a copy that carries the likeliest tokens."""
        results = LogProbs(*self)
        results.top = top
        return results

    def map(self, function: Callable[[Tensor], Tensor]) -> LogProbs:
        """Apply a function to every tensor that was computed."""
        logp, entropy, lse = self
        mapped = LogProbs(function(logp), None if entropy is None else function(entropy), function(lse))
        return mapped.with_top(None if self.top is None else TopTokens(*map(function, self.top)))


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
    top_k: int = 0,
) -> LogProbs:
    """Compute log-probabilities of ``softmax(cap * tanh(scale * (x W^T + b) / cap) / temperature)``.

    Args:
        hidden: ``[T, H]`` (or ``[..., H]``), fp32, bf16, fp16 or fp64.
        weight: ``[V, H]`` of the same dtype; under ``tp_group`` this rank's equal share of the rows.
        targets: int64 ``[T]`` (or ``[...]``), indices into the whole vocabulary, or ``ignore_index``.
        bias: ``[V]``.
        temperature: divides the logits after the cap.
        softcap: cap on the logits, applied before the temperature; None for none.
        logit_scale: factor before the cap.
        ignore_index: targets that do not count; their rows are left out of the products.
        valid_vocab_size: columns that exist, if the vocabulary is padded.
        rows: int64 ``[R]`` indices, or bool ``[T]``: the tokens wanted, a response's for example.
        tp_group: ranks that share the vocabulary: one collective forward, one backward.
        chunk: tokens of a tile; "auto" keeps two tiles within a byte budget. Changes no number but rounding.
        loss_tokens: the most targets that count, if the host knows it, so that nothing waits for a GPU.
        entropy: whether the entropy is wanted; without it a pass over every tile is saved.
        top_k: number of likeliest tokens wanted beside, ``LogProbs.top``; without gradient.

    Returns:
        Three tensors of the shape of ``targets``, or ``[R]`` with ``rows``. Hidden ``[[0.]]``, weight
        ``[[1.], [2.]]``, target 0 give log-probability ``-0.6931``, entropy ``0.6931``, lse ``0.6931``.

    Raises:
        ValueError: for shapes, dtypes, devices, targets or settings that do not fit.
    """
    call = Call(
        hidden=hidden,
        weight=weight,
        targets=targets,
        bias=bias,
        logit_map=LogitMap(
            scale=logit_scale, softcap=softcap, temperature=temperature, valid_vocab_size=valid_vocab_size
        ),
        ignore_index=ignore_index,
        rows=rows,
        tp_group=tp_group,
        chunk=chunk,
        loss_tokens=loss_tokens,
    )
    results: LogProbs = linear_logprobs(call, entropy=entropy, top_k=top_k)
    return results


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_logprobs(call: Call, *, entropy: bool, top_k: int = 0) -> LogProbs:
    """Compute ``fused_linear_logprobs`` from the arguments as one ``Call``."""
    instance(entropy, "entropy", bool)
    top_k = whole_number(top_k, "top_k")
    prepared = prepare(call)
    if top_k > prepared.settings.vocabulary:
        raise ValueError(
            f"top_k is {top_k}, wanted 0 to the vocabulary's {prepared.settings.vocabulary} tokens."
        )
    found = row_logprobs(prepared.operands, prepared.targets, prepared.settings, entropy=entropy, top_k=top_k)
    results = LogProbs(found.logp, found.entropy if entropy else None, found.lse).with_top(found.top)
    return results.map(prepared.restore)


class RowValues(NamedTuple):
    """Log-probability, entropy, lse and mean logit of prepared rows ``[R]``, and their likeliest tokens."""

    logp: Tensor
    entropy: Tensor
    lse: Tensor
    mean_logit: Tensor
    top: TopTokens | None


def row_logprobs(
    operands: Operands,
    targets: Tensor,
    settings: Settings,
    *,
    entropy: bool = False,
    mean: bool = False,
    top_k: int = 0,
) -> RowValues:
    """Compute ``RowValues`` of prepared rows; unwanted entropies and mean logits have no gradient."""
    if settings.of_logits:
        return _logits_logprobs(operands[0], targets, settings, top_k)
    *values, logits, tokens = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        *operands, targets, settings, entropy, mean, top_k
    )
    top = TopTokens(logits - values[2].detach()[:, None], tokens) if top_k else None
    return RowValues(values[0], values[1], values[2], values[3], top)


def _logits_logprobs(logits: Tensor, targets: Tensor, settings: Settings, top_k: int) -> RowValues:
    """Compute ``row_logprobs`` of logits ``[R, V]`` by torch's own functions."""
    wide = logits.to(settings.accumulator)
    if settings.ignore_index is not None:  # a row that does not count may hold anything
        wide = torch.where((targets != settings.ignore_index)[:, None], wide, 0.0)
    z = settings.logit_map.apply_(wide.clone())
    log_p, lse = z.log_softmax(-1), z.logsumexp(-1)
    logp = log_p.gather(1, targets.clamp(0, settings.vocabulary - 1)[:, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p.clamp_min(LOWEST)).sum(-1)
    top = TopTokens(*log_p.detach().topk(top_k)) if top_k else None
    return RowValues(logp, entropy, lse, z.mean(-1), top)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        operands, (targets, settings, entropy, mean, top_k) = arguments[:3], arguments[3:]
        head = scoring_head(operands, targets, settings)
        top, exact = Top(head, top_k), None
        with without_autocast(head.hidden.device):
            if may_round(head) and not top_k:
                stats, exact = rounded_statistics(head, targets, entropy=entropy, total=mean)
            else:
                seen = top.update if top_k else None
                stats = softmax_statistics(head, targets, entropy=entropy, total=mean, seen=seen)
            if settings.tp_group is not None:
                stats, others = merge_ranks(stats, top.columns(), head.weight.shape[0], settings.tp_group)
                top.merge(others)
        log_sum = stats[SUM].log()
        lse = stats[MAX] + log_sum
        # The largest logit and log(sum) are subtracted one by one: exact if the target is nearly certain.
        logp = stats[TARGET] - stats[MAX] - log_sum
        if exact is not None:  # the target is exact, the largest may be rounded
            logp = logp.clamp_max_(0.0)
        spread = torch.zeros_like(lse)
        if entropy:
            spread = (log_sum - stats[WEIGHTED] / stats[SUM]).clamp_min_(0.0)
        centre = stats[TOTAL] / settings.vocabulary
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, targets, lse, spread, exact)
        constant = [*([] if entropy else [spread]), *([] if mean else [centre])]
        ctx.mark_non_differentiable(*constant, top.logits, top.tokens)
        return logp, spread, lse, centre, top.logits, top.tokens

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("fused_linear_logprobs")
        *operands, targets, lse, entropy, exact = ctx.saved_tensors
        group = ctx.settings.tp_group
        head = scoring_head(tuple(operands), targets, ctx.settings)
        wanted = _row_gradients(grads[:4], entropy, ctx.settings.vocabulary)
        with without_autocast(head.hidden.device):
            found = gradients(
                head,
                targets,
                lse,
                wanted,
                needs=ctx.needs_input_grad[:3],
                exact=exact,
            ).like(tuple(operands))
            if group is not None and found[0] is not None and not ctx.settings.partial_hidden:
                dist.all_reduce(found[0], group=group)
        return (*found, *[None] * 5)


def _row_gradients(grads: tuple[Tensor | None, ...], entropy: Tensor, vocabulary: int) -> RowGradients:
    """Combine the gradients of the four outputs into the factors that every tile applies.

    With log p = z - lse: d logp = onehot - p, d lse = p, d mean = 1 / V, d entropy = -p (log p + entropy).
    """
    g_logp, g_entropy, g_lse, g_mean = grads
    zero = torch.zeros_like(entropy)
    direct = (zero if g_lse is None else g_lse) - (zero if g_logp is None else g_logp)
    if g_entropy is not None:
        direct = direct - g_entropy * entropy
    return RowGradients(
        direct=direct,
        slope=None if g_entropy is None else -g_entropy,
        target=zero if g_logp is None else g_logp,
        flat=None if g_mean is None else g_mean / vocabulary,
    )
