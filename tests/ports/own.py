"""Three transformers in the structure of a plain Lightning module, of litgpt and of nanochat.

Each runs one row of ids ``[L]`` as it was written, or a ``THDBatch`` as it is ported: attention asks the
batch for its boundaries, and positions are the batch's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_thd import THDBatch, varlen_attention
from tests.tiny import VOCAB

SIZE = 24
LONGEST = 64


def attend(q: Tensor, k: Tensor, v: Tensor, batch: THDBatch | None, *, window: int | None = None) -> Tensor:
    """Attend causally, ``[L, heads, D]``; a window counts a query's own key."""
    if batch is not None:
        return varlen_attention(q, k, v, batch.boundaries, window=window).flatten(1)

    queries_per_key = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(queries_per_key, dim=1)
    v = v.repeat_interleave(queries_per_key, dim=1)
    scores = torch.einsum("lhd,mhd->hlm", q, k) * q.shape[-1] ** -0.5
    positions = torch.arange(len(q))
    distance = positions[:, None] - positions
    is_hidden = (distance < 0) | (distance >= (window or len(q)))
    weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
    return torch.einsum("hlm,mhd->lhd", weights, v).flatten(1)


def positions_of(ids: Tensor, batch: THDBatch | None) -> Tensor:
    """The positions of one row, or those of a batch."""
    return torch.arange(len(ids)) if batch is None else batch.position_ids


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate halves of the last dimension by the positions."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 100.0 ** -torch.linspace(0, 1, half, dtype=x.dtype)
    a = x[..., :half]
    b = x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


class Plain(nn.Module):
    """Learned positions, LayerNorm, GELU and a head that shares the embedding, as in minimal GPTs."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, SIZE)
        self.positions = nn.Embedding(LONGEST, SIZE)
        self.norms = nn.ModuleList([nn.LayerNorm(SIZE) for _ in range(3)])
        self.qkv = nn.Linear(SIZE, 3 * SIZE)
        self.out = nn.Linear(SIZE, SIZE)
        self.mlp = nn.Sequential(nn.Linear(SIZE, 2 * SIZE), nn.GELU(), nn.Linear(2 * SIZE, SIZE))

    def forward(self, ids: Tensor, batch: THDBatch | None = None) -> Tensor:
        x = self.tokens(ids) + self.positions(positions_of(ids, batch))
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 3, -1)).unbind(1)
        x = x + self.out(attend(q, k, v, batch))
        x = x + self.mlp(self.norms[1](x))
        return F.linear(self.norms[2](x), self.tokens.weight)


class LitBlock(nn.Module):
    """Grouped queries from one projection, rotary on half of a head, and a parallel residual."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.norm = nn.LayerNorm(SIZE)
        self.attn = nn.Linear(SIZE, 2 * (2 + 2) * 6)
        self.proj = nn.Linear(SIZE, SIZE)
        self.fc = nn.Linear(SIZE, 2 * SIZE)
        self.out = nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: Tensor, positions: Tensor, batch: THDBatch | None) -> Tensor:
        normed = self.norm(x)
        # Two groups of two queries, a key and a value, of 6 each.
        q, k, v = self.attn(normed).unflatten(-1, (2, 4, 6)).split([2, 1, 1], dim=2)
        q = self._partly_rotated(q.flatten(1, 2), positions)
        k = self._partly_rotated(k.flatten(1, 2), positions)
        mixed = attend(q, k, v.flatten(1, 2), batch, window=self.window)
        return x + self.proj(mixed) + self.out(F.gelu(self.fc(normed)))

    @staticmethod
    def _partly_rotated(x: Tensor, positions: Tensor) -> Tensor:
        return torch.cat([rotated(x[..., :4], positions), x[..., 4:]], dim=-1)


class LitGPT(nn.Module):
    """Blocks with and without a sliding window, and a vocabulary that is padded to a multiple."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB + 8, SIZE)
        self.ln_f = nn.LayerNorm(SIZE)
        self.h = nn.ModuleList([LitBlock(window) for window in (None, 5)])
        self.lm_head = nn.Linear(SIZE, VOCAB + 8, bias=False)

    def forward(self, ids: Tensor, batch: THDBatch | None = None) -> Tensor:
        x = self.wte(ids)
        positions = positions_of(ids, batch)
        for block in self.h:
            x = block(x, positions, batch)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


class NanoBlock(nn.Module):
    """One key head for all queries, normed queries and keys, squared ReLU, no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(SIZE, SIZE, bias=False)
        self.kv = nn.Linear(SIZE, 2 * 8, bias=False)
        self.proj = nn.Linear(SIZE, SIZE, bias=False)
        self.up = nn.Linear(SIZE, 2 * SIZE, bias=False)
        self.down = nn.Linear(2 * SIZE, SIZE, bias=False)

    def forward(self, x: Tensor, positions: Tensor, batch: THDBatch | None) -> Tensor:
        normed = F.rms_norm(x, (SIZE,))
        q = self.q(normed).unflatten(-1, (3, 8))
        k, v = self.kv(normed).unflatten(-1, (2, 1, 8)).unbind(1)
        q = F.rms_norm(rotated(q, positions), (8,))
        k = F.rms_norm(rotated(k, positions), (8,))
        x = x + self.proj(attend(q, k, v, batch))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (SIZE,)))).square())


class NanoChat(nn.Module):
    """A normed embedding and logits under a soft cap."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, SIZE)
        self.lm_head = nn.Linear(SIZE, VOCAB, bias=False)
        self.h = nn.ModuleList([NanoBlock() for _ in range(2)])

    def forward(self, ids: Tensor, batch: THDBatch | None = None) -> Tensor:
        x = F.rms_norm(self.wte(ids), (SIZE,))
        positions = positions_of(ids, batch)
        for block in self.h:
            x = block(x, positions, batch)
        return 15 * torch.tanh(self.lm_head(F.rms_norm(x, (SIZE,))) / 15)
