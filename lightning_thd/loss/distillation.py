"""Hidden states and heads of a student and a teacher -> the divergence of their predictions, without logits.

T slots, H and H' hidden sizes, V vocabulary. 8THV operations: the logits of both once, and the student's
gradients, which are made in the forward pass as a scalar's can be.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd._checks import real_number
from lightning_thd.loss.checks import check_operands, check_tensors, check_top_tokens
from lightning_thd.loss.dtensors import is_dtensor, local_hidden, plain
from lightning_thd.loss.linear_nll import linear_nll, row_weights, without_weightless
from lightning_thd.loss.prepare import Call, Prepared, Settings, prepare
from lightning_thd.loss.scalar_loss import Needs, kept_rows_head, scalar_loss
from lightning_thd.loss.tiles.divergence import (
    Divergence,
    HeadTeacher,
    Kind,
    Teacher,
    TopTeacher,
    divergence_and_gradients,
)
from lightning_thd.loss.tiles.gradient_sums import HeadGradients
from lightning_thd.loss.tiles.logit_map import LogitMap
from lightning_thd.loss.tiles.logits import Head
from lightning_thd.loss.tiles.nll import Penalties
from lightning_thd.loss.tiles.products import has_autocast


def fused_linear_distillation(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    teacher_hidden: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_topk: tuple[Tensor, Tensor] | None = None,
    kind: Kind = "kl",
    temperature: float = 1.0,
    alpha: float = 1.0,
    beta: float = 0.5,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    low_rank: tuple[Tensor, Tensor] | None = None,
    ignore_index: int = -100,
    valid_vocab_size: int | None = None,
    token_weights: Tensor | float | None = None,
    reduction: Literal["sum", "mean"] = "sum",
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk: int | Literal["auto"] = "auto",
) -> Tensor:
    """Compute ``alpha * divergence + (1 - alpha) * cross entropy`` of every token, summed, without logits.

    With ``p`` the teacher's and ``q`` the student's softmax of logits over the temperature: "kl" is
    ``sum p log(p / q)``, arXiv:1503.02531; "reverse_kl" ``sum q log(q / p)``, MiniLLM, arXiv:2306.08543;
    "jsd" the generalised Jensen-Shannon divergence ``beta KL(p, m) + (1 - beta) KL(q, m)``,
    ``m = beta p + (1 - beta) q``, GKD, arXiv:2306.13649, equation 1. No factor of the squared temperature:
    where one is wanted, it belongs into ``token_weights``. The cross entropy is of temperature 1.

    Args:
        hidden: the student's ``[T, H]`` (or ``[..., H]``).
        weight: ``[V, H]``; under ``tp_group`` this rank's equal share of the rows.
        targets: int64 ``[T]``; tokens of ``ignore_index`` do not count, and the others' values matter where
            ``alpha`` is below 1 alone.
        teacher_hidden: ``[T, H']``, of any width and float dtype; gets no gradient.
        teacher_weight: ``[V, H']``, sharded as ``weight`` is; likewise.
        teacher_bias: ``[V]``, likewise.
        teacher_softcap: cap on the teacher's logits.
        teacher_logit_scale: factor before it.
        teacher_topk: instead of hidden states, log-probabilities ``[T, k]`` and distinct tokens int64
            ``[T, k]`` of the teacher's likeliest tokens, ``LogProbs.top`` for example; over the temperature
            and normalised anew, they are the teacher's whole distribution; a log-probability of -inf says
            that there is none. For "kl" alone.
        kind: the divergence.
        temperature: divides the logits of both, after their caps.
        alpha: share of the divergence, 0 to 1.
        beta: the teacher's share of the mixture, above 0 and below 1.
        bias: the student's, as for ``fused_linear_cross_entropy``; so are the arguments that follow.
        softcap: see there.
        logit_scale: see there.
        low_rank: see there.
        ignore_index: see there.
        valid_vocab_size: columns that exist in both vocabularies.
        token_weights: see there.
        reduction: see there.
        tp_group: ranks that share the vocabulary; one or two small collectives for every few hundred tokens.
        sequence_parallel: ``hidden`` and ``teacher_hidden`` are this rank's ``[T / P, H]``.
        chunk: tokens whose logits are kept at a time.

    Returns:
        fp32 ``[]`` (fp64 for fp64 inputs). A teacher equal to the student gives 0.

    Raises:
        TypeError: for arguments of another type.
        ValueError: for arguments that do not fit, saying which.
    """
    _check(kind, temperature, alpha, beta, reduction)
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
    teacher: _Teacher
    if teacher_topk is not None:
        if teacher_hidden is not None or teacher_weight is not None or kind != "kl":
            raise ValueError(
                f"teacher_topk came with kind={kind!r}, teacher_hidden "
                f"{'absent' if teacher_hidden is None else 'given'} and teacher_weight "
                f"{'absent' if teacher_weight is None else 'given'}, wanted it alone and kind='kl': it says "
                "nothing of other tokens, which the other divergences ask for."
            )
        teacher = _TopK(teacher_topk)
    else:
        teacher_map = LogitMap(
            scale=teacher_logit_scale,
            softcap=teacher_softcap,
            temperature=temperature,
            valid_vocab_size=valid_vocab_size,
        )
        if teacher_hidden is None or teacher_weight is None:
            raise ValueError("No teacher: pass teacher_hidden and teacher_weight, or teacher_topk.")
        teacher = _WholeHead(teacher_hidden, teacher_weight, teacher_bias, teacher_map)
    how = Divergence(kind=kind, beta=beta)
    mean = reduction == "mean"
    loss: Tensor = linear_distillation(
        call, teacher, how, alpha=alpha, token_weights=token_weights, mean=mean
    )
    return loss


def _check(kind: str, temperature: float, alpha: float, beta: float, reduction: str) -> None:
    if kind not in get_args(Kind):
        raise ValueError(f"kind is {kind!r}, wanted one of {', '.join(get_args(Kind))}.")
    if reduction not in ("sum", "mean"):
        raise ValueError(f"reduction is {reduction!r}, wanted 'sum' or 'mean'.")
    real_number(alpha, "alpha", least=0.0)
    real_number(beta, "beta", above=0.0)
    if alpha > 1.0 or beta >= 1.0:
        raise ValueError(
            f"alpha is {alpha} and beta {beta}, wanted alpha from 0 to 1 and beta above 0 and below 1; at "
            "its ends the mixture is kind='kl' or 'reverse_kl'."
        )


class _Teacher(ABC):
    """A teacher's distribution as the caller passes it: by a whole head, or by its likeliest tokens."""

    @abstractmethod
    def prepare(self, call: Call, prepared: Prepared) -> None:
        """Check the teacher against the student and select the student's rows."""

    @abstractmethod
    def tiles(self, head: Head) -> Teacher:
        """Return the source of the teacher's log-probabilities, tile by tile."""


class _WholeHead(_Teacher):
    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, logit_map: LogitMap) -> None:
        check_tensors(teacher_hidden=hidden, teacher_weight=weight)
        check_tensors(**{} if bias is None else {"teacher_bias": bias})
        self.hidden = (local_hidden(hidden, None, False)[0] if is_dtensor(hidden) else hidden).detach()
        self.weight = plain(weight).detach()
        self.bias = None if bias is None else plain(bias).detach()
        self.logit_map = logit_map

    def prepare(self, call: Call, prepared: Prepared) -> None:
        check_operands(self.hidden, self.weight, self.bias, None, autocast=has_autocast(self.hidden.device))
        rows, wanted = self.weight.shape[0], prepared.operands[1].shape[0]
        padded = call.logit_map.valid_vocab_size is not None and prepared.settings.tp_group is None
        short = rows < prepared.settings.columns if padded else rows != wanted
        if short or self.hidden.shape[:-1] != call.hidden.shape[:-1]:
            raise ValueError(
                f"teacher_hidden is {list(self.hidden.shape)} and teacher_weight {list(self.weight.shape)} "
                f"beside hidden {list(call.hidden.shape)} and weight {list(call.weight.shape)}, wanted the "
                "same tokens and the same V. Vocabularies that are padded differently need valid_vocab_size."
            )
        self.own = prepare(
            replace(
                call,
                hidden=self.hidden,
                weight=self.weight,
                bias=self.bias,
                low_rank=None,
                logit_map=self.logit_map,
                targets=plain(call.targets),
                tp_group=prepared.settings.tp_group,
            )
        )
        self.chunk = call.chunk

    def tiles(self, head: Head) -> Teacher:
        made = kept_rows_head(self.own.operands, self.own.targets, self.own.settings, self.chunk)
        return HeadTeacher(replace(made, tile=head.tile, columns=head.columns, start=head.start))


class _TopK(_Teacher):
    def __init__(self, topk: tuple[Tensor, Tensor]) -> None:
        if not isinstance(topk, tuple | list) or len(topk) != 2:
            raise TypeError(
                f"teacher_topk is a {type(topk).__name__}, wanted a pair, log-probabilities [T, k] and "
                "tokens."
            )
        self.logp, self.tokens = topk
        check_tensors(**{"teacher_topk[0]": self.logp, "teacher_topk[1]": self.tokens})

    def prepare(self, call: Call, prepared: Prepared) -> None:
        shape = self.logp.shape
        if shape[:-1] != call.targets.shape or self.tokens.shape != shape or not shape[-1]:
            raise ValueError(
                f"teacher_topk is {list(shape)} and {list(self.tokens.shape)}, wanted two of "
                f"{[*call.targets.shape, 'k']}, one row a target."
            )
        if self.tokens.dtype.is_floating_point or not self.logp.dtype.is_floating_point:
            raise ValueError(
                f"teacher_topk is {self.logp.dtype} and {self.tokens.dtype}, wanted log-probabilities and "
                "int64 tokens."
            )
        logp, tokens = (x.detach().flatten(0, -2) for x in (self.logp, self.tokens))
        if prepared.kept is not None:
            logp, tokens = logp[prepared.kept], tokens[prepared.kept]
        missing = logp == -torch.inf
        if prepared.counts is not None:  # what stands in rows that do not count is nobody's business
            logp = torch.where(prepared.counts[:, None], logp, 0.0)
            missing = missing | ~prepared.counts[:, None]
        check_top_tokens(tokens, missing, prepared.settings.vocabulary)
        tempered = logp.to(prepared.settings.accumulator) / call.logit_map.temperature
        self.rows = tempered.log_softmax(-1), torch.where(missing, -1, tokens.long())

    def tiles(self, head: Head) -> Teacher:
        return TopTeacher(*self.rows, head.start)


class _Job:
    name = "fused_linear_distillation"

    def __init__(
        self, teacher: _Teacher, divergence: Divergence, settings: Settings, weights: Tensor
    ) -> None:
        self.teacher, self.divergence, self.settings = teacher, divergence, settings
        self.further: tuple[Tensor, ...] = (weights,)

    def run(self, head: Head, targets: Tensor, *, needs: Needs) -> tuple[Tensor, Tensor, HeadGradients]:
        loss, found = divergence_and_gradients(
            head,
            self.teacher.tiles(head),
            self.further[0],
            self.divergence,
            needs=needs,
            group=self.settings.tp_group,
            partial_hidden=self.settings.partial_hidden,
        )
        return loss, torch.zeros_like(loss), found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_distillation(
    call: Call,
    teacher: _Teacher,
    divergence: Divergence,
    *,
    alpha: float,
    token_weights: Tensor | float | None,
    mean: bool = False,
) -> Tensor:
    """Compute ``fused_linear_distillation`` from checked arguments."""
    given, call = call.targets, without_weightless(call, token_weights)
    prepared = prepare(call)
    hard: Tensor | None = None
    if alpha < 1.0:
        cold = replace(call.logit_map, temperature=1.0)
        untempered = replace(call, targets=given, logit_map=cold)
        found = linear_nll(untempered, Penalties(), token_weights=token_weights, mean=mean)
        hard = found.loss * (1.0 - alpha)
        if alpha == 0.0:
            return hard
    operands, settings = prepared.operands, prepared.settings
    if settings.compute == torch.float16:  # gradients are made before anybody's loss scale is known
        wide = [None if x is None else x.float() for x in operands]
        assert wide[0] is not None
        assert wide[1] is not None
        operands = (wide[0], wide[1], wide[2], wide[3], wide[4])
        settings = replace(settings, compute=torch.float32)
    weights = row_weights(token_weights, prepared) * alpha
    if mean:
        weights = weights / (plain(given) != call.ignore_index).sum().clamp_min(1)
    teacher.prepare(call, prepared)
    job = _Job(teacher, divergence, settings, weights)
    soft, _ = scalar_loss(operands, prepared.targets, settings, call.chunk, job)
    return soft if hard is None else soft + hard
