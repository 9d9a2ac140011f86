"""Sequence lengths in any of their forms -> any other form, in O(T + S), without reading the device back.

Legend: T slots in a pack, S sequences. ``cu_seqlens`` is int32 ``[S + 1]``, starts at 0, never decreases.

A size that depends on data (T, S) is an argument, so that every function here runs on a GPU without waiting
for it, on the meta device and inside ``torch.compile(fullgraph=True)``. Values are checked only where looking
is free, in lists, numpy arrays and CPU tensors; on a device only ``check_cu_seqlens`` looks, and
``pad_cu_seqlens`` when it is not told the lengths. Wherever a tensor is wanted, lists and arrays are taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_thd.seqlens.checks import (
    Ints,
    check_lengths,
    check_offsets,
    check_position_ids,
    check_segment_ids,
    check_seq_idx,
    host_lengths,
    host_values,
    read_count,
    read_cu_seqlens,
    require_max_seqlen,
    require_pair,
    require_values,
    row_of_integers,
    tail_step,
)


def cu_seqlens_from_lengths(lengths: Ints) -> Tensor:
    """Sum lengths to offsets.

    Args:
        lengths: ``[S]`` tokens: a tensor of any integer dtype, a numpy array or a sequence of ints.

    Returns:
        int32 ``[S + 1]``, on the tensor's device, or on the CPU. ``[3, 2]`` becomes ``[0, 3, 5]``.
        Lengths on a device are not looked at: ``check_cu_seqlens`` does that.
    """
    lengths = row_of_integers(lengths, "lengths")
    host = host_values(lengths)
    if host is not None:
        check_lengths(host)
    zero = torch.zeros(1, dtype=torch.int32, device=lengths.device)
    return torch.cat([zero, torch.cumsum(lengths, 0, dtype=torch.int32)])


def lengths_from_cu_seqlens(cu_seqlens: Ints) -> Tensor:
    """Return the lengths between offsets.

    Args:
        cu_seqlens: int32 ``[S + 1]``.

    Returns:
        int32 ``[S]``, in tokens. ``[0, 3, 5]`` becomes ``[3, 2]``.
    """
    cu_seqlens = read_cu_seqlens(cu_seqlens, None)
    return torch.diff(cu_seqlens)


def position_ids_from_cu_seqlens(cu_seqlens: Ints, total: int) -> Tensor:
    """Count positions from zero inside every sequence.

    Args:
        cu_seqlens: int32 ``[S + 1]``, first entry 0, last entry ``total``.
        total: number of slots T, known on the host.

    Returns:
        int64 ``[T]``. ``([0, 3, 5], 5)`` becomes ``[0, 1, 2, 0, 1]``.
    """
    total = read_count(total, "total")
    cu_seqlens = read_cu_seqlens(cu_seqlens, total)
    starts = torch.repeat_interleave(cu_seqlens[:-1], torch.diff(cu_seqlens), output_size=total)
    return torch.arange(total, device=cu_seqlens.device) - starts


def seq_idx_from_cu_seqlens(cu_seqlens: Ints, total: int) -> Tensor:
    """Return the sequence number of every slot, as state-space kernels want it.

    Args:
        cu_seqlens: int32 ``[S + 1]``, first entry 0, last entry ``total``.
        total: number of slots T, known on the host.

    Returns:
        int32 ``[T]``, counted from 0. ``([0, 3, 5], 5)`` becomes ``[0, 0, 0, 1, 1]``.
    """
    total = read_count(total, "total")
    cu_seqlens = read_cu_seqlens(cu_seqlens, total)
    return torch.repeat_interleave(torch.diff(cu_seqlens), output_size=total)


def segment_ids_from_cu_seqlens(
    cu_seqlens: Ints, total: int, *, cu_seqlens_padded: Ints | None = None
) -> Tensor:
    """Return the number of every slot's sequence, from 1, and 0 for padding, as segment masks expect.

    Args:
        cu_seqlens: int32 ``[S + 1]``, cumulative real lengths.
        total: number of slots T, known on the host.
        cu_seqlens_padded: int32 ``[S + 1]``, offsets in memory, last entry ``total``; by default the same.

    Returns:
        int32 ``[T]``. ``([0, 3, 5], 8, cu_seqlens_padded=[0, 4, 8])`` becomes ``[1, 1, 1, 0, 2, 2, 0, 0]``.
    """
    total = read_count(total, "total")
    cu_seqlens = read_cu_seqlens(cu_seqlens, total if cu_seqlens_padded is None else None)
    padded = cu_seqlens
    if cu_seqlens_padded is not None:
        padded = read_cu_seqlens(cu_seqlens_padded, total, name="cu_seqlens_padded")
    segment_ids = seq_idx_from_cu_seqlens(padded, total) + 1
    if cu_seqlens_padded is None:
        return segment_ids
    require_pair(cu_seqlens, padded)
    real_ends = padded[:-1] + torch.diff(cu_seqlens)
    ends = torch.repeat_interleave(real_ends, torch.diff(padded), output_size=total)
    is_real = torch.arange(total, device=padded.device) < ends
    return torch.where(is_real, segment_ids, 0)


def cu_seqlens_from_seq_idx(seq_idx: Ints, *, num_sequences: int) -> Tensor:
    """Find where every sequence starts from the sequence number of every slot.

    Args:
        seq_idx: integer ``[T]``, never decreasing, in ``[0, num_sequences)``.
        num_sequences: number of sequences S, known on the host. A number that is absent has length 0.

    Returns:
        int32 ``[S + 1]``. ``([0, 0, 0, 1, 1], num_sequences=2)`` becomes ``[0, 3, 5]``.
    """
    seq_idx = row_of_integers(seq_idx, "seq_idx")
    num_sequences = read_count(num_sequences, "num_sequences")
    host = host_values(seq_idx)
    if host is not None and host.size:
        check_seq_idx(host, num_sequences)
    seq_idx = _wide(seq_idx)
    wanted = torch.arange(num_sequences + 1, dtype=seq_idx.dtype, device=seq_idx.device)
    return torch.searchsorted(seq_idx, wanted, out_int32=True)


def cu_seqlens_from_segment_ids(segment_ids: Ints, *, num_sequences: int) -> tuple[Tensor, Tensor]:
    """Find real lengths and offsets in memory from segment ids; padding belongs to the segment before it.

    Args:
        segment_ids: integer ``[T]``: 1, 2, ... in that order, 0 on padding, which must not come first.
        num_sequences: number of sequences S, known on the host. An id that is absent has length 0.

    Returns:
        ``cu_seqlens`` and ``cu_seqlens_padded``, int32 ``[S + 1]``. ``[1, 1, 1, 0, 2, 2, 0, 0]`` and 2 become
        ``[0, 3, 5]`` and ``[0, 4, 8]``.
    """
    segment_ids = row_of_integers(segment_ids, "segment_ids")
    num_sequences = read_count(num_sequences, "num_sequences")
    host = host_values(segment_ids)
    if host is not None and host.size:
        check_segment_ids(host, num_sequences)
    owners = torch.cummax(_wide(segment_ids), 0).values
    wanted = torch.arange(1, num_sequences + 2, dtype=owners.dtype, device=owners.device)
    padded = torch.searchsorted(owners, wanted, out_int32=True)
    zero = torch.zeros(1, dtype=torch.int32, device=segment_ids.device)
    real_before = torch.cat([zero, torch.cumsum(segment_ids != 0, 0, dtype=torch.int32)])
    return real_before[padded], padded


def cu_seqlens_from_position_ids(position_ids: Ints, *, num_sequences: int) -> Tensor:
    """Find where every sequence starts: where positions restart from 0.

    Args:
        position_ids: integer ``[T]``, counting from 0 in every sequence. Empty sequences leave no trace.
        num_sequences: number of sequences S, known on the host. Where there are fewer, T repeats at the end.

    Returns:
        int32 ``[S + 1]``. ``([0, 1, 2, 0, 1], num_sequences=2)`` becomes ``[0, 3, 5]``. More sequences than
        ``num_sequences`` raise on the CPU; on a device they leave a last entry below T, which
        ``check_cu_seqlens`` refuses.
    """
    position_ids = row_of_integers(position_ids, "position_ids")
    num_sequences = read_count(num_sequences, "num_sequences")
    host = host_values(position_ids)
    if host is not None and host.size:
        check_position_ids(host, num_sequences)
    sequence_numbers = torch.cumsum(position_ids == 0, 0, dtype=torch.int32)
    wanted = torch.arange(1, num_sequences + 2, dtype=torch.int32, device=position_ids.device)
    return torch.searchsorted(sequence_numbers, wanted, out_int32=True)


def pad_cu_seqlens(
    cu_seqlens: Ints,
    num_sequences: int,
    total: int,
    *,
    max_seqlen: int | None = None,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """Pad offsets to a fixed count and total by dummy sequences, as a CUDA graph needs them.

    Offsets up to the last real token stay. The tail up to ``total`` becomes dummy sequences of equal length
    spread over the spare entries, which costs attention least; then ``total`` repeats. Of a pair of offsets
    each is stretched by the same tail, to a total of its own.

    Args:
        cu_seqlens: int32 ``[S + 1]``. Empty sequences at its end are dropped.
        num_sequences: number of sequences of the result, known on the host.
        total: number of slots T of the result, known on the host.
        max_seqlen: longest sequence the kernel is built for, in tokens; none means no limit.
        lengths: the S lengths on the host. With them a device tensor is not read back.

    Returns:
        int32 ``[num_sequences + 1]`` on the same device. ``([0, 3, 5], 4, 9)`` becomes ``[0, 3, 5, 7, 9]``,
        and ``([0, 3, 5], 4, 6)`` becomes ``[0, 3, 5, 6, 6]``.
    """
    num_sequences, total = read_count(num_sequences, "num_sequences"), read_count(total, "total")
    cu_seqlens = read_cu_seqlens(cu_seqlens, None)
    known = host_lengths(cu_seqlens, lengths)
    kept, used = len(known), sum(known)
    while kept and known[kept - 1] == 0:
        kept -= 1
    step = tail_step(kept, used, num_sequences, total)
    if max_seqlen is not None:
        max_seqlen = read_count(max_seqlen, "max_seqlen")
        longest = max(known, default=0)
        require_max_seqlen(longest, max_seqlen, step, num_sequences - kept, total - used)
    tail = torch.arange(1, num_sequences - kept + 1, device=cu_seqlens.device) * step + used
    return torch.cat([cu_seqlens[: kept + 1], tail.clamp(max=total).to(torch.int32)])


def check_cu_seqlens(cu_seqlens: Ints, total: int) -> None:
    """Raise unless a tensor holds offsets of ``total`` slots. Reads the device: not for inner loops.

    Args:
        cu_seqlens: int32 ``[S + 1]``, first entry 0, never decreasing, last entry ``total``.
        total: number of slots T.
    """
    total = read_count(total, "total")
    cu_seqlens = read_cu_seqlens(cu_seqlens, None)
    require_values(cu_seqlens, "Check it where it was made.")
    check_offsets(cu_seqlens.detach().cpu().numpy(), total)


def _wide(numbers: Tensor) -> Tensor:
    """Cast integers below 32 bits to int32, contiguous as searchsorted wants, to hold any sequence number."""
    return (numbers.to(torch.int32) if numbers.element_size() < 4 else numbers).contiguous()
