"""Lengths and offsets -> checked values where reading them is free, and errors that say what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_thd._checks import host_ints, int_tensor, whole_number
from lightning_thd._static import shapes_are_static

INT32_MAX = 2**31 - 1  # cu_seqlens are int32 in flash-attn, Transformer Engine and torch.nn.attention.varlen

# What is taken where integers are wanted: a tensor stays on its device, the others are read on the host.
Ints = Tensor | npt.NDArray[np.integer] | Sequence[int]


def host_values(tensor: Tensor) -> npt.NDArray[np.integer] | None:
    """Return the values of a plain CPU tensor outside of tracing; None where looking would cost."""
    if torch.compiler.is_compiling() or type(tensor) is not Tensor or tensor.device.type != "cpu":
        return None
    if shapes_are_static():  # a recorded step must not look at the values it is recorded on
        return None
    return tensor.numpy()


def row_of_integers(values: Any, name: str) -> Tensor:
    """Return one row of integers as a tensor; raise for other dtypes and for more or fewer dimensions."""
    tensor = int_tensor(values, name)
    if tensor.ndim != 1:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}; wanted one dimension, one pack. "
            "Call this once a row, or flatten the row with [0]."
        )
    return tensor


def read_count(count: Any, name: str) -> int:
    """Return a number of slots or sequences; raise for what is negative, past int32 or no whole number."""
    number = whole_number(count, name, advice="It is known on the host.")
    if not torch.compiler.is_compiling() and number > INT32_MAX:
        raise ValueError(f"{name}={number} is past int32 ({INT32_MAX}); wanted fewer of them in a pack.")
    return number


def read_cu_seqlens(cu_seqlens: Any, total: int | None, *, name: str = "cu_seqlens") -> Tensor:
    """Return offsets as an int32 tensor, checked: dtype and shape always, values where reading them is free.

    A list or numpy array of any integers becomes a tensor on the CPU; a tensor must be int32 already.
    """
    if not isinstance(cu_seqlens, Tensor):
        found = int_tensor(cu_seqlens, name)
        if not torch.compiler.is_compiling() and found.numel() and int(found.max()) > INT32_MAX:
            raise ValueError(f"{name} holds {int(found.max())}, past int32. Put fewer sequences into a pack.")
        cu_seqlens = found.to(torch.int32)
    assert isinstance(cu_seqlens, Tensor)
    if cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"{name} is {cu_seqlens.dtype}; wanted torch.int32, which every varlen kernel reads. "
            f"Call {name}.to(torch.int32)."
        )
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(
            f"{name} has shape {list(cu_seqlens.shape)}; wanted [S + 1], starting with 0. "
            "Call cu_seqlens_from_lengths(lengths)."
        )
    host = host_values(cu_seqlens)
    if host is not None:
        check_offsets(host, total)
    return cu_seqlens


def check_offsets(host: npt.NDArray[np.integer], total: int | None) -> None:
    """Refuse offsets that do not start at 0, fall, or end elsewhere than at the total."""
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


def check_lengths(host: npt.NDArray[np.integer]) -> None:
    """Refuse negative lengths and a sum above the int32 range."""
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


def check_position_ids(host: npt.NDArray[np.integer], num_sequences: int) -> None:
    """Refuse positions that do not count up from 0."""
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
    require_enough(int(starts.sum()), num_sequences)


def check_seq_idx(host: npt.NDArray[np.integer], num_sequences: int) -> None:
    """Refuse sequence numbers that decrease or exceed the count."""
    if (host[1:] < host[:-1]).any() or host[0] < 0:
        raise ValueError(
            "seq_idx decreases or is negative; wanted 0 for the slots of the first sequence, then 1. "
            "Lay the sequences end to end and number them in that order."
        )
    require_enough(int(host[-1]) + 1, num_sequences)


def check_segment_ids(host: npt.NDArray[np.integer], num_sequences: int) -> None:
    """Refuse ids out of order, padding in front, and ids past the count."""
    owners = np.maximum.accumulate(host)
    if host[0] == 0 or host.min() < 0 or ((host != 0) & (host != owners)).any():
        raise ValueError(
            "segment_ids are negative, start with padding or come out of order; wanted 1 for the slots of "
            "the first sequence, then 2, with 0 behind each. segments.seqlens_offsets takes ids in any order."
        )
    require_enough(int(owners[-1]), num_sequences)


def require_enough(found: int, num_sequences: int) -> None:
    """Raise when more sequences were found than ``num_sequences`` says."""
    if found > num_sequences:
        raise ValueError(
            f"There are {found} sequences but num_sequences={num_sequences}; none may be cut off. "
            f"Pass num_sequences={found} or more."
        )


def require_pair(cu_seqlens: Tensor, padded: Tensor) -> None:
    """Raise where a sequence has more tokens than slots, or offsets come in two lengths."""
    if cu_seqlens.device != padded.device:
        raise ValueError(
            f"cu_seqlens is on {cu_seqlens.device} and cu_seqlens_padded on {padded.device}; wanted one "
            "device. Move one of them."
        )
    if cu_seqlens.shape != padded.shape:
        raise ValueError(
            f"cu_seqlens has {cu_seqlens.shape[0]} entries and cu_seqlens_padded {padded.shape[0]}; wanted "
            "as many. Give a trailing pad an entry in both."
        )
    real, held = host_values(cu_seqlens), host_values(padded)
    if real is not None and held is not None and (np.diff(real) > np.diff(held)).any():
        i = int(np.argmax(np.diff(real) > np.diff(held)))
        raise ValueError(
            f"Sequence {i} has {real[i + 1] - real[i]} tokens in {held[i + 1] - held[i]} slots; wanted no "
            "fewer slots. Were cu_seqlens and cu_seqlens_padded swapped?"
        )


def host_lengths(cu_seqlens: Tensor, lengths: Sequence[int] | None) -> list[int]:
    """Return lengths as plain ints, which torch.compile treats as constants."""
    if lengths is None:
        require_values(cu_seqlens, "Pass lengths=, which are known on the host.")
        known: list[int] = torch.diff(cu_seqlens).tolist()
        return known
    if not torch.compiler.is_compiling():
        lengths = host_ints(lengths, "lengths").tolist()
    if len(lengths) + 1 != cu_seqlens.shape[0]:
        raise ValueError(
            f"{len(lengths)} lengths do not fit cu_seqlens of {cu_seqlens.shape[0]} entries; wanted "
            f"{cu_seqlens.shape[0] - 1}. Pass the lengths these offsets were made from."
        )
    for i, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"Sequence {i} has length {length}; wanted 0 or more tokens. Mend the lengths.")
    host = host_values(cu_seqlens)
    if host is not None and (np.diff(host) != np.asarray(lengths)).any():
        raise ValueError(
            f"lengths={list(lengths)[:8]}... but cu_seqlens gives {np.diff(host)[:8].tolist()}...; wanted "
            "the same. Pass the lengths these offsets were made from."
        )
    return list(lengths)


def require_values(cu_seqlens: Tensor, advice: str) -> None:
    """Raise for offsets on the meta device, which hold no values."""
    if cu_seqlens.device.type == "meta":
        raise ValueError(f"cu_seqlens is on the meta device, which holds no values. {advice}")


def tail_step(kept: int, used: int, num_sequences: int, total: int) -> int:
    """Return the length of a dummy sequence of a bucket's tail, after checking that all fits."""
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


def require_max_seqlen(longest: int, max_seqlen: int, step: int, spare: int, tail: int) -> None:
    """Raise when a real or a dummy sequence is longer than ``max_seqlen``."""
    if longest > max_seqlen:
        raise ValueError(
            f"A sequence has {longest} tokens but max_seqlen={max_seqlen}. Use a bucket of longer max_seqlen."
        )
    if step > max_seqlen:
        raise ValueError(
            f"A tail of {tail} slots over {spare} spare sequences makes them {step} long, past "
            f"max_seqlen={max_seqlen}. Use a bucket of more sequences or fewer slots."
        )
