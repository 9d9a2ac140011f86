"""THD tensors of any device and dtype -> attention by matrix products, on groups of similar lengths.

A row of padding is a copy of its sequence's first row. Lengths that the host does not know are read from
the device at every call; those of a batch's boundaries are known.
Legend: T slots, B sequences of a group, R rows of queries, K keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_thd.attention.kernels.cpu_tiles import product_backward, product_forward
from lightning_thd.attention.kernels.raw import Gradients, OutLse, Saved, any_size
from lightning_thd.attention.spec import AttentionSpec
from lightning_thd.batch.upload import uploaded
from lightning_thd.boundaries import KernelCall

# Padding may lengthen a group's shortest sequence to _PADDING times its length plus _FREE rows.
_PADDING, _FREE = 1.25, 8
_SCORES = 1 << 20  # A group of several sequences has at most this many scores per head: 4 MiB in fp32.


class Rows(NamedTuple):
    """Indices of rows in the pack and in a padded batch; padding and rows that see no key are not real."""

    taken: Tensor  # for each row of the batch, the row of the pack to copy
    real: Tensor  # the rows of the batch whose results count
    target: Tensor  # for each of these, the row of the pack to write
    length: int

    def batch(self, x: Tensor) -> Tensor:
        """Return rows of ``[T, ...]`` as a batch ``[B, length, ...]``."""
        return x.index_select(0, self.taken).view(-1, self.length, *x.shape[1:])

    def write(self, whole: Tensor, part: Tensor) -> None:
        """Write the real rows of ``[B, length, ...]`` to ``[T, ...]``."""
        whole.index_copy_(0, self.target, part.flatten(0, 1).index_select(0, self.real).to(whole.dtype))


class Group(NamedTuple):
    """Sequences of similar length as one batch, with their numbers of queries and keys, int64 ``[B]``."""

    q: Rows
    k: Rows
    lengths: Tensor
    key_lengths: Tensor


class PortableKernel:
    """Attention by matrix products as a raw kernel, for all head sizes, with softcap and log-sum-exp."""

    sizes = staticmethod(any_size)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: KernelCall, spec: AttentionSpec) -> OutLse:
        """Return out in the dtype of q and lse in fp32 (fp64 for fp64 inputs)."""
        out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
        for group, mask in _masked_groups(at, spec, lse):
            given = group.q.batch(q), group.k.batch(k), group.k.batch(v)
            parts = product_forward(*given, mask=mask, scale=spec.scale, softcap=spec.softcap)
            group.q.write(out, parts[0])
            group.q.write(lse, parts[1])
        return out, lse

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def backward(self, grad: Tensor, saved: Saved, at: KernelCall, spec: AttentionSpec) -> Gradients:
        """Return dq, dk and dv from weights that are recomputed with lse."""
        q, k, v, out, lse = saved
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for group, mask in _masked_groups(at, spec, lse):
            padded_lse = lse.new_full((len(group.q.taken), lse.shape[1]), torch.inf)  # padding: weights of 0
            padded_lse.index_copy_(0, group.q.real, lse.index_select(0, group.q.target))
            rows = [group.q.batch(x) for x in (grad, q, out)]
            given = rows[0], rows[1], group.k.batch(k), group.k.batch(v), rows[2]
            options: Any = {"mask": mask, "scale": spec.scale, "softcap": spec.softcap}
            parts = product_backward(*given, padded_lse.view(rows[0].shape[:3]), **options)
            group.q.write(dq, parts[0])
            group.k.write(dk, parts[1])
            group.k.write(dv, parts[2])
        return dq, dk, dv


def _masked_groups(at: KernelCall, spec: AttentionSpec, like: Tensor) -> Iterator[tuple[Group, Tensor]]:
    """Yield the groups of a call and their additive masks ``[B, 1, 1, R, K]`` in the dtype of ``like``."""
    for group in _make_groups(*at.lengths_on_host(), spec.right, at.cu_seqlens_q.device):
        row = torch.arange(group.q.length, device=like.device)[:, None]
        key = torch.arange(group.k.length, device=like.device)
        lengths, key_lengths = (x[:, None, None] for x in (group.lengths, group.key_lengths))
        distance = key - row - (key_lengths - lengths)
        hidden = key >= key_lengths
        if spec.left >= 0:
            hidden = hidden | (distance < -spec.left)
        if spec.right >= 0:
            hidden = hidden | (distance > spec.right)
        mask = torch.zeros_like(distance, dtype=like.dtype).masked_fill(hidden, -torch.inf)
        yield group, mask[:, None, None]


@lru_cache(maxsize=32)
def _make_groups(
    q_lengths: tuple[int, ...], kv_lengths: tuple[int, ...], right: int, device: torch.device
) -> tuple[Group, ...]:
    """Group sequences of similar length, shortest first; leave out sequences without queries or keys."""
    starts_q, starts_kv = accumulate(q_lengths, initial=0), accumulate(kv_lengths, initial=0)
    found = list(zip(q_lengths, kv_lengths, starts_q, starts_kv, strict=False))
    groups: list[list[tuple[int, int, int, int]]] = []
    for member in sorted(x for x in found if x[0] and x[1]):
        last, rows = groups[-1] if groups else [], member[0]
        keys = [x[1] for x in (*last, member)]
        alike = last and rows <= _PADDING * last[0][0] + _FREE and max(keys) <= _PADDING * min(keys) + _FREE
        if alike and len(keys) * rows * max(keys) <= _SCORES:
            last.append(member)
        else:
            groups.append([member])
    made: tuple[Group, ...] = uploaded(tuple(_make_group(each, right) for each in groups), device)
    return made


def _make_group(members: list[tuple[int, int, int, int]], right: int) -> Group:
    """Return a group of numpy arrays, so that all groups are uploaded to the device together."""
    lengths, key_lengths, starts, key_starts = np.array(members, dtype=np.int64).T
    row, key = np.arange(int(lengths.max())), np.arange(int(key_lengths.max()))
    real, real_k = row < lengths[:, None], key < key_lengths[:, None]
    q = starts[:, None] + np.where(real, row, 0)
    k = key_starts[:, None] + np.where(real_k, key, 0)
    if right >= 0:  # the first queries may see no key; their out stays 0 and their lse -inf
        real &= row + (key_lengths - lengths)[:, None] + right >= 0
    return Group(_rows(q, real), _rows(k, real_k), lengths, key_lengths)


def _rows(taken: Any, real: Any) -> Rows:
    return Rows(taken.ravel(), np.flatnonzero(real), taken[real], taken.shape[1])  # type: ignore[arg-type]
