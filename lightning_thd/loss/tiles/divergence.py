"""Student and teacher heads -> the divergence of their softmaxes over rows, and the student's gradients.

Legend: c rows and v vocabulary columns of one tile. ``s`` and ``t``, ``[c, v]``, are the log-probabilities of
student and teacher in a tile.
"""

from __future__ import annotations

import math
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

Kind = Literal["kl", "reverse_kl", "jsd"]


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

    def terms(self, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Compute a tile's part of the divergence and, unless "kl", of ``sum e^s g`` (see ``_slope``)."""
        q = exponential(t, out=torch.empty_like(t))
        if self.kind == "kl":
            divergence = torch.where(q == 0, 0.0, q * (t - s)).sum(1)  # a NaN shows
            return divergence, divergence  # the second one is not read

        p = exponential(s, out=torch.empty_like(s))
        inner = torch.where(p == 0, 0.0, p * self._slope(s, t)).sum(1)
        if self.kind == "reverse_kl":
            return inner, inner

        of_teacher = torch.where(q == 0, 0.0, q * (t - self._mixture(s, t))).sum(1)
        return self.beta * of_teacher + inner, inner

    def _slope(self, s: Tensor, t: Tensor) -> Tensor:
        """Return g, ``[c, v]``; the gradient for a row's student logits is ``e^s (g - sum e^s g)``."""
        if self.kind == "reverse_kl":
            return s - t
        return (1.0 - self.beta) * (s - self._mixture(s, t))

    def gradient(self, s: Tensor, t: Tensor, inner: Tensor) -> Tensor:
        """Return the gradient of student logits, ``[c, v]``; ``inner`` is ``sum e^s g``. Overwrites s."""
        if self.kind == "kl":
            return exponential(s, out=s).sub_(exponential(t, out=torch.empty_like(t)))
        g = self._slope(s, t)
        p = exponential(s, out=s)
        return torch.where(p == 0, 0.0, p * (g - inner[:, None]))

    def _mixture(self, s: Tensor, t: Tensor) -> Tensor:
        """Return the log-probabilities m of the mixture of both models, ``[c, v]``."""
        return torch.logaddexp(s + math.log1p(-self.beta), t + math.log(self.beta))


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
    head: Head, teacher: Teacher, targets: Tensor, weights: Tensor, divergence: Divergence, *, needs: Needs
) -> tuple[Tensor, HeadGradients]:
    """Return the sum of ``weights * divergence`` over the rows, ``[]``, and its gradients."""
    if by_kernels(head) and by_kernels(teacher.head):
        return _divergence_by_kernels(head, teacher.head, targets, weights, divergence, needs=needs)

    group = head.settings.tp_group
    logit_map = head.settings.logit_map
    losses = head.hidden.new_zeros(head.hidden.shape[0], dtype=head.settings.accumulator)
    sums = GradientSums(head, needs=needs, rows_outside=True)
    stash = Stash(head)

    for rows in head.row_tiles:
        lse = _open(stash, teacher, rows)[:, None]
        inner = losses.new_zeros(rows.stop - rows.start)
        if divergence.couples_columns:
            for columns in head.column_tiles:
                t = teacher.logprobs(columns).to(losses.dtype)
                part_of_loss, part_of_inner = divergence.terms(stash.logits(columns) - lse, t)
                losses[rows] += part_of_loss
                inner += part_of_inner

            if group is not None:  # the other ranks hold the other columns
                dist.all_reduce(inner, group=group)

        sums.open(rows)
        for columns in head.column_tiles:
            t = teacher.logprobs(columns).to(losses.dtype)
            z = stash.logits(columns)
            s = z - lse
            if not divergence.couples_columns:
                losses[rows] += divergence.terms(s, t)[0]

            dz = divergence.gradient(s, t, inner).mul_(weights[rows, None])
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
            terms = factors.new_empty((2, count))
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
            factors[2] = terms[1]
            if settings.tp_group is not None:
                dist.all_reduce(factors[2], group=settings.tp_group)

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
    """Return the lse of student and teacher over the whole vocabulary, and zeros, ``[3, c]``."""
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

    lse = of_student[MAX] + of_student[SUM].log()
    teacher_lse = of_teacher[MAX] + of_teacher[SUM].log()
    return torch.stack([lse, teacher_lse, torch.zeros_like(lse)])


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
