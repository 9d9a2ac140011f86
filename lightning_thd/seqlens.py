"""Sequence lengths in any of their forms -> any other form, in O(T + S), without reading the device back.

Legend: T slots in a pack, S sequences. ``cu_seqlens`` is int32 ``[S + 1]``, starts at 0, never decreases.

A size that depends on data (T, S) is an argument, so that every function here runs on a GPU without waiting
for it, on the meta device and inside ``torch.compile(fullgraph=True)``. Values are checked only where looking
is free, in lists, numpy arrays and CPU tensors; on a device only ``check_cu_seqlens`` looks, and
``pad_cu_seqlens`` when it is not told the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

INT32_MAX = 2**31 - 1  # cu_seqlens are int32 in flash-attn, Transformer Engine and torch.nn.attention.varlen

Lengths = Tensor | npt.NDArray[np.integer] | Sequence[int]


def cu_seqlens_from_lengths(lengths: Lengths) -> Tensor:
    """Add lengths up to offsets.

    Args:
        lengths: ``[S]`` tokens: a tensor of any integer dtype, a numpy array or a sequence of ints.

    Returns:
        int32 ``[S + 1]``, on the tensor's device, or on the CPU. ``[3, 2]`` becomes ``[0, 3, 5]``.
        Lengths on a device are not looked at: ``check_cu_seqlens`` does that.
    """
    if not isinstance(lengths, Tensor):
        lengths = _tensor_from_host(lengths)
    _require_integers(lengths, "lengths")
    host = _host(lengths)
    if host is not None:
        _check_lengths(host)
    zero = torch.zeros(1, dtype=torch.int32, device=lengths.device)
    return torch.cat([zero, torch.cumsum(lengths, 0, dtype=torch.int32)])


def lengths_from_cu_seqlens(cu_seqlens: Tensor) -> Tensor:
    """Take offsets apart into lengths.

    Args:
        cu_seqlens: int32 ``[S + 1]``.

    Returns:
        int32 ``[S]``, in tokens. ``[0, 3, 5]`` becomes ``[3, 2]``.
    """
    _require_cu_seqlens(cu_seqlens, None)
    return torch.diff(cu_seqlens)


def position_ids_from_cu_seqlens(cu_seqlens: Tensor, total: int) -> Tensor:
    """Count positions from zero inside every sequence.

    Args:
        cu_seqlens: int32 ``[S + 1]``, first entry 0, last entry ``total``.
        total: number of slots T, known on the host.

    Returns:
        int64 ``[T]``. ``([0, 3, 5], 5)`` becomes ``[0, 1, 2, 0, 1]``.
    """
    _require_cu_seqlens(cu_seqlens, total)
    starts = torch.repeat_interleave(cu_seqlens[:-1], torch.diff(cu_seqlens), output_size=total)
    return torch.arange(total, device=cu_seqlens.device) - starts


def seq_idx_from_cu_seqlens(cu_seqlens: Tensor, total: int) -> Tensor:
    """Name the sequence of every slot, as state-space kernels want it.

    Args:
        cu_seqlens: int32 ``[S + 1]``, first entry 0, last entry ``total``.
        total: number of slots T, known on the host.

    Returns:
        int32 ``[T]``, counted from 0. ``([0, 3, 5], 5)`` becomes ``[0, 0, 0, 1, 1]``.
    """
    _require_cu_seqlens(cu_seqlens, total)
    return torch.repeat_interleave(torch.diff(cu_seqlens), output_size=total)


def segment_ids_from_cu_seqlens(
    cu_seqlens: Tensor, total: int, *, cu_seqlens_padded: Tensor | None = None
) -> Tensor:
    """Name the sequence of every slot from 1, and padding 0, as segment masks want it.

    Args:
        cu_seqlens: int32 ``[S + 1]``, cumulative real lengths.
        total: number of slots T, known on the host.
        cu_seqlens_padded: int32 ``[S + 1]``, offsets in memory, last entry ``total``; by default the same.

    Returns:
        int32 ``[T]``. ``([0, 3, 5], 8, cu_seqlens_padded=[0, 4, 8])`` becomes ``[1, 1, 1, 0, 2, 2, 0, 0]``.
    """
    padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    segment_ids = seq_idx_from_cu_seqlens(padded, total) + 1
    if cu_seqlens_padded is None:
        return segment_ids
    _require_cu_seqlens(cu_seqlens, None)
    _require_pair(cu_seqlens, padded)
    real_ends = padded[:-1] + torch.diff(cu_seqlens)
    ends = torch.repeat_interleave(real_ends, torch.diff(padded), output_size=total)
    is_real = torch.arange(total, device=padded.device) < ends
    return torch.where(is_real, segment_ids, 0)


def cu_seqlens_from_seq_idx(seq_idx: Tensor, *, num_sequences: int) -> Tensor:
    """Find where every sequence starts from the sequence number of every slot.

    Args:
        seq_idx: integer ``[T]``, never decreasing, in ``[0, num_sequences)``.
        num_sequences: number of sequences S, known on the host. A number that is absent has length 0.

    Returns:
        int32 ``[S + 1]``. ``([0, 0, 0, 1, 1], num_sequences=2)`` becomes ``[0, 3, 5]``.
    """
    _require_integers(seq_idx, "seq_idx")
    host = _host(seq_idx)
    if host is not None and host.size:
        if (np.diff(host) < 0).any() or host[0] < 0:
            raise ValueError(
                "seq_idx decreases or is negative; wanted 0 for the slots of the first sequence, then 1. "
                "Lay the sequences end to end and number them in that order."
            )
        _require_enough(int(host[-1]) + 1, num_sequences)
    wanted = torch.arange(num_sequences + 1, dtype=seq_idx.dtype, device=seq_idx.device)
    return torch.searchsorted(seq_idx.contiguous(), wanted, out_int32=True)


def cu_seqlens_from_position_ids(position_ids: Tensor, *, num_sequences: int) -> Tensor:
    """Find where every sequence starts: where positions start again from 0.

    Args:
        position_ids: integer ``[T]``, counting from 0 in every sequence. Empty sequences leave no trace.
        num_sequences: number of sequences S, known on the host. Where there are fewer, T repeats at the end.

    Returns:
        int32 ``[S + 1]``. ``([0, 1, 2, 0, 1], num_sequences=2)`` becomes ``[0, 3, 5]``. More sequences than
        ``num_sequences`` raise on the CPU; on a device they leave a last entry below T, which
        ``check_cu_seqlens`` refuses.
    """
    _require_integers(position_ids, "position_ids")
    host = _host(position_ids)
    if host is not None and host.size:
        _check_position_ids(host, num_sequences)
    sequence_numbers = torch.cumsum(position_ids == 0, 0, dtype=torch.int32)
    wanted = torch.arange(1, num_sequences + 2, dtype=torch.int32, device=position_ids.device)
    return torch.searchsorted(sequence_numbers, wanted, out_int32=True)


def pad_cu_seqlens(
    cu_seqlens: Tensor,
    num_sequences: int,
    total: int,
    *,
    max_seqlen: int | None = None,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """Stretch offsets to a fixed count and total, as a captured CUDA graph needs them.

    Offsets up to the last real token stay. The tail up to ``total`` becomes dummy sequences of equal length
    spread over the spare slots, which costs attention least; then ``total`` repeats.

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
    _require_cu_seqlens(cu_seqlens, None)
    host_lengths = _host_lengths(cu_seqlens, lengths)
    kept, used = len(host_lengths), sum(host_lengths)
    while kept and host_lengths[kept - 1] == 0:
        kept -= 1
    step = _tail_step(kept, used, num_sequences, total)
    if max_seqlen is not None:
        longest = max(host_lengths, default=0)
        _require_max_seqlen(longest, max_seqlen, step, num_sequences - kept, total - used)
    tail = torch.arange(1, num_sequences - kept + 1, device=cu_seqlens.device) * step + used
    return torch.cat([cu_seqlens[: kept + 1], tail.clamp(max=total).to(torch.int32)])


def check_cu_seqlens(cu_seqlens: Tensor, total: int) -> None:
    """Raise unless these are offsets of ``total`` slots. Reads the device: not for inner loops.

    Args:
        cu_seqlens: int32 ``[S + 1]``, first entry 0, never decreasing, last entry ``total``.
        total: number of slots T.
    """
    _require_cu_seqlens(cu_seqlens, None)
    _check_offsets(cu_seqlens.detach().cpu().numpy(), total)


def _host(tensor: Tensor) -> npt.NDArray[np.integer] | None:
    """Give the values where looking costs nothing: a plain CPU tensor, outside of tracing."""
    if torch.compiler.is_compiling() or type(tensor) is not Tensor or tensor.device.type != "cpu":
        return None
    return tensor.numpy()


def _tensor_from_host(lengths: npt.NDArray[np.integer] | Sequence[int]) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.tensor(lengths, dtype=torch.int64)
    array = np.asarray(lengths)
    if array.size == 0:
        array = array.astype(np.int64)  # numpy takes an empty list for floats
    if array.dtype.kind not in "iu":
        raise ValueError(f"lengths are {array.dtype}; wanted whole numbers of tokens. Pass ints.")
    return torch.from_numpy(array.astype(np.int64))


def _require_integers(tensor: Tensor, name: str) -> None:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} is {tensor.dtype}; wanted an integer dtype. Call {name}.to(torch.int32).")
    if tensor.ndim != 1:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}; wanted one dimension, one pack. "
            "Call this once a row, or flatten the row with [0]."
        )


def _require_cu_seqlens(cu_seqlens: Tensor, total: int | None) -> None:
    """Check dtype and shape always, values where they are free to see."""
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(
            f"cu_seqlens is a {type(cu_seqlens).__name__}; wanted an int32 tensor. "
            "Call cu_seqlens_from_lengths(lengths)."
        )
    if cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype}; wanted torch.int32, which every varlen kernel reads. "
            "Call cu_seqlens.to(torch.int32)."
        )
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(
            f"cu_seqlens has shape {list(cu_seqlens.shape)}; wanted [S + 1], starting with 0. "
            "Call cu_seqlens_from_lengths(lengths)."
        )
    host = _host(cu_seqlens)
    if host is not None:
        _check_offsets(host, total)


def _check_offsets(host: npt.NDArray[np.integer], total: int | None) -> None:
    if host[0] != 0:
        raise ValueError(
            f"cu_seqlens starts with {host[0]}; wanted 0. Subtract cu_seqlens[0] or prepend a 0."
        )
    falls = np.nonzero(host[1:] < host[:-1])[0]
    if falls.size:
        i = int(falls[0])
        raise ValueError(
            f"cu_seqlens decreases from {host[i]} to {host[i + 1]} at entry {i + 1}; wanted offsets that "
            "never decrease. Were lengths passed, or a sum past int32? Call cu_seqlens_from_lengths(lengths)."
        )
    if total is not None and host[-1] != total:
        raise ValueError(
            f"cu_seqlens ends with {host[-1]} but there are total={total} slots; wanted them equal, since "
            "kernels leave a slot of no sequence unwritten. Give the trailing pad an entry: pad_cu_seqlens."
        )


def _check_lengths(host: npt.NDArray[np.integer]) -> None:
    negative = np.nonzero(host < 0)[0]
    if negative.size:
        i = int(negative[0])
        raise ValueError(f"Sequence {i} has length {host[i]}; wanted 0 or more tokens. Mend the lengths.")
    total = int(host.sum(dtype=np.int64))
    if total > INT32_MAX:
        raise ValueError(
            f"{host.size} lengths add up to {total} tokens; wanted at most {INT32_MAX}, since cu_seqlens are "
            "int32. Put fewer sequences into one pack."
        )


def _check_position_ids(host: npt.NDArray[np.integer], num_sequences: int) -> None:
    starts = host == 0
    bad = ~starts
    bad[1:] &= host[1:] != host[:-1] + 1
    if bad.any():
        i = int(np.argmax(bad))
        raise ValueError(
            f"position_ids[{i}] is {host[i]}{f' after {host[i - 1]}' if i else ''}; wanted 0 at the start "
            "of a sequence and one more at every further slot. Pass the positions of the whole pack, before "
            "it is cut into context-parallel shards and without M-RoPE axes."
        )
    _require_enough(int(starts.sum()), num_sequences)


def _require_enough(found: int, num_sequences: int) -> None:
    if found > num_sequences:
        raise ValueError(
            f"There are {found} sequences but num_sequences={num_sequences}; none may be cut off. "
            f"Pass num_sequences={found} or more."
        )


def _require_pair(cu_seqlens: Tensor, padded: Tensor) -> None:
    if cu_seqlens.shape != padded.shape:
        raise ValueError(
            f"cu_seqlens has {cu_seqlens.shape[0]} entries and cu_seqlens_padded {padded.shape[0]}; wanted "
            "as many. Give a trailing pad an entry in both."
        )
    real, held = _host(cu_seqlens), _host(padded)
    if real is not None and held is not None and (np.diff(real) > np.diff(held)).any():
        i = int(np.argmax(np.diff(real) > np.diff(held)))
        raise ValueError(
            f"Sequence {i} has {real[i + 1] - real[i]} tokens in {held[i + 1] - held[i]} slots; wanted no "
            "fewer slots. Were cu_seqlens and cu_seqlens_padded swapped?"
        )


def _host_lengths(cu_seqlens: Tensor, lengths: Sequence[int] | None) -> list[int]:
    """Lengths as plain ints, which torch.compile takes for constants."""
    if lengths is None:
        known: list[int] = torch.diff(cu_seqlens).tolist()
        return known
    if len(lengths) + 1 != cu_seqlens.shape[0]:
        raise ValueError(
            f"{len(lengths)} lengths do not fit cu_seqlens of {cu_seqlens.shape[0]} entries; wanted "
            f"{cu_seqlens.shape[0] - 1}. Pass the lengths these offsets were made from."
        )
    host = _host(cu_seqlens)
    if host is not None and (np.diff(host) != np.asarray(lengths)).any():
        raise ValueError(
            f"lengths={list(lengths)[:8]}... but cu_seqlens gives {np.diff(host)[:8].tolist()}...; wanted "
            "the same. Pass the lengths these offsets were made from."
        )
    return list(lengths)


def _tail_step(kept: int, used: int, num_sequences: int, total: int) -> int:
    """Length of a dummy sequence, after checking that everything fits."""
    if total > INT32_MAX:
        raise ValueError(f"total={total} is past int32 ({INT32_MAX}); wanted fewer slots in a pack.")
    if kept > num_sequences:
        raise ValueError(
            f"{kept} sequences do not fit into num_sequences={num_sequences}; none may be cut off. "
            "Use a bucket with more sequences."
        )
    tail, spare = total - used, num_sequences - kept
    if tail < 0:
        raise ValueError(
            f"{used} tokens do not fit into total={total}; none may be cut off. Use a larger bucket."
        )
    if tail and not spare:
        raise ValueError(
            f"A tail of {tail} slots needs a dummy sequence, but num_sequences={num_sequences} are taken. "
            f"Pass num_sequences={num_sequences + 1} or more."
        )
    return -(-tail // max(spare, 1))


def _require_max_seqlen(longest: int, max_seqlen: int, step: int, spare: int, tail: int) -> None:
    if longest > max_seqlen:
        raise ValueError(
            f"A sequence has {longest} tokens but max_seqlen={max_seqlen}. Use a bucket of longer max_seqlen."
        )
    if step > max_seqlen:
        raise ValueError(
            f"A tail of {tail} slots over {spare} spare sequences makes them {step} long, past "
            f"max_seqlen={max_seqlen}. Use a bucket of more sequences or fewer slots."
        )
