"""Student and teacher heads -> the divergence of their softmaxes over rows, and the student's gradients.

R rows, V vocabulary columns held here, c x v one tile, P ranks that share the vocabulary. The logits of a few
rows of both are kept just long enough to be compared, so nothing of size R x V exists of either. ``s`` and
``t`` are log-probabilities of student and teacher.
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
    """A divergence between two softmaxes, and its gradient in the student's logits."""

    # "kl" is ``sum e^t (t - s)``, "reverse_kl" ``sum e^s (s - t)``, "jsd" ``beta`` times the first plus ``1 -
    # beta`` times the second, both from the mixture ``m = log(beta e^t + (1 - beta) e^s)``
    kind: Kind
    beta: float = 0.5  # the teacher's share of the mixture

    @property
    def couples_columns(self) -> bool:
        """Return whether a column's gradient needs a sum over all columns of its row."""
        return self.kind != "kl"

    def terms(self, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Compute a tile's part of the divergence and of the sum that couples columns, ``[c]`` each."""
        q = exponential(t, out=torch.empty_like(t))
        if self.kind == "kl":
            found = torch.where(q > 0, q * (t - s), 0.0).sum(1)
            return found, found
        p = exponential(s, out=torch.empty_like(s))
        inner = torch.where(p > 0, p * self._slope(s, t), 0.0).sum(1)
        if self.kind == "reverse_kl":
            return inner, inner
        teachers = torch.where(q > 0, q * (t - self._mixture(s, t)), 0.0).sum(1)
        return self.beta * teachers + inner, inner

    def _slope(self, s: Tensor, t: Tensor) -> Tensor:
        """Return g, whose ``e^s (g - sum e^s g)`` is the gradient of a row's student logits, ``[c, v]``."""
        return s - t if self.kind == "reverse_kl" else (1.0 - self.beta) * (s - self._mixture(s, t))

    def gradient(self, s: Tensor, t: Tensor, inner: Tensor) -> Tensor:
        """Return the gradient of a row's divergence in the student's logits, ``[c, v]``; destroys s."""
        if self.kind == "kl":
            return exponential(s, out=s).sub_(exponential(t, out=torch.empty_like(t)))
        g = self._slope(s, t)
        p = exponential(s, out=s)
        return torch.where(p > 0, p * (g - inner[:, None]), 0.0)

    def _mixture(self, s: Tensor, t: Tensor) -> Tensor:
        return torch.logaddexp(s + math.log1p(-self.beta), t + math.log(self.beta))


class HeadTeacher:
    """A teacher given by its hidden states and head, with the rows, columns and tiles of the student's."""

    def __init__(self, head: Head) -> None:
        self._stash = Stash(head)
        self._lse = head.hidden.new_empty(0)

    def fill(self, rows: slice) -> Tensor:
        """Compute the logits of some rows and return their statistics, ``[5, c]``, which ranks merge."""
        return self._stash.fill(rows, _nowhere(rows, self._lse), total=False)

    def open(self, stats: Tensor) -> None:
        """Receive the softmax statistics of the whole vocabulary, merged over ranks."""
        self._lse = stats[MAX] + stats[SUM].log()

    def logprobs(self, columns: slice) -> Tensor:
        """Return a tile of log-probabilities, ``[c, v]``."""
        return self._stash.logits(columns) - self._lse[:, None]


class TopTeacher:
    """A teacher known by its likeliest tokens ``[R, k]``, whose probabilities add up to 1."""

    def __init__(self, logp: Tensor, tokens: Tensor, start: int) -> None:
        self._logp, self._tokens, self._start = logp, tokens, start
        self._rows = slice(0, 0)

    def fill(self, rows: slice) -> Tensor:
        """Select some rows and return no statistics, ``[0, c]``."""
        self._rows = rows
        return self._logp.new_empty((0, rows.stop - rows.start))

    def open(self, stats: Tensor) -> None:
        """Ignore the merged statistics, of which this teacher has none."""

    def logprobs(self, columns: slice) -> Tensor:
        """Return a tile of log-probabilities, ``[c, v]``, -inf for all other tokens."""
        width = columns.stop - columns.start
        local = self._tokens[self._rows] - self._start - columns.start
        here = (local >= 0) & (local < width)
        tile = self._logp.new_full((len(local), width + 1), -torch.inf)
        return tile.scatter_(1, torch.where(here, local, width), self._logp[self._rows])[:, :width]


def divergence_and_gradients(
    head: Head, teacher: HeadTeacher | TopTeacher, weights: Tensor, divergence: Divergence, *, needs: Needs
) -> tuple[Tensor, HeadGradients]:
    """Return the sum of ``weights * divergence`` over the rows, ``[]``, and its gradients.

    The rows of the student's tiles are those whose logits are kept; ``weights`` ``[R]`` are 0 for rows that
    do not count. Ranks that share the vocabulary run one or two collectives a tile of rows.
    """
    group = head.how.tp_group
    losses = head.hidden.new_zeros(head.hidden.shape[0], dtype=head.how.accumulator)
    sums = GradientSums(head, needs=needs, rows_outside=True)
    stash = Stash(head)
    for rows in head.row_tiles:
        lse = _open(stash, teacher, rows)[:, None]
        inner = losses.new_zeros(rows.stop - rows.start)
        if divergence.couples_columns:
            for columns in head.column_tiles:
                t = teacher.logprobs(columns).to(losses.dtype)
                parts = divergence.terms(stash.logits(columns) - lse, t)
                losses[rows] += parts[0]
                inner += parts[1]
            if group is not None:
                dist.all_reduce(inner, group=group)
        sums.open(rows)
        for columns in head.column_tiles:
            t, z = teacher.logprobs(columns).to(losses.dtype), stash.logits(columns)
            s = z - lse
            if not divergence.couples_columns:
                losses[rows] += divergence.terms(s, t)[0]
            dz = divergence.gradient(s, t, inner).mul_(weights[rows, None])
            if head.counts is not None:  # a divergence may be infinite in rows that do not count
                dz.masked_fill_(~head.counts[rows, None], 0.0)
            logit_map = head.how.logit_map  # from mapped logits to raw products, in place
            dz.mul_(logit_map.scale / logit_map.temperature)
            if logit_map.softcap is not None:  # 1 - tanh^2, with tanh = z * temperature / cap
                dz.mul_(1.0 - (z * (logit_map.temperature / logit_map.softcap)).square())
            sums.add(dz, rows, columns)
        sums.close(rows)
    del stash
    found = sums.result()
    if group is not None:
        dist.all_reduce(losses, group=group)
        if found.hidden is not None and not head.how.partial_hidden:
            dist.all_reduce(found.hidden, group=group)
    weighted = weights * losses
    return (weighted if head.counts is None else torch.where(head.counts, weighted, 0.0)).sum(), found


def _open(stash: Stash, teacher: HeadTeacher | TopTeacher, rows: slice) -> Tensor:
    """Fill the stashes of student and teacher with some rows, and return the student's log-sums, ``[c]``."""
    head = stash.head
    stats = stash.fill(rows, _nowhere(rows, head.hidden), total=False)
    others = teacher.fill(rows).to(stats.dtype)
    if head.how.tp_group is not None:
        stats, every = merge_ranks(stats, others, head.weight.shape[0], head.how.tp_group)
        others = merge_parts(every) if len(others) else others
    teacher.open(others)
    return stats[MAX] + stats[SUM].log()


def _nowhere(rows: slice, like: Tensor) -> Tensor:
    """Return targets that are in no tile, ``[c]``."""
    return torch.full((rows.stop - rows.start,), -1, device=like.device)
