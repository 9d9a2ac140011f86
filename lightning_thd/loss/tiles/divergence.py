"""Student and teacher heads -> the divergence of their softmaxes over rows, and the student's gradients.

Legend: c rows and v vocabulary columns of one tile. ``s`` and ``t``, ``[c, v]``, are the log-probabilities of
student and teacher in a tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd.loss.tiles.logits import GradientSums, Head, HeadGradients, Needs
from lightning_thd.loss.tiles.nll import Stash
from lightning_thd.loss.tiles.products import exponential
from lightning_thd.loss.tiles.softmax import MAX, SUM, merge_parts, merge_ranks

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
            divergence = torch.where(q > 0, q * (t - s), 0.0).sum(1)
            return divergence, divergence  # the second one is not read

        p = exponential(s, out=torch.empty_like(s))
        inner = torch.where(p > 0, p * self._slope(s, t), 0.0).sum(1)
        if self.kind == "reverse_kl":
            return inner, inner

        teachers = torch.where(q > 0, q * (t - self._mixture(s, t)), 0.0).sum(1)
        return self.beta * teachers + inner, inner

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
        return torch.where(p > 0, p * (g - inner[:, None]), 0.0)

    def _mixture(self, s: Tensor, t: Tensor) -> Tensor:
        return torch.logaddexp(s + math.log1p(-self.beta), t + math.log(self.beta))


class Teacher:
    """A teacher's hidden states and head, with the rows, columns and tiles of the student's head."""

    def __init__(self, head: Head) -> None:
        self.stash = Stash(head)
        self.lse = head.hidden.new_empty(0)  # lse of each row in the stash, over the whole vocabulary

    def logprobs(self, columns: slice) -> Tensor:
        """Return a tile of log-probabilities, ``[c, v]``."""
        return self.stash.logits(columns) - self.lse[:, None]


def divergence_and_gradients(
    head: Head, teacher: Teacher, weights: Tensor, divergence: Divergence, *, needs: Needs
) -> tuple[Tensor, HeadGradients]:
    """Return the sum of ``weights * divergence`` over the rows, ``[]``, and its gradients."""
    group = head.settings.tp_group
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
            if group is not None:
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

            logit_map = head.settings.logit_map  # chain rule: dz becomes the raw products' gradient
            dz.mul_(logit_map.scale / logit_map.temperature)
            if logit_map.softcap is not None:  # 1 - tanh^2, with tanh = z * temperature / cap
                dz.mul_(1.0 - (z * (logit_map.temperature / logit_map.softcap)).square())

            sums.add(dz, rows, columns)

        sums.close(rows)

    del stash  # free its memory before the weight's gradient is rounded
    gradients = sums.result()
    if group is not None:
        dist.all_reduce(losses, group=group)
        if gradients.hidden is not None and not head.settings.partial_hidden:
            dist.all_reduce(gradients.hidden, group=group)

    weighted = weights * losses
    if head.counts is not None:
        weighted = torch.where(head.counts, weighted, 0.0)
    return weighted.sum(), gradients


def _open(stash: Stash, teacher: Teacher, rows: slice) -> Tensor:
    """Fill both stashes with logits of some rows; set the teacher's lse, return the student's, ``[c]``."""
    head = stash.head
    nowhere = torch.full((rows.stop - rows.start,), -1, device=head.hidden.device)
    stats = stash.fill(rows, nowhere, total=False)
    taught = teacher.stash.fill(rows, nowhere, total=False).to(stats.dtype)
    if head.settings.tp_group is not None:
        stats, every = merge_ranks(stats, taught, head.weight.shape[0], head.settings.tp_group)
        taught = merge_parts(every)
    teacher.lse = taught[MAX] + taught[SUM].log()
    return stats[MAX] + stats[SUM].log()
