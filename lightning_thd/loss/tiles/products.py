"""Two tiles -> their product in full precision, whatever the inputs are stored in.

c rows of a tile, v columns, k summed. A product rounded to bf16 is off by 0.06 at a logit of 20, and
log-probabilities by 0.13, so products that become results leave the multiplier in fp32: from the tensor cores
directly (CUDA, ``out_dtype``), as two rounded halves (a CPU that multiplies bf16 natively), else by widening
the tiles first. Products that become gradients are rounded as the model's own would be.
"""

from __future__ import annotations

import contextlib
from functools import cache

import torch
from torch import Tensor

from lightning_thd.loss.tiles.processor import one_dnn_product

# Gradients of logits are brought to at most this before they are rounded to fp16, which ends at 65,504 above
# and 6e-8 below: no loss scale then overflows, and probabilities down to 1e-11 survive.
_HALF_TOP = 8192.0
# Numbers that are widened at a time: 256 KiB in fp32, a quarter of a core's second-level cache.
_PIECE = 2**16
# Numbers of a gradient that are made at a time: 4 MiB in fp32 beside it.
_SUMMED = 2**20


def accumulator_dtype(*operands: Tensor | None) -> torch.dtype:
    """Return the dtype of sums: fp64 when an operand is fp64, else fp32."""
    wide = any(x is not None and x.dtype == torch.float64 for x in operands)
    return torch.float64 if wide else torch.float32


def has_autocast(device: torch.device) -> bool:
    """Return whether autocast is on for a device; False for devices without autocast, such as meta."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Switch autocast off in this context, as tiles are cast by hand and their sums must stay wide."""
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


@cache
def cpu_multiplies_bf16() -> bool:
    """Return whether this CPU has bf16 instructions, without which bf16 is 20 to 50 times slower."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name, bool)()) for name in names)


def is_native(compute: torch.dtype, device: torch.device) -> bool:
    """Return whether products of this dtype use a CPU's own bf16 instructions."""
    return compute == torch.bfloat16 and device.type == "cpu" and cpu_multiplies_bf16()


def operand(tile: Tensor, compute: torch.dtype, accumulator: torch.dtype) -> Tensor:
    """Cast a tile to the dtype it is multiplied in, rounded to ``compute`` first."""
    tile = tile.to(compute)
    return tile if tile.is_cuda or is_native(compute, tile.device) else tile.to(accumulator)


def product(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """Write ``a @ b.T``, ``[c, k]`` and ``[v, k]``, into ``out``, ``[c, v]`` in the accumulator's dtype."""
    if a.dtype == out.dtype:
        found = one_dnn_product(a, b.t())
        return torch.mm(a, b.t(), out=out) if found is None else out.copy_(found)
    if a.is_cuda:
        return torch.mm(a, b.t(), out_dtype=out.dtype, out=out)
    # oneDNN sums in fp32 and rounds once: first the product, then what its rounding lost, 2^-17 together
    high = torch.mm(a, b.t())
    low = torch.addmm(high, a, b.t(), beta=-1)
    return out.copy_(high).add_(low)


def rounded_product(a: Tensor, b: Tensor, *, kept: Tensor, out: Tensor) -> Tensor:
    """Write ``a @ b.T``, as :func:`product`, rounded to bf16 into ``kept`` and widened into ``out``."""
    return out.copy_(torch.mm(a, b.t(), out=kept))


def accumulate(total: Tensor, a: Tensor, b: Tensor, compute: torch.dtype, *, first: bool) -> None:
    """Add ``a @ b``, a gradient's product rounded to ``compute`` before it is multiplied, to ``total``.

    Args:
        total: ``[c, k]``, the accumulator's dtype; changed in place.
        a: ``[c, v]``, the accumulator's dtype.
        b: ``[v, k]``, stored in any dtype.
        compute: the dtype of the model's own products.
        first: ``total`` holds nothing yet and is overwritten.
    """
    widened = compute != torch.float16 and not a.is_cuda and not is_native(compute, a.device)
    if compute == total.dtype or widened:
        a, b = a.to(compute).to(total.dtype), b.to(compute).to(total.dtype)
        rows = _SUMMED // max(1, b.shape[1]) if a.device.type == "cpu" else a.shape[0]
        for start in range(0, a.shape[0], max(1, rows)):  # oneDNN's product is a tensor of its own
            stop = start + max(1, rows)
            part, found = total[start:stop], one_dnn_product(a[start:stop], b)
            if found is None:  # not in place, where torch counts no FLOPs
                torch.addmm(part, a[start:stop], b, beta=0 if first else 1, out=part)
            elif first:
                part.copy_(found)
            else:
                part.add_(found)
        return
    lift = (_HALF_TOP / a.abs().amax().clamp_min(1e-30)) if compute == torch.float16 else None
    part = _low((a if lift is None else a * lift).to(compute), b.to(compute), total.dtype)
    if lift is not None:
        part = part / lift
    if first:
        total.copy_(part)
    else:
        _add(total, part)


def _add(total: Tensor, part: Tensor) -> None:
    """Add a narrow tile to a wide one; on a CPU in pieces, whose widened copies stay in the cache."""
    if total.device.type != "cpu" or part.dtype == total.dtype:
        total.add_(part)
        return
    rows = max(1, _PIECE // max(1, part.shape[1]))
    for start in range(0, total.shape[0], rows):
        total[start : start + rows].add_(part[start : start + rows])


def _low(a: Tensor, b: Tensor, accumulator: torch.dtype) -> Tensor:
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=accumulator)
    if not is_native(a.dtype, a.device):
        return torch.mm(a.to(accumulator), b.to(accumulator))
    return torch.mm(a, b)  # one tile's sum, rounded once as the model's own product would be
