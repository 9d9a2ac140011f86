"""Two tiles -> their product in full precision, whatever the inputs are stored in.

c rows of a tile, v columns, k summed. A bf16 product rounded to bf16 puts 0.06 of error on a logit of 20 and 0.13
on a log-probability, so products that become logits leave the multiplier in fp32: from the tensor cores
directly where torch offers it (CUDA, ``out_dtype``), else by widening the tiles first.
"""

from __future__ import annotations

import torch
from torch import Tensor

# fp16 gradients of logits are probabilities below 6e-8 as often as not: lift them by 2**12 before rounding.
_HALF_LIFT = 4096.0


def accumulator_dtype(*operands: Tensor | None) -> torch.dtype:
    """fp64 when an operand is, else fp32."""
    wide = any(x is not None and x.dtype == torch.float64 for x in operands)
    return torch.float64 if wide else torch.float32


def operand(tile: Tensor, compute: torch.dtype, accumulator: torch.dtype) -> Tensor:
    """Bring a tile into the dtype it is multiplied in, rounded to ``compute`` first."""
    tile = tile.to(compute)
    return tile if tile.is_cuda else tile.to(accumulator)


def product(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """Write ``a @ b.T`` into ``out``.

    Args:
        a: ``[c, k]``, as ``operand`` gives it.
        b: ``[v, k]``, likewise.
        out: ``[c, v]``, the accumulator's dtype.
    """
    if a.dtype == out.dtype:
        return torch.mm(a, b.t(), out=out)
    return torch.mm(a, b.t(), out_dtype=out.dtype, out=out)


def accumulate(total: Tensor, a: Tensor, b: Tensor, compute: torch.dtype) -> None:
    """Add ``a @ b`` to ``total`` in place; a gradient's product, rounded to ``compute`` before it is multiplied.

    Args:
        total: ``[c, k]``, the accumulator's dtype.
        a: ``[c, v]``, the accumulator's dtype.
        b: ``[v, k]``, stored in any dtype.
        compute: the dtype of the model's own products.
    """
    if compute == total.dtype:
        total.addmm_(a, b.to(total.dtype))
    elif compute == torch.float16:
        lifted = (a * _HALF_LIFT).to(compute)
        total.add_(_low(lifted, b.to(compute), total.dtype), alpha=1.0 / _HALF_LIFT)
    else:
        total.add_(_low(a.to(compute), b.to(compute), total.dtype))


def _low(a: Tensor, b: Tensor, accumulator: torch.dtype) -> Tensor:
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=accumulator)
    if a.dtype == torch.float16:  # no CPU multiplies fp16 natively with a wide sum
        return torch.mm(a.to(accumulator), b.to(accumulator))
    return torch.mm(a, b)  # one tile's sum, rounded once as the model's own product would be
