"""Tiles of logits -> the k largest of every row, in the same pass as the softmax's statistics.

R rows, c x v one tile, P ranks that share the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_thd.loss.tiles.logits import Head


class TopTokens(NamedTuple):
    """The likeliest tokens of every row, likeliest first; no gradient.

    Attributes:
        logp: log-probabilities ``[..., k]``, in nats.
        tokens: int64 ``[..., k]``, vocabulary indices.
    """

    logp: Tensor
    tokens: Tensor


class Top:
    """The k largest logits of every row among the tiles seen so far."""

    def __init__(self, head: Head, k: int) -> None:
        shape = (head.hidden.shape[0], k)
        self.k, self._start = k, head.start
        self.logits = head.hidden.new_full(shape, -torch.inf, dtype=head.accumulator)
        self.tokens = head.hidden.new_zeros(shape, dtype=torch.int64)

    def update(self, z: Tensor, rows: slice, columns: slice) -> None:
        """Update the k largest logits with a tile ``z`` ``[c, v]``."""
        values, tokens = z.topk(min(self.k, z.shape[1]), dim=1)
        tokens += columns.start + self._start
        self._keep(rows, torch.cat([self.logits[rows], values], 1), torch.cat([self.tokens[rows], tokens], 1))

    def _keep(self, rows: slice, logits: Tensor, tokens: Tensor) -> None:
        self.logits[rows], index = logits.topk(self.k, dim=1)
        self.tokens[rows] = tokens.gather(1, index)

    def columns(self) -> Tensor:
        """Return logits and tokens as floats ``[2k, R]``; fp32 holds all ids below 2^24."""
        return torch.cat([self.logits.t(), self.tokens.t().to(self.logits.dtype)])

    def merge(self, every: Tensor) -> None:
        """Merge what ``columns`` returned on all ranks, ``[P, 2k, R]``."""
        if self.k:
            logits, tokens = every[:, : self.k], every[:, self.k :]
            rows = slice(0, len(self.logits))
            self._keep(rows, logits.flatten(0, 1).t(), tokens.flatten(0, 1).t().long())
