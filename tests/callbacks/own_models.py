"""Random models of one's own, and a brute-force count of their training FLOPs.

T slots, S sequences. Every layer says what it costs by loops over tokens or a mask of pairs, not by a formula
of the package.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_thd import THDBatch, varlen_attention
from lightning_thd.loss import fused_linear_cross_entropy
from lightning_thd.seqlens import cu_seqlens_from_lengths

VOCAB = 31
SIZE = 8


def offsets(lengths: Sequence[int]) -> tuple[Tensor, int]:
    return cu_seqlens_from_lengths(list(lengths)), max(lengths)


def visible(queries: int, keys: int, left: int, right: int) -> int:
    """Count the True entries of a mask; the last query is at the last key."""
    query_places = np.arange(queries)[:, None] + keys - queries
    key = np.arange(keys)[None]
    mask = np.ones((queries, keys), dtype=bool)
    if left >= 0:
        mask &= key >= query_places - left
    if right >= 0:
        mask &= key <= query_places + right
    return int(mask.sum())


class Attention(nn.Module):
    """Self-attention: full, with a window, both ways, or in chunks."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.heads, self.groups = draw.choice([(2, 2), (2, 1), (4, 2), (1, 1)])
        self.head = draw.choice([2, 4, 6])
        self.kind = draw.choice(["full", "window", "both", "chunks"])
        self.window = draw.choice([1, 3, 5])
        self.q = nn.Linear(SIZE, self.heads * self.head)
        self.kv = nn.Linear(SIZE, 2 * self.groups * self.head, bias=False)
        self.out = nn.Linear(self.heads * self.head, SIZE)

    def chunks(self, lengths: Sequence[int]) -> list[int]:
        """Cut sequences, or leave them whole."""
        if self.kind != "chunks":
            return list(lengths)
        size = self.window
        return [min(size, length - start) for length in lengths for start in range(0, length, size)]

    def options(self) -> tuple[int, int]:
        """Return the keys before and after its own that a query sees."""
        return {"window": (self.window - 1, 0), "both": (self.window, self.window)}.get(self.kind, (-1, 0))

    def forward(self, x: Tensor, batch: THDBatch) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1))
        k, v = self.kv(x).unflatten(-1, (2, self.groups, -1)).unbind(1)
        cu = batch.cu_seqlens_padded
        longest = batch.max_seqlen
        if self.kind == "chunks":
            cu, longest = offsets(self.chunks(batch.padded_lengths))
        window = None if self.kind in ("full", "chunks") else self.options()
        causal = self.kind != "both"
        out = varlen_attention(q, k, v, cu, cu, longest, longest, causal=causal, window=window)
        return x + self.out(out.flatten(1))

    def count(self, lengths: Sequence[int]) -> int:
        """Count training FLOPs: two products of a pair forward, four backward."""
        weights = sum(layer.weight.numel() for layer in (self.q, self.kv, self.out))
        pairs = sum(visible(n, n, *self.options()) for n in self.chunks(lengths))
        return 6 * sum(lengths) * weights + 3 * 4 * self.heads * self.head * pairs


class Cross(nn.Module):
    """Cross-attention to every third token of the same sequence."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.heads = draw.choice([1, 2])
        self.every = draw.choice([2, 3])
        self.q = nn.Linear(SIZE, SIZE)
        self.kv = nn.Linear(SIZE, 2 * SIZE)

    def kept(self, lengths: Sequence[int]) -> list[int]:
        """Return how many tokens of each sequence are keys."""
        return [len(range(0, length, self.every)) for length in lengths]

    def forward(self, x: Tensor, batch: THDBatch) -> Tensor:
        places = [torch.arange(0, length, self.every) for length in batch.padded_lengths]
        starts = batch.cu_seqlens_padded[:-1].tolist()
        rows = torch.cat([start + place for start, place in zip(starts, places, strict=True)])
        q = self.q(x).unflatten(-1, (self.heads, -1))
        k, v = self.kv(x[rows]).unflatten(-1, (2, self.heads, -1)).unbind(1)
        cu_seqlens_kv, longest = offsets(self.kept(batch.padded_lengths))
        cu = batch.cu_seqlens_padded
        out = varlen_attention(q, k, v, cu, cu_seqlens_kv, batch.max_seqlen, longest, causal=False)
        return x + out.flatten(1)

    def count(self, lengths: Sequence[int]) -> int:
        kept = self.kept(lengths)
        pairs = sum(a * b for a, b in zip(lengths, kept, strict=True))
        products = sum(lengths) * SIZE * SIZE + sum(kept) * 2 * SIZE * SIZE
        return 6 * products + 3 * 4 * SIZE * pairs


class Convolution(nn.Module):
    """A depthwise or full convolution inside every sequence, which is not linear in the slots."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.groups = draw.choice([1, SIZE])
        self.kernel = draw.choice([2, 3])
        self.conv = nn.Conv1d(SIZE, SIZE, self.kernel, groups=self.groups)

    def forward(self, x: Tensor, batch: THDBatch) -> Tensor:
        rows = [F.pad(row.T[None], (self.kernel - 1, 0)) for row in x.split(list(batch.padded_lengths))]
        return x + torch.cat([self.conv(row)[0].T for row in rows])

    def count(self, lengths: Sequence[int]) -> int:
        return 6 * sum(lengths) * self.kernel * SIZE * SIZE // self.groups


class Experts(nn.Module):
    """Two experts a token, chosen by a router, run one after another."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.number = draw.choice([3, 4])
        self.inner = draw.choice([4, 12])
        self.router = nn.Linear(SIZE, self.number)
        self.up = nn.Parameter(torch.randn(self.number, self.inner, SIZE) * 0.1)
        self.down = nn.Parameter(torch.randn(self.number, SIZE, self.inner) * 0.1)

    def forward(self, x: Tensor, batch: THDBatch) -> Tensor:
        share, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for expert in range(self.number):
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            hidden = torch.einsum("td,id->ti", x[rows], self.up[expert]).relu()
            out = out.index_add(0, rows, (hidden @ self.down[expert].T) * share[rows, place, None])
        return x + out

    def count(self, lengths: Sequence[int]) -> int:
        return 6 * sum(lengths) * (SIZE * self.number + 2 * 2 * SIZE * self.inner)


class Own(nn.Module):
    """A few random layers and a head; the loss is summed over the targets."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(VOCAB, SIZE)
        kinds = [Attention, draw.choice([Cross, Attention]), draw.choice([Convolution, Experts])]
        self.layers = nn.ModuleList([kind(draw) for kind in kinds])
        self.head = nn.Linear(SIZE, VOCAB, bias=False)
        self.fused = draw.random() < 0.5

    def hidden(self, batch: THDBatch) -> Tensor:
        x = self.tokens(batch.input_ids)
        for layer in self.layers:
            x = layer(x, batch)
        return x

    def forward(self, batch: THDBatch) -> Tensor:
        x = self.hidden(batch)
        if self.fused:
            return fused_linear_cross_entropy(x, self.head.weight, batch.targets)
        return F.cross_entropy(self.head(x), batch.targets, reduction="sum")

    def count(self, lengths: Sequence[int]) -> int:
        """Count the FLOPs of a training step on sequences of these lengths."""
        return sum(layer.count(lengths) for layer in self.layers) + 6 * sum(lengths) * SIZE * VOCAB


def packs(seed: int, number: int = 6) -> list[THDBatch]:
    """Return packs of random lengths; the first ones hold only short sequences."""
    draw = random.Random(seed)
    batches = []
    for i in range(number):
        longest = 4 if i < 2 else 24
        lengths = [draw.randint(1, longest) for _ in range(draw.randint(2, 6))]
        batches.append(THDBatch.collate([{"input_ids": [1 + j % 30 for j in range(n)]} for n in lengths]))
    return batches
