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
_PADDING = 1.25
_FREE = 8
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


class _Sequence(NamedTuple):
    """A sequence's numbers of queries and keys, and its first rows among the pack's queries and keys."""

    length: int
    key_length: int
    start: int
    key_start: int


class PortableKernel:
    """Attention by matrix products as a raw kernel, for all head sizes, with softcap and log-sum-exp."""

    sizes = staticmethod(any_size)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, spec: AttentionSpec) -> OutLse:
        """Return out in the dtype of q and lse in fp32 (fp64 for fp64 inputs)."""
        out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
        for group, mask in _masked_groups(call, spec, lse):
            group_out, group_lse = product_forward(
                group.q.batch(q),
                group.k.batch(k),
                group.k.batch(v),
                mask=mask,
                scale=spec.scale,
                softcap=spec.softcap,
            )
            group.q.write(out, group_out)
            group.q.write(lse, group_lse)
        return out, lse

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def backward(self, grad: Tensor, saved: Saved, call: KernelCall, spec: AttentionSpec) -> Gradients:
        """Return dq, dk and dv from weights that are recomputed with lse."""
        q, k, v, out, lse = saved
        dq = torch.zeros_like(q)
        dk = torch.zeros_like(k)
        dv = torch.zeros_like(v)

        for group, mask in _masked_groups(call, spec, lse):
            # Rows of padding keep an lse of +inf, which gives them weights of 0.
            padded_lse = lse.new_full((len(group.q.taken), lse.shape[1]), torch.inf)
            padded_lse.index_copy_(0, group.q.real, lse.index_select(0, group.q.target))

            group_grad = group.q.batch(grad)
            group_dq, group_dk, group_dv = product_backward(
                group_grad,
                group.q.batch(q),
                group.k.batch(k),
                group.k.batch(v),
                group.q.batch(out),
                padded_lse.view(group_grad.shape[:3]),
                mask=mask,
                scale=spec.scale,
                softcap=spec.softcap,
            )
            group.q.write(dq, group_dq)
            group.k.write(dk, group_dk)
            group.k.write(dv, group_dv)
        return dq, dk, dv


def _masked_groups(call: KernelCall, spec: AttentionSpec, like: Tensor) -> Iterator[tuple[Group, Tensor]]:
    """Yield the groups of a call and their additive masks ``[B, 1, 1, R, K]`` in the dtype of ``like``."""
    for group in _make_groups(*call.lengths_on_host(), spec.right, call.cu_seqlens_q.device):
        row = torch.arange(group.q.length, device=like.device)[:, None]
        key = torch.arange(group.k.length, device=like.device)
        lengths = group.lengths[:, None, None]
        key_lengths = group.key_lengths[:, None, None]

        distance = key - row - (key_lengths - lengths)  # from a query's own position to a key
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
    starts_q = accumulate(q_lengths, initial=0)
    starts_kv = accumulate(kv_lengths, initial=0)
    # The starts have one entry more, the total of the lengths, which zip leaves out.
    numbers = zip(q_lengths, kv_lengths, starts_q, starts_kv, strict=False)
    sequences = [_Sequence(*of_one) for of_one in numbers]

    members: list[list[_Sequence]] = []
    for sequence in sorted(sequences):
        if sequence.length == 0 or sequence.key_length == 0:
            continue
        if members and _fits(sequence, members[-1]):
            members[-1].append(sequence)
        else:
            members.append([sequence])

    groups: tuple[Group, ...] = uploaded(tuple(_make_group(group, right) for group in members), device)
    return groups


def _fits(sequence: _Sequence, group: list[_Sequence]) -> bool:
    """Return whether a group takes one more sequence, which has at least as many queries as its members."""
    shortest = group[0].length
    key_lengths = [member.key_length for member in (*group, sequence)]
    most_keys = max(key_lengths)
    alike = (
        sequence.length <= _PADDING * shortest + _FREE and most_keys <= _PADDING * min(key_lengths) + _FREE
    )
    return alike and len(key_lengths) * sequence.length * most_keys <= _SCORES


def _make_group(members: list[_Sequence], right: int) -> Group:
    """Return a group of numpy arrays, so that all groups are uploaded to the device together."""
    lengths, key_lengths, starts, key_starts = np.array(members, dtype=np.int64).T
    row = np.arange(int(lengths.max()))
    key = np.arange(int(key_lengths.max()))

    real_q = row < lengths[:, None]
    real_k = key < key_lengths[:, None]
    q = starts[:, None] + np.where(real_q, row, 0)
    k = key_starts[:, None] + np.where(real_k, key, 0)

    if right >= 0:  # the first queries may see no key; their out stays 0 and their lse -inf
        real_q &= row + (key_lengths - lengths)[:, None] + right >= 0
    return Group(_rows(q, real_q), _rows(k, real_k), lengths, key_lengths)


def _rows(taken: Any, real: Any) -> Rows:
    """Return the rows of a padded batch from the row of the pack, and the flag, of each of its places."""
    return Rows(taken.ravel(), np.flatnonzero(real), taken[real], taken.shape[1])  # type: ignore[arg-type]
