"""Two tiles -> their product, in fp32 or fp64 for logits, whatever the dtype of the tiles.

Legend: c rows of a tile, v columns, k summed. A logit of 20 that is rounded to bf16 is off by up to 0.06, so
``product`` returns fp32. CUDA's tensor cores return fp32. A CPU with bf16 instructions computes the
rounded product and adds its rounding error. Other devices cast the tiles to fp32 first. For gradients,
only a CPU with bf16 instructions rounds its products, as it rounds the model's own.

In fp32 on a CPU torch.mm calls MKL, which uses only AVX2 on processors not made by Intel. oneDNN uses
AVX-512: on an AMD EPYC (Zen 5), 195 instead of 95 GFLOP/s in one thread. torch.exp calls MKL too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_thd._modes import operators_are_watched
from lightning_thd._private import PrivateNameGone, private_of

# Gradients of logits are scaled to at most this before they are rounded to fp16, which holds 6e-8 to 65,504.
# They then do not overflow under any loss scale, and those for probabilities above 1e-11 do not become 0.
_HALF_TOP = 8192.0
# Numbers widened at a time: 256 KiB in fp32, a quarter of a second-level cache of 1 MiB.
_PIECE = 2**16
# Numbers of a gradient computed at a time: they need an extra buffer of 4 MiB in fp32.
_SUMMED = 2**20
# With fewer multiplications, a product takes less time than oneDNN needs to build its kernel (0.5 ms).
_WORTH_A_KERNEL = 2**26
_LOG2_E = math.log2(math.e)


def has_autocast(device: torch.device) -> bool:
    """Return whether autocast is on for a device; False for devices without autocast, such as meta."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Switch autocast off in this context: it would round sums of tiles, and tiles are cast explicitly."""
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


@cache
def cpu_multiplies_bf16() -> bool:
    """Return whether this CPU has bf16 instructions, without which bf16 is 20 to 50 times slower."""
    return any(_instructions().get(name, False) for name in ("avx512_bf16", "amx_tile"))


def _instructions() -> Mapping[str, Any]:
    """Return the instructions of this CPU, as torch names them; none if this torch does not list them."""
    listed: Callable[[], Mapping[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)
    return listed()


def is_native(compute: torch.dtype, device: torch.device) -> bool:
    """Return whether products of this dtype use a CPU's own bf16 instructions."""
    return compute == torch.bfloat16 and device.type == "cpu" and cpu_multiplies_bf16()


def operand(tile: Tensor, compute: torch.dtype, accumulator: torch.dtype) -> Tensor:
    """Round a tile to ``compute``, then cast it to the dtype in which it is multiplied."""
    tile = tile.to(compute)
    if compute == accumulator or tile.is_cuda or is_native(compute, tile.device):
        return tile
    return tile.to(accumulator)


@cache
def _one_dnn() -> Callable[..., Tensor] | None:
    """Return oneDNN's ``x @ w.T``, or None if it is missing or not faster."""
    wide = _instructions().get("avx512_f", False)
    if not wide or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    try:
        packet = private_of(torch.ops.mkldnn, "torch.ops.mkldnn._linear_pointwise")
    except PrivateNameGone:  # torch.mm gives the same product, in up to twice the time
        return None
    operator: Callable[..., Tensor] = packet.default
    return operator


def one_dnn_product(a: Tensor, b: Tensor) -> Tensor | None:
    """Return ``a @ b`` by oneDNN; None if it cannot, is not faster, may round, or a dispatch mode is on."""
    if a.device.type != "cpu" or a.dtype != torch.float32 or b.dtype != torch.float32:
        return None
    if a.shape[0] * a.shape[1] * b.shape[1] < _WORTH_A_KERNEL or operators_are_watched():
        return None
    operator = _one_dnn()
    if operator is None or not torch.backends.mkldnn.enabled or _may_round():
        return None
    return operator(a, b.t(), None, "none", [], "")


def _may_round() -> bool:
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    return getattr(matmul, "fp32_precision", "none") not in ("none", "ieee")


def exponential(x: Tensor, *, out: Tensor) -> Tensor:
    """Write ``e^x`` into ``out``, which may be ``x``; on a CPU in fp32 as ``2^(x log2 e)``."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return torch.exp(x, out=out)
    return torch.mul(x, _LOG2_E, out=out).exp2_()


def product(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """Write ``a @ b.T``, ``[c, v]``, into ``out`` in its dtype; a is ``[c, k]``, b ``[v, k]``."""
    if a.dtype == out.dtype:
        result: Tensor | None = None
        if a.numel() * b.shape[0] >= _WORTH_A_KERNEL:
            result = one_dnn_product(a, b.t())
        if result is None:
            return torch.mm(a, b.t(), out=out)
        return out.copy_(result)

    if a.is_cuda:
        return torch.mm(a, b.t(), out_dtype=out.dtype, out=out)

    # oneDNN sums in fp32 and rounds once. The product plus its rounding error is exact to 2^-17.
    high = torch.mm(a, b.t())
    low = torch.addmm(high, a, b.t(), beta=-1)
    return out.copy_(high).add_(low)


def accumulate(total: Tensor, a: Tensor, b: Tensor, compute: torch.dtype, *, first: bool) -> None:
    """Add a gradient's product ``a @ b`` to ``total``; ``a`` and ``b`` are rounded to ``compute`` first.

    ``total`` ``[c, k]`` has the accumulator's dtype; ``a`` ``[c, v]`` and ``b`` ``[v, k]`` may have another.
    The ``first`` product overwrites ``total``.
    """
    native = compute != total.dtype and is_native(compute, a.device)
    if compute == total.dtype or (compute != torch.float16 and not a.is_cuda and not native):
        a = a.to(compute).to(total.dtype)
        b = b.to(compute).to(total.dtype)
        if a.numel() * b.shape[1] >= _WORTH_A_KERNEL:
            _accumulate_large(total, a, b, first=first)
        else:  # not addmm_, in which torch counts no FLOPs
            torch.addmm(total, a, b, beta=0 if first else 1, out=total)
        return

    lift: Tensor | None = None
    if compute == torch.float16:
        lift = _HALF_TOP / a.abs().amax().clamp_min(1e-30)
        a = a * lift
    a = a.to(compute)
    b = b.to(compute)

    if a.is_cuda and lift is None and not operators_are_watched():  # modes cannot count addmm
        torch.addmm(total, a, b, beta=0 if first else 1, out_dtype=total.dtype, out=total)
        return

    if a.is_cuda:
        part = torch.mm(a, b, out_dtype=total.dtype)
    elif native:
        part = torch.mm(a, b)  # one tile's sum, rounded once as the model's own product would be
    else:
        part = torch.mm(a.to(total.dtype), b.to(total.dtype))

    if lift is not None:
        part = part / lift
    if first:
        total.copy_(part)
    elif total.device.type != "cpu" or part.dtype == total.dtype:
        total.add_(part)
    else:  # in pieces, so that widened copies stay in the cache
        rows = max(1, _PIECE // max(1, part.shape[1]))
        for start in range(0, total.shape[0], rows):
            total[start : start + rows].add_(part[start : start + rows])


def _accumulate_large(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """Add a large product in the accumulator's dtype to ``total``, or overwrite it, by oneDNN if it can."""
    rows = a.shape[0]
    if a.device.type == "cpu":  # in parts, because oneDNN returns a new tensor
        rows = max(1, _SUMMED // b.shape[1])

    for start in range(0, a.shape[0], rows):
        part = total[start : start + rows]
        factor = a[start : start + rows]
        result = one_dnn_product(factor, b)
        if result is None:
            torch.addmm(part, factor, b, beta=0 if first else 1, out=part)
        elif first:
            part.copy_(result)
        else:
            part.add_(result)
