"""Student and teacher heads -> the divergence of their softmaxes over rows, and the student's gradients.

Legend: c rows and v vocabulary columns of one tile. ``s`` and ``t``, ``[c, v]``, are the log-probabilities of
student and teacher in a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd.loss.tiles.logits import GradientSums, Head, HeadGradients, LogitMap, Needs, by_kernels
from lightning_thd.loss.tiles.nll import Stash, halves, tiles_of_inputs
from lightning_thd.loss.tiles.products import exponential, product
from lightning_thd.loss.tiles.softmax import MAX, SUM, blank_statistics, merge_parts, merge_ranks
from lightning_thd.loss.tiles.trial import HeadKind, kernels_hold
from lightning_thd.parallel.exchange import stacked

Kind = Literal["kl", "reverse_kl", "jsd"]
# Computes ``divergence_and_gradients`` in one way.
DivergenceOfRows = Callable[..., tuple[Tensor, HeadGradients]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """A divergence between two softmaxes, and its gradient for the student's logits."""

    # "kl" is ``sum e^t (t - s)``, and "reverse_kl" is ``sum e^s (s - t)``. "jsd" is ``beta sum e^t (t - m) +
    # (1 - beta) sum e^s (s - m)`` with the mixture ``m = log(beta e^t + (1 - beta) e^s)``.
    kind: Kind
    beta: float = 0.5  # the teacher's share of the mixture

    @property
    def couples_columns(self) -> bool:
        """Return whether a column's gradient needs a sum over all columns of its row."""
        return self.kind != "kl"

    def of_teacher(self, s: Tensor, t: Tensor) -> Tensor:
        """Return a tile's part of the divergence that is weighted by the teacher, ``[c]``."""
        if self.kind == "reverse_kl":
            return s.new_zeros(s.shape[0])

        q = exponential(t, out=torch.empty_like(t))
        if self.kind == "kl":
            return torch.where(q == 0, 0.0, q * (t - s)).sum(1)  # a NaN shows
        above = _above_mixture(t, s, share=self.beta, rest=1.0 - self.beta)
        return self.beta * torch.where(q == 0, 0.0, q * above).sum(1)

    def add_of_student(self, s: Tensor, t: Tensor, inner: InnerSums) -> None:
        """Add a tile's part of ``sum e^s g``, which is the part that is weighted by the student."""
        p = exponential(s, out=torch.empty_like(s))
        inner.add(s, p, self._slope(s, t))

    def _slope(self, s: Tensor, t: Tensor) -> Tensor:
        """Return g, ``[c, v]``; the gradient for a row's student logits is ``e^s (g - sum e^s g)``."""
        if self.kind == "reverse_kl":
            return s - t
        above = _above_mixture(s, t, share=1.0 - self.beta, rest=self.beta)
        return above.mul_(1.0 - self.beta)

    def gradient(self, s: Tensor, t: Tensor, inner_and_pivot: Tensor) -> Tensor:
        """Return the gradient of student logits, ``[c, v]``, from ``InnerSums`` ``[2, c]``. Overwrites s."""
        if self.kind == "kl":
            return exponential(s, out=s).sub_(exponential(t, out=torch.empty_like(t)))
        inner, pivot = inner_and_pivot[..., None]
        g = self._slope(s, t).sub_(pivot).sub_(inner)
        p = exponential(s, out=s)
        return torch.where(p == 0, 0.0, p * g)


def _above_mixture(own: Tensor, other: Tensor, *, share: float, rest: float) -> Tensor:
    """Return how far log-probabilities are above the mixture ``log(share e^own + rest e^other)``, ``[c, v]``.

    That is ``-log(share + rest e^(other - own))``, in which no large terms cancel.
    """
    away = (other - own).add_(math.log(rest))
    return torch.logaddexp(away, away.new_full((), math.log(share))).neg_()


class InnerSums:
    """Adds up ``sum e^s (g - pivot)`` of rows, tile by tile; the pivot is the g of a row's largest s.

    The gradient ``e^s (g - sum e^s g)`` is the same for ``g - pivot``, whatever the pivot. With this one,
    nothing large cancels if one token has nearly all the probability.
    """

    def __init__(self, like: Tensor) -> None:
        # The sum, the pivot, ``sum e^s`` and the largest s, ``[4, c]``, as the kernels write them.
        self.sums = like.new_zeros((4, like.shape[0]))
        self.sums[3] = -torch.inf

    def add(self, s: Tensor, p: Tensor, g: Tensor) -> None:
        """Add a tile ``[c, v]``, with ``p = e^s``. Overwrites g."""
        inner, pivot, mass, largest = self.sums
        above, place = s.max(1)
        g_above = g.gather(1, place[:, None]).squeeze(1)
        # In a tile of -inf, g is not a number. An infinite g is no pivot, since the divergence is infinite.
        moves = (above > largest) & g_above.isfinite()
        moved = torch.where(moves, g_above, pivot)

        terms = torch.where(p == 0, 0.0, g.sub_(moved[:, None]).mul_(p))
        inner += terms.sum(1) - (moved - pivot) * mass
        pivot.copy_(moved)
        mass += p.sum(1)
        largest.copy_(torch.maximum(largest, above))

    def total(self) -> Tensor:
        """Return ``sum e^s g`` over this rank's columns, ``[c]``."""
        inner, pivot, mass, _ = self.sums
        total: Tensor = inner + pivot * mass
        return total


class Teacher:
    """A teacher's hidden states and head, with the rows, columns and tiles of the student's head."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.lse = head.hidden.new_empty(0)  # lse of each row in the stash, over the whole vocabulary

    @cached_property
    def stash(self) -> Stash:
        """Return the logits of a few rows."""
        return Stash(self.head)

    def logprobs(self, columns: slice) -> Tensor:
        """Return a tile of log-probabilities, ``[c, v]``."""
        return self.stash.logits(columns) - self.lse[:, None]


def divergence_and_gradients(
    head: Head, teacher: Head, targets: Tensor, weights: Tensor, divergence: Divergence, *, needs: Needs
) -> tuple[Tensor, HeadGradients]:
    """Return the sum of ``weights * divergence`` over the rows, ``[]``, and its gradients."""
    compute: DivergenceOfRows = _divergence_by_operators
    if by_kernels(head) and by_kernels(teacher):
        ways = (_divergence_by_kernels, _divergence_by_operators)
        if kernels_hold(divergence.kind, head, _loss_and_gradients, ways, divergence, HeadKind.of(teacher)):
            compute = _divergence_by_kernels
    return compute(head, teacher, targets, weights, divergence, needs=needs)


def _loss_and_gradients(
    compute: DivergenceOfRows,
    few: Head,
    targets: Tensor,
    weights: Tensor,
    divergence: Divergence,
    of_teacher: HeadKind,
) -> tuple[Tensor, ...]:
    """Return the loss of a small head, and the gradients of its hidden states."""
    teacher = of_teacher.example(targets, seed=1)
    loss, gradients = compute(few, teacher, targets, weights, divergence, needs=(True, False, False))
    assert gradients.hidden is not None
    return loss, gradients.hidden


def _divergence_by_operators(
    head: Head, teacher: Head, targets: Tensor, weights: Tensor, divergence: Divergence, *, needs: Needs
) -> tuple[Tensor, HeadGradients]:
    """Compute ``divergence_and_gradients`` with torch's operators."""
    taught = Teacher(teacher)
    group = head.settings.tp_group
    logit_map = head.settings.logit_map
    losses = head.hidden.new_zeros(head.hidden.shape[0], dtype=head.settings.accumulator)
    sums = GradientSums(head, needs=needs, rows_outside=True)
    stash = Stash(head)

    for rows in head.row_tiles:
        lse = _open(stash, taught, rows)[:, None]
        inner_and_pivot = losses.new_zeros(2, rows.stop - rows.start)
        if divergence.couples_columns:
            sums_of_rows = InnerSums(losses[rows])
            for columns in head.column_tiles:
                t = taught.logprobs(columns).to(losses.dtype)
                s = stash.logits(columns) - lse
                losses[rows] += divergence.of_teacher(s, t)
                divergence.add_of_student(s, t, sums_of_rows)

            losses[rows] += sums_of_rows.total()
            inner_and_pivot = _inner_and_pivot(sums_of_rows.sums, group)

        sums.open(rows)
        for columns in head.column_tiles:
            t = taught.logprobs(columns).to(losses.dtype)
            z = stash.logits(columns)
            s = z - lse
            if not divergence.couples_columns:
                losses[rows] += divergence.of_teacher(s, t)

            dz = divergence.gradient(s, t, inner_and_pivot).mul_(weights[rows, None])
            if head.counts is not None:  # the divergence of ignored rows may be infinite
                dz.masked_fill_(~head.counts[rows, None], 0.0)

            # By the chain rule, dz becomes the gradient of the raw products.
            dz.mul_(logit_map.scale / logit_map.temperature)
            if logit_map.softcap is not None:  # 1 - tanh^2, with tanh = z * temperature / cap
                dz.mul_(1.0 - (z * (logit_map.temperature / logit_map.softcap)).square())

            sums.add(dz, rows, columns)

        sums.close(rows)

    del stash  # free its memory before the weight's gradient is rounded
    return _summed(head, losses, weights, sums.result())


def _summed(
    head: Head, losses: Tensor, weights: Tensor, gradients: HeadGradients
) -> tuple[Tensor, HeadGradients]:
    """Return the weighted sum of the losses of rows that count, and gradients, over the ranks of a group."""
    group = head.settings.tp_group
    if group is not None:
        dist.all_reduce(losses, group=group)
        if gradients.hidden is not None and not head.settings.partial_hidden:
            dist.all_reduce(gradients.hidden, group=group)

    weighted = weights * losses
    if head.counts is not None:
        weighted = torch.where(head.counts, weighted, 0.0)
    return weighted.sum(), gradients


def _divergence_by_kernels(
    head: Head, teacher: Head, targets: Tensor, weights: Tensor, divergence: Divergence, *, needs: Needs
) -> tuple[Tensor, HeadGradients]:
    """Compute ``divergence_and_gradients`` with a few kernels for each tile of rows, of all columns."""
    from lightning_thd.loss.kernels.operators import (
        RowBuffer,
        divergence_gradient_of_rows,
        divergence_terms_of_rows,
    )

    settings = head.settings
    whole = slice(0, settings.columns)
    head = head.cut(head.tile[0], halves(head))
    teacher = teacher.cut(head.tile[0], [whole])
    sums = GradientSums(head, needs=needs, rows_outside=True)

    largest_tile = min(head.tile[0], head.hidden.shape[0])
    student_buffer = RowBuffer(largest_tile, settings.columns, head.hidden.device)
    teacher_buffer = RowBuffer(largest_tile, settings.columns, head.hidden.device)

    weight = head.weights(whole)
    bias = head.plain_bias(whole)
    teacher_weight = teacher.weights(whole)
    teacher_bias = teacher.plain_bias(whole)

    scale, softcap, temperature = settings.logit_map.numbers()
    teacher_scale, teacher_softcap, _ = teacher.settings.logit_map.numbers()
    maps = (scale, softcap, teacher_scale, teacher_softcap, temperature)
    ignore = -100 if settings.ignore_index is None else settings.ignore_index

    losses = weights.new_zeros(weights.shape)
    tiles = zip(tiles_of_inputs(head), tiles_of_inputs(teacher), strict=True)
    for (rows, hidden), (_, teacher_hidden) in tiles:
        count = rows.stop - rows.start
        product(hidden, weight, out=student_buffer.products(count, settings.columns))
        product(teacher_hidden, teacher_weight, out=teacher_buffer.products(count, settings.columns))
        z = student_buffer.memory(count)
        u = teacher_buffer.memory(count)
        factors = _normalisers(head, teacher, z, u, bias, teacher_bias, like=losses)

        if divergence.couples_columns:
            terms = factors.new_empty((5, count))
            divergence_terms_of_rows(
                z,
                u,
                terms,
                factors,
                targets[rows],
                bias,
                teacher_bias,
                settings.columns,
                ignore,
                divergence.kind,
                divergence.beta,
                *maps,
            )
            losses[rows] = terms[0]
            factors[4:] = _inner_and_pivot(terms[1:], settings.tp_group)

        divergence_gradient_of_rows(
            z,
            u,
            losses[rows],
            factors,
            targets[rows],
            weights[rows],
            bias,
            teacher_bias,
            settings.compute,
            settings.columns,
            ignore,
            divergence.kind,
            divergence.beta,
            *maps,
        )

        dx = student_buffer.gradient(count, settings.columns, settings.compute)
        sums.open(rows)
        sums.add_bias(dx, whole)
        sums.add_hidden(dx, weight, rows, whole)
        for columns in head.column_tiles:
            sums.add_weight(dx[:, columns], hidden, rows, columns)
        sums.close(rows)
        del dx

    del student_buffer, teacher_buffer  # free their memory before the weight's gradient is rounded
    return _summed(head, losses, weights, sums.result())


def _normalisers(
    head: Head,
    teacher: Head,
    z: Tensor,
    u: Tensor,
    bias: Tensor | None,
    teacher_bias: Tensor | None,
    *,
    like: Tensor,
) -> Tensor:
    """Return the largest logit and the log of the sum of student and teacher, and zeros, ``[6, c]``.

    The sum is that of ``e^(z - largest)`` over the whole vocabulary.
    """
    from lightning_thd.loss.kernels.operators import statistics_of_rows

    settings = head.settings
    count = z.shape[0]
    nowhere = torch.full((count,), -1, device=z.device)

    def statistics(logits: Tensor, bias: Tensor | None, logit_map: LogitMap) -> Tensor:
        stats = blank_statistics(like, count, torch.float32)
        statistics_of_rows(
            logits, stats, nowhere, bias, settings.columns, 0, False, False, *logit_map.numbers()
        )
        return stats

    of_student = statistics(z, bias, settings.logit_map)
    of_teacher = statistics(u, teacher_bias, teacher.settings.logit_map)
    if settings.tp_group is not None:
        of_student, every = merge_ranks(of_student, of_teacher, head.weight.shape[0], settings.tp_group)
        of_teacher = merge_parts(every)

    largest_and_log_mass = [
        of_student[MAX],
        of_student[SUM].log(),
        of_teacher[MAX],
        of_teacher[SUM].log(),
    ]
    zeros = torch.zeros_like(of_student[MAX])
    return torch.stack([*largest_and_log_mass, zeros, zeros])


def _inner_and_pivot(sums: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return ``sum e^s (g - pivot)`` over the vocabulary and the pivot, ``[2, c]``.

    ``sums`` ``[4, c]`` are those of ``InnerSums``. Each rank of a group has its own pivot. That of the rank
    with the largest s is taken, and the sums of the others are moved to it.
    """
    if group is None:
        return sums[:2]

    every = stacked(sums, group).view(dist.get_world_size(group), *sums.shape)
    inner, pivots, mass, largest = every.unbind(1)
    pivot = pivots.gather(0, largest.argmax(0, keepdim=True))
    return torch.stack([(inner - (pivot - pivots) * mass).sum(0), pivot[0]])


def _open(stash: Stash, teacher: Teacher, rows: slice) -> Tensor:
    """Fill both stashes with logits of some rows; set the teacher's lse, return the student's, ``[c]``."""
    head = stash.head
    nowhere = torch.full((rows.stop - rows.start,), -1, device=head.hidden.device)
    of_student = stash.fill(rows, nowhere, total=False)
    of_teacher = teacher.stash.fill(rows, nowhere, total=False).to(of_student.dtype)
    if head.settings.tp_group is not None:
        columns = head.weight.shape[0]
        of_student, every = merge_ranks(of_student, of_teacher, columns, head.settings.tp_group)
        of_teacher = merge_parts(every)

    teacher.lse = of_teacher[MAX] + of_teacher[SUM].log()
    return of_student[MAX] + of_student[SUM].log()
