"""Arguments of varlen_attention -> the same, or an error that says what came, what was wanted, what to do.

Shapes, dtypes and devices are checked everywhere; values of cu_seqlens only where they lie on the CPU, as
reading them from a device would wait for it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_thd._checks import instance, whole_number


def check_tensors(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor) -> None:
    """Check the shapes, dtypes and devices of q, k, v and offsets, without reading a value.

    Raises:
        TypeError: for what is no tensor.
        ValueError: for other shapes, dtypes and devices.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        instance(x, name, Tensor, advice="Pass a tensor [slots, heads, head size].")
        if x.dim() != 3:
            raise ValueError(
                f"{name} has shape {list(x.shape)}; want three dimensions, [slots, heads, head size]. "
                "A batch [B, L, H, D] becomes one with .flatten(0, 1)."
            )
        if not x.is_floating_point():
            raise ValueError(f"{name} is {x.dtype}; want a floating dtype.")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q is {q.dtype}, k is {k.dtype} and v is {v.dtype}; want one dtype. "
            "Cast them, or run under autocast, which casts all three."
        )
    if k.shape[0] != v.shape[0] or k.shape[1] != v.shape[1]:
        raise ValueError(
            f"k has {k.shape[0]} slots of {k.shape[1]} heads and v has {v.shape[0]} of {v.shape[1]}; "
            "want the same."
        )
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q has head size {q.shape[2]} and k {k.shape[2]}; want the same.")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"{q.shape[1]} query heads are not divisible by {k.shape[1]} key-value heads; every one of them "
            "must serve the same number of query heads. Under tensor parallelism its size must divide both."
        )
    check_offsets_tensor(cu_seqlens_q, q.device, "q")
    check_offsets_tensor(cu_seqlens_kv, q.device, "kv")
    if cu_seqlens_q.shape != cu_seqlens_kv.shape:
        raise ValueError(
            f"cu_seqlens_q has {cu_seqlens_q.shape[0]} entries and cu_seqlens_kv {cu_seqlens_kv.shape[0]}; "
            "want one sequence of keys for every sequence of queries (it may be empty)."
        )
    if k.device != q.device or v.device != q.device:
        raise ValueError(f"q is on {q.device}, k on {k.device} and v on {v.device}; want one device.")


def check_offsets_tensor(cu_seqlens: Tensor, device: torch.device, side: str) -> None:
    """Check the dtype, shape and device of ``cu_seqlens_q`` or ``cu_seqlens_kv``."""
    name = f"cu_seqlens_{side}"
    instance(cu_seqlens, name, Tensor, advice="Make it with seqlens.cu_seqlens_from_lengths.")
    if cu_seqlens.device != device:
        raise ValueError(
            f"{name} is on {cu_seqlens.device} but q is on {device}; move it once a batch, not once a "
            f"layer: {name}.to({str(device)!r}), or batch.to for a THDBatch."
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"{name} has shape {list(cu_seqlens.shape)}; want [sequences + 1], at least one sequence."
        )
    if cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"{name} is {cu_seqlens.dtype}; want int32, as GPU kernels do: {name}.to(torch.int32)."
        )


def host_int(max_seqlen: int, name: str) -> int:
    """Return a longest sequence as a Python integer; a tensor, which kernels would read, is a TypeError."""
    return whole_number(max_seqlen, name, advice="Pass an int known on the host: batch.max_seqlen.")


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Check the shape, dtype and device of the sinks."""
    if sinks is None:
        return
    instance(sinks, "sinks", Tensor, advice="Pass one float a query head, or None.")
    if sinks.shape != (q.shape[1],) or sinks.device != q.device or not sinks.is_floating_point():
        raise ValueError(
            f"sinks is {sinks.dtype} {list(sinks.shape)} on {sinks.device}; want one float for each of the "
            f"{q.shape[1]} query heads, on {q.device}."
        )


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Refuse forward-mode differentiation, which finds no tangent in a custom operator and takes it for 0.

    Raises:
        NotImplementedError: inside ``torch.func.jvp`` or ``forward_ad.dual_level``, for a dual tensor.
    """
    if torch.compiler.is_compiling() or getattr(forward_ad, "_current_level", 0) < 0:
        return
    tangent_of: Any = forward_ad.unpack_dual
    if any(x is not None and tangent_of(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "Attention on packs has no forward-mode derivative (torch.func.jvp). Use the backward pass, or "
            "padded rows with attn_implementation='eager'."
        )


def checked_offsets(cu_seqlens: Tensor, total: int, max_seqlen: int, side: str) -> tuple[int, ...]:
    """Read offsets on the CPU as ints and check that they cover every row.

    Args:
        cu_seqlens: int ``[S + 1]`` on the CPU.
        total: rows of the packed tensor.
        max_seqlen: what the caller says the longest sequence is.
        side: "q" or "kv", for the message.
    """
    offsets, longest, fall = read_offsets(cu_seqlens)
    name = f"cu_seqlens_{side}"
    if offsets[0] != 0 or offsets[-1] != total:
        raise ValueError(
            f"{name} runs from {offsets[0]} to {offsets[-1]} but must run from 0 to {total}, the rows of "
            f"{'q' if side == 'q' else 'k and v'}. GPU kernels leave rows outside every sequence unwritten "
            "and gradients turn NaN: give padding at the end a sequence of its own."
        )
    if fall is not None:
        raise ValueError(
            f"{name} falls from {offsets[fall]} to {offsets[fall + 1]} at sequence {fall}; offsets never "
            "decrease. Build them with lightning_thd.seqlens.cu_seqlens_from_lengths."
        )
    if longest > max_seqlen:
        raise ValueError(
            f"max_seqlen_{side}={max_seqlen} but {name} has a sequence of {longest}: GPU kernels would "
            f"leave its end out. Pass max_seqlen_{side}={longest} or more."
        )
    return offsets


def read_offsets(cu_seqlens: Tensor) -> tuple[tuple[int, ...], int, int | None]:
    """Return offsets on the CPU as ints, the longest sequence, and where the offsets fall most, if they do.

    What was read is kept by its bytes, so that the layers of a step after the first pay for a copy alone.
    """
    array = cu_seqlens.numpy()
    return _parse(array.tobytes(), array.dtype.str)


@lru_cache(maxsize=32)
def _parse(raw: bytes, dtype: str) -> tuple[tuple[int, ...], int, int | None]:
    offsets = np.frombuffer(raw, dtype)
    lengths = np.diff(offsets)
    lowest = int(lengths.argmin())
    return tuple(offsets.tolist()), int(lengths.max()), lowest if lengths[lowest] < 0 else None
