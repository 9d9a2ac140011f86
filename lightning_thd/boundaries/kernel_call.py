"""Offsets of queries and keys, and where the keys are -> what one attention kernel call needs to know.

S sequences of the call, K gathered keys.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class KernelCall(NamedTuple):
    """The boundaries of one kernel call.

    Attributes:
        cu_seqlens_q: int32 ``[S + 1]``, offsets of the queries of every sequence.
        cu_seqlens_kv: int32 ``[S + 1]``, offsets of its keys.
        max_seqlen_q: the most queries of a sequence, or more; known on the host.
        max_seqlen_kv: the most keys of a sequence, or more.
        keys: int64 ``[K]``, the rows of k and v to gather before the call; None for all rows in order.
        exchange: the layout of a pack that is cut over context-parallel ranks, whose keys are exchanged
            before the call; None if all keys are on this rank.
        q_lengths: the queries of every sequence, if the host knows them.
        kv_lengths: the keys of every sequence, if the host knows them.
        branches: for every sequence whose keys are gathered, the row of the last key before its queries, on
            the host; -1 if its queries begin with its first key. None if no keys are gathered.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    max_seqlen_q: int
    max_seqlen_kv: int
    keys: Tensor | None = None
    exchange: Any = None
    q_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    branches: tuple[int, ...] | None = None

    @property
    def ranks(self) -> int:
        """Return the number of ranks that exchange keys before the call."""
        ranks: int = 1 if self.exchange is None else self.exchange.cp
        return ranks

    @property
    def exchanged_lengths(self) -> tuple[int, ...] | None:
        """Return the lengths of the whole pack, whose keys are exchanged; None without an exchange."""
        return None if self.exchange is None else tuple(self.exchange.padded_lengths)

    @property
    def arguments(self) -> tuple[Tensor, Tensor, int, int]:
        """Return offsets and longest lengths in the order in which kernels take them."""
        return self.cu_seqlens_q, self.cu_seqlens_kv, self.max_seqlen_q, self.max_seqlen_kv

    def checked(self, rows: int, keys: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return CPU offsets as ints; raise if they miss rows, fall, or have a length over max_seqlen."""
        offsets_q = _checked(self.cu_seqlens_q, rows, self.max_seqlen_q, "q")
        same = self.cu_seqlens_kv is self.cu_seqlens_q
        if same and (rows, self.max_seqlen_q) == (keys, self.max_seqlen_kv):
            return offsets_q, offsets_q
        return offsets_q, _checked(self.cu_seqlens_kv, keys, self.max_seqlen_kv, "kv")

    def lengths_on_host(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the lengths of queries and keys; offsets that the host does not know are read once."""
        lengths_q = self.q_lengths
        if lengths_q is None:
            lengths_q = tuple(self.cu_seqlens_q.diff().tolist())
        if self.cu_seqlens_kv is self.cu_seqlens_q:
            return lengths_q, lengths_q
        lengths_kv = self.kv_lengths
        if lengths_kv is None:
            lengths_kv = tuple(self.cu_seqlens_kv.diff().tolist())
        return lengths_q, lengths_kv


def _checked(cu_seqlens: Tensor, total: int, max_seqlen: int, side: str) -> tuple[int, ...]:
    """Return the offsets of one side, "q" or "kv", as ints; raise if they do not fit its ``total`` rows."""
    offsets, longest, fall = read_offsets(cu_seqlens)
    name = f"cu_seqlens_{side}"

    if offsets[0] != 0 or offsets[-1] != total:
        raise ValueError(
            f"{name} runs from {offsets[0]} to {offsets[-1]} but must run from 0 to {total}, the rows of "
            f"{'q' if side == 'q' else 'k and v'}. Count padding at the end as one more sequence."
        )
    if fall is not None:
        raise ValueError(
            f"{name} falls from {offsets[fall]} to {offsets[fall + 1]} at sequence {fall}; "
            "offsets must never fall."
        )
    if longest > max_seqlen:
        raise ValueError(
            f"max_seqlen_{side}={max_seqlen} but {name} has a sequence of {longest}: pass its length or more."
        )
    return offsets


def read_offsets(cu_seqlens: Tensor) -> tuple[tuple[int, ...], int, int | None]:
    """Return CPU offsets as ints, the longest length, and the index where they fall most, None if nowhere."""
    array = cu_seqlens.numpy()
    return _parse(array.tobytes(), array.dtype.str)  # type: ignore[no-any-return]


# Cached by value, because all layers, and often the next steps too, call with equal offsets.
@lru_cache(maxsize=32)
@torch.compiler.disable  # type: ignore[untyped-decorator]  # dynamo takes no array over bytes
def _parse(raw: bytes, dtype: str) -> tuple[tuple[int, ...], int, int | None]:
    offsets = np.frombuffer(raw, dtype)
    lengths = np.diff(offsets)
    lowest = int(lengths.argmin())
    fall = lowest if lengths[lowest] < 0 else None
    return tuple(offsets.tolist()), int(lengths.max()), fall
