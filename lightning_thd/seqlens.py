"""Lengths, cu_seqlens or position ids -> another of these forms, or the sequence number of every slot.

Legend: T slots in a pack, S sequences. ``cu_seqlens`` is int32 ``[S + 1]``, starts at 0, never decreases.

T and S are arguments if they cannot be read from shapes. So the host need not wait for a GPU, and
functions run on the meta device and inside ``torch.compile(fullgraph=True)``. ``check_cu_seqlens``, and
``pad_cu_seqlens`` without lengths, are the exceptions: they read the device. All others check values only in
lists, numpy arrays and CPU tensors. Every function accepts lists and arrays as well as tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_thd._checks import host_ints, int_tensor, whole_number
from lightning_thd._static import shapes_are_static

__all__ = [
    "check_cu_seqlens",
    "cu_seqlens_from_lengths",
    "cu_seqlens_from_position_ids",
    "lengths_from_cu_seqlens",
    "pad_cu_seqlens",
    "position_ids_from_cu_seqlens",
    "seq_idx_from_cu_seqlens",
]

INT32_MAX = 2**31 - 1  # cu_seqlens are int32 in flash-attn, Transformer Engine and torch.nn.attention.varlen

Ints = Tensor | npt.NDArray[np.integer] | Sequence[int]


def cu_seqlens_from_lengths(lengths: Ints) -> Tensor:
    """Return the offsets (cumulative sums) of lengths.

    Args:
        lengths: ``[S]``, in tokens: an integer tensor, a numpy array or a sequence of ints.

    Returns:
        int32 ``[S + 1]``, on the tensor's device, or on the CPU. ``[3, 2]`` becomes ``[0, 3, 5]``.
        Lengths on a device are not checked; call ``check_cu_seqlens`` to check the result.
    """
    lengths = _row(lengths, "lengths")
    host = host_values(lengths)
    if host is not None:
        _check_lengths(host)
    zero = torch.zeros(1, dtype=torch.int32, device=lengths.device)
    return torch.cat([zero, torch.cumsum(lengths, 0, dtype=torch.int32)])


def lengths_from_cu_seqlens(cu_seqlens: Ints) -> Tensor:
    """Return the lengths between offsets.

    Args:
        cu_seqlens: int32 ``[S + 1]``.

    Returns:
        int32 ``[S]``, in tokens. ``[0, 3, 5]`` becomes ``[3, 2]``.
    """
    return torch.diff(_offsets(cu_seqlens, None))


def position_ids_from_cu_seqlens(cu_seqlens: Ints, total: int) -> Tensor:
    """Count positions from zero inside every sequence.

    Args:
        cu_seqlens: int32 ``[S + 1]``, first entry 0, last entry ``total``.
        total: number of slots T, known on the host.

    Returns:
        int64 ``[T]``. ``([0, 3, 5], 5)`` becomes ``[0, 1, 2, 0, 1]``.
    """
    total = _count(total, "total")
    cu_seqlens = _offsets(cu_seqlens, total)
    starts = torch.repeat_interleave(cu_seqlens[:-1], torch.diff(cu_seqlens), output_size=total)
    return torch.arange(total, device=cu_seqlens.device) - starts


def seq_idx_from_cu_seqlens(cu_seqlens: Ints, total: int) -> Tensor:
    """Return the sequence number of every slot, as state-space kernels need it.

    Args:
        cu_seqlens: int32 ``[S + 1]``, first entry 0, last entry ``total``.
        total: number of slots T, known on the host.

    Returns:
        int32 ``[T]``, counted from 0. ``([0, 3, 5], 5)`` becomes ``[0, 0, 0, 1, 1]``.
    """
    total = _count(total, "total")
    return torch.repeat_interleave(torch.diff(_offsets(cu_seqlens, total)), output_size=total)


def cu_seqlens_from_position_ids(position_ids: Ints, *, num_sequences: int) -> Tensor:
    """Return the offsets of the sequences; a sequence starts at every position 0.

    Args:
        position_ids: integer ``[T]``, counted from 0 in every sequence. Empty sequences cannot be found.
        num_sequences: number of sequences S, known on the host. If fewer are found, the last entry T repeats.

    Returns:
        int32 ``[S + 1]``. ``([0, 1, 2, 0, 1], num_sequences=2)`` becomes ``[0, 3, 5]``. More sequences than
        ``num_sequences`` raise ValueError on the CPU. On a device, the last entry is then below T, for which
        ``check_cu_seqlens`` raises.
    """
    position_ids = _row(position_ids, "position_ids")
    num_sequences = _count(num_sequences, "num_sequences")
    host = host_values(position_ids)
    if host is not None and host.size:
        _check_position_ids(host, num_sequences)

    # Sequence k begins at the first slot whose number is k; numbers that do not occur give T.
    numbers = torch.cumsum(position_ids == 0, 0, dtype=torch.int32)
    first_to_last = torch.arange(1, num_sequences + 2, dtype=torch.int32, device=position_ids.device)
    return torch.searchsorted(numbers, first_to_last, out_int32=True)


def pad_cu_seqlens(
    cu_seqlens: Ints,
    num_sequences: int,
    total: int,
    *,
    max_seqlen: int | None = None,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """Pad offsets with dummy sequences to a fixed number of sequences and slots, as a CUDA graph needs.

    Offsets up to the last real token stay. Dummy sequences of equal length fill the tail up to ``total``;
    the last may be shorter. They are as short as the number of spare entries allows, because many short
    sequences are cheapest for attention. Entries that are left repeat ``total``.

    Args:
        cu_seqlens: int32 ``[S + 1]``. Empty sequences at its end are dropped.
        num_sequences: number of sequences of the result, known on the host.
        total: number of slots T of the result, known on the host.
        max_seqlen: the longest sequence that the kernel allows, in tokens; None means no limit.
        lengths: the S lengths on the host; with them, a tensor on a device is not read.

    Returns:
        int32 ``[num_sequences + 1]`` on the same device. ``([0, 3, 5], 4, 9)`` becomes ``[0, 3, 5, 7, 9]``,
        and ``([0, 3, 5], 4, 6)`` becomes ``[0, 3, 5, 6, 6]``.
    """
    num_sequences = _count(num_sequences, "num_sequences")
    total = _count(total, "total")
    cu_seqlens = _offsets(cu_seqlens, None)
    host_lengths = _host_lengths(cu_seqlens, lengths)
    used = sum(host_lengths)
    sequences = len(host_lengths)  # without empty ones at the end
    while sequences and host_lengths[sequences - 1] == 0:
        sequences -= 1

    tail = total - used  # slots to fill
    spare = num_sequences - sequences  # dummy sequences to fill them with
    if tail < 0:
        raise ValueError(
            f"{used} tokens do not fit into total={total}; none may be cut off. Use a larger bucket."
        )
    if spare < 0:
        raise ValueError(
            f"{sequences} sequences do not fit into num_sequences={num_sequences}; none may be cut off. "
            "Use a larger bucket."
        )
    if tail and not spare:
        raise ValueError(
            f"A tail of {tail} slots needs a dummy sequence. Pass num_sequences={num_sequences + 1} or more."
        )

    step = -(-tail // max(spare, 1))  # the length of a dummy sequence
    if max_seqlen is not None:
        max_seqlen = _count(max_seqlen, "max_seqlen")
        longest = max(host_lengths, default=0)
        if longest > max_seqlen:
            raise ValueError(
                f"A sequence has {longest} tokens, but max_seqlen={max_seqlen}. Use a bucket with a larger "
                "max_seqlen."
            )
        if step > max_seqlen:
            raise ValueError(
                f"A tail of {tail} slots over {spare} spare sequences makes them {step} long, but "
                f"max_seqlen={max_seqlen}. Use a bucket with a larger max_seqlen, with more sequences or "
                "with fewer slots."
            )
    ends = torch.arange(1, spare + 1, device=cu_seqlens.device) * step + used
    return torch.cat([cu_seqlens[: sequences + 1], ends.clamp(max=total).to(torch.int32)])


def check_cu_seqlens(cu_seqlens: Ints, total: int) -> None:
    """Raise unless a tensor has valid offsets of ``total`` slots; this reads from the device, which is slow.

    Args:
        cu_seqlens: int32 ``[S + 1]``, first entry 0, never decreasing, last entry ``total``.
        total: number of slots T.
    """
    total = _count(total, "total")
    cu_seqlens = _offsets(cu_seqlens, None)
    if cu_seqlens.device.type == "meta":
        raise ValueError("cu_seqlens is on the meta device, which holds no values. Check it on the CPU.")
    _check_offsets(cu_seqlens.detach().cpu().numpy(), total)


def host_values(tensor: Tensor) -> npt.NDArray[np.integer] | None:
    """Return the values of a plain CPU tensor; None for others, and while code is traced or recorded."""
    if torch.compiler.is_compiling() or type(tensor) is not Tensor or tensor.device.type != "cpu":
        return None
    if shapes_are_static():  # a recorded step must not depend on the values of its first batch
        return None
    return tensor.numpy()


def _row(values: Any, name: str) -> Tensor:
    """Return integers as a tensor of one dimension."""
    tensor = int_tensor(values, name)
    if tensor.ndim != 1:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}; wanted one dimension, one pack. Call this once per row."
        )
    return tensor


def _count(count: Any, name: str) -> int:
    """Return a number of slots or sequences, which must fit int32."""
    return whole_number(count, name, most=INT32_MAX, advice="Pass the number that the host knows.")


def _offsets(cu_seqlens: Any, total: int | None) -> Tensor:
    """Return checked offsets as an int32 tensor; lists and arrays of any integers become CPU tensors."""
    if not isinstance(cu_seqlens, Tensor):
        values = int_tensor(cu_seqlens, "cu_seqlens")
        if not torch.compiler.is_compiling() and values.numel():
            most = max(int(values.max()), int(values.min()), key=abs)
            if abs(most) > INT32_MAX:
                raise ValueError(f"cu_seqlens holds {most}, past int32. Make smaller packs.")
        cu_seqlens = values.to(torch.int32)

    assert isinstance(cu_seqlens, Tensor)
    if cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype}; wanted torch.int32. Call cu_seqlens.to(torch.int32)."
        )
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"cu_seqlens has shape {list(cu_seqlens.shape)}; wanted [S + 1], starting with 0.")

    host = host_values(cu_seqlens)
    if host is not None:
        _check_offsets(host, total)
    return cu_seqlens


def _check_offsets(host: npt.NDArray[np.integer], total: int | None) -> None:
    """Raise unless offsets start at 0, never decrease, and end at ``total`` if it is given."""
    if host[0] != 0:
        raise ValueError(f"cu_seqlens starts with {host[0]}; wanted 0. Subtract cu_seqlens[0].")
    falls = np.nonzero(host[1:] < host[:-1])[0]
    if falls.size:
        i = int(falls[0])
        raise ValueError(
            f"cu_seqlens decreases from {host[i]} to {host[i + 1]} at entry {i + 1}; wanted offsets that "
            "never decrease. Are they lengths, or did a sum overflow? Call cu_seqlens_from_lengths(lengths)."
        )
    if total is not None and host[-1] != total:
        advice = "Use pad_cu_seqlens." if host[-1] < total else f"Pass total={host[-1]}."
        raise ValueError(f"cu_seqlens ends with {host[-1]} but there are total={total} slots. {advice}")


def _check_lengths(host: npt.NDArray[np.integer]) -> None:
    """Raise if a length is below 0, or if their sum is past int32."""
    if host.size and host.min() < 0:
        i = int(host.argmin())
        raise ValueError(f"Sequence {i} has length {host[i]}; wanted 0 or more tokens. Fix the lengths.")
    total = int(host.sum(dtype=np.int64))
    if total > INT32_MAX:
        raise ValueError(
            f"{host.size} lengths add up to {total} tokens; wanted at most {INT32_MAX}. Make smaller packs."
        )


def _check_position_ids(host: npt.NDArray[np.integer], num_sequences: int) -> None:
    """Raise unless positions count from 0 in at most ``num_sequences`` sequences."""
    starts = host == 0
    is_wrong = ~starts
    is_wrong[1:] &= host[1:] != host[:-1] + 1
    if is_wrong.any():
        i = int(np.argmax(is_wrong))
        before = f" after {host[i - 1]}" if i else ""
        raise ValueError(
            f"position_ids[{i}] is {host[i]}{before}; wanted 0 at the start "
            "of a sequence and one more at each later slot. Pass the positions of the whole pack, before it "
            "is cut into context-parallel shards and without M-RoPE axes."
        )

    sequences = int(starts.sum())
    if sequences > num_sequences:
        raise ValueError(
            f"There are {sequences} sequences but num_sequences={num_sequences}. Pass {sequences} or more."
        )


def _host_lengths(cu_seqlens: Tensor, lengths: Sequence[int] | None) -> list[int]:
    """Return the lengths between offsets as plain ints, which torch.compile treats as constants."""
    if lengths is None:
        if cu_seqlens.device.type == "meta":
            raise ValueError("cu_seqlens is on the meta device, which holds no values. Pass lengths=.")
        from_device: list[int] = torch.diff(cu_seqlens).tolist()
        return from_device

    if torch.compiler.is_compiling():
        values = list(lengths)
    else:
        values = host_ints(lengths, "lengths", least=0).tolist()
    if len(values) + 1 != cu_seqlens.shape[0]:
        raise ValueError(
            f"{len(values)} lengths do not fit cu_seqlens of {cu_seqlens.shape[0]} entries. Pass its lengths."
        )
    host = host_values(cu_seqlens)
    if host is None:
        return values
    differences = np.flatnonzero(np.diff(host) != np.asarray(values))
    if differences.size:
        first = differences[0]
        shown = slice(first, first + 8)
        raise ValueError(
            f"lengths[{first}:] are {values[shown]} but cu_seqlens gives {np.diff(host)[shown].tolist()}. "
            "Pass the same."
        )
    return values
