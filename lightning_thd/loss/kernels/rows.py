"""Rows of raw products -> losses, statistics and gradients, in Triton kernels with one program a row.

Raw products ``z`` are fp32, in rows of ``stride`` numbers, of which ``columns`` are used. ``stride`` is a
multiple of 16, so that 16 bytes load at once for any vocabulary. A gradient replaces its row: in fp32 in
place, in bf16 in the row's second half. Blocks are written from the last to the first, so that no unread
number is lost.

With softmax p of the logits ``z' = cap * tanh(scale * (z + bias) / cap) / temperature``, the gradient for z'
is ``p * (direct + slope * log p) + onehot * target + flat``, as in ``RowGradients`` of ``tiles/softmax.py``.

A divergence has rows of a student and of a teacher, with log-probabilities s and t, and mixture m, as in
``Divergence`` of ``tiles/divergence.py``. Its ``factors`` ``[6, rows]`` are the student's largest logit and
the log of its ``sum e^(z - largest)``, the same of the teacher, and inner and pivot of ``_divergence_terms``.
"""
# mypy: ignore-errors

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

# e^x is zero in fp32 for lower x. Finite exponents avoid zero times infinity, which is NaN.
_LOWEST = tl.constexpr(-1e4)
_LOG2_E = tl.constexpr(1.4426950408889634)
# Columns that a program holds at a time. With 16 warps, two programs fit a multiprocessor of sm_90, so that
# one loads while the other reduces. With twice as many columns only one would fit.
_WIDEST = 8192
# Numbers to which the length of a row is rounded up: 64 bytes in fp32, 32 in bf16.
ALIGNED = tl.constexpr(16)


@triton.jit
def _exp(x):
    return tl.exp2(x * _LOG2_E)


@triton.jit
def _exponent(x):
    return tl.where(x < _LOWEST, _LOWEST, x)  # not tl.maximum, which drops NaN


@triton.jit
def _padded(columns):
    return tl.cdiv(columns, ALIGNED) * ALIGNED


@triton.jit
def _logits(row, bias, index, columns, scale, cap, heat, CAP: tl.constexpr, BIAS: tl.constexpr):
    """Load logits, -inf outside of ``columns``, and the cap's slope; ``heat`` is 1 / temperature."""
    x = tl.load(row + index, mask=index < _padded(columns), other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias + index, mask=index < columns, other=0.0).to(tl.float32)

    bend = x
    if CAP:
        tanh = 2.0 * tl.sigmoid(2.0 * scale / cap * x) - 1.0
        bend = 1.0 - tanh * tanh
        x = tanh * (cap * heat)
    else:
        x = x * (scale * heat)

    return tl.where(index < columns, x, float("-inf")), bend


@triton.jit
def _sweep(
    row, bias, columns, scale, cap, heat, largest, mass, weighted, total,
    CAP: tl.constexpr, BIAS: tl.constexpr, ENTROPY: tl.constexpr, TOTAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the columns of a row to its statistics, which may hold those of other columns."""
    for start in range(0, columns, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x, _ = _logits(row, bias, index, columns, scale, cap, heat, CAP, BIAS)
        if TOTAL:
            total += tl.sum(tl.where(index < columns, x, 0.0))

        above = tl.maximum(largest, tl.max(x))
        base = tl.where(above == float("-inf"), 0.0, above)  # -inf minus -inf is NaN
        shift = _exponent(largest - base)
        x = _exponent(x - base)
        e = _exp(x)
        if ENTROPY:
            weighted = _exp(shift) * (weighted + mass * shift) + tl.sum(e * x)

        mass = _exp(shift) * mass + tl.sum(e)
        largest = above

    return largest, mass, weighted, total


@triton.jit
def _spread(
    row, out, bias, columns, target_index, lse, direct, slope, target, flat, scale, cap, heat,
    CAP: tl.constexpr, BIAS: tl.constexpr, SLOPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a row's raw products, from the last block to the first."""
    factor = scale * heat
    blocks = tl.cdiv(columns, BLOCK)
    target_column = target_index.to(tl.int32)  # each comparison with an int64 would take registers
    for done in range(blocks):
        index = (blocks - 1 - done) * BLOCK + tl.arange(0, BLOCK)
        x, bend = _logits(row, bias, index, columns, scale, cap, heat, CAP, BIAS)
        log_p = _exponent(x - lse)
        if SLOPE:
            d = _exp(log_p) * (direct + slope * log_p)
        else:
            d = _exp(log_p) * direct

        d = (d + flat + tl.where(index == target_column, target, 0.0)) * factor
        if CAP:
            d *= bend

        tl.debug_barrier()  # all threads have read this block before one overwrites it
        tl.store(out + index, d.to(out.dtype.element_ty), mask=index < _padded(columns))


@triton.jit
def _nll(
    z, out, bias, targets, weights, losses, stride, out_stride, columns, ignore, smoothing, z_loss,
    scale, cap, heat, CAP: tl.constexpr, BIAS: tl.constexpr, TOTAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the weighted loss of a row, and the gradient of its raw products over it."""
    i = tl.program_id(0)
    row = z + i.to(tl.int64) * stride
    out_row = out + i.to(tl.int64) * out_stride
    y = tl.load(targets + i)
    w = tl.load(weights + i)

    if y == ignore:  # such a row may hold NaN, so it is not read
        for start in range(0, columns, BLOCK):
            index = start + tl.arange(0, BLOCK)
            zeros = tl.zeros([BLOCK], out.dtype.element_ty)
            tl.store(out_row + index, zeros, mask=index < _padded(columns))

        tl.store(losses + i, 0.0)
    else:
        target_index = y + tl.zeros([1], tl.int64)
        x, _ = _logits(row, bias, target_index, columns, scale, cap, heat, CAP, BIAS)
        target_logit = tl.sum(x)

        # Sums start as tensors: a Python float that a loop changes does not compile.
        zero = tl.sum(tl.zeros([1], tl.float32))
        largest, mass, _, total = _sweep(
            row, bias, columns, scale, cap, heat, zero - float("inf"), zero, zero, zero,
            CAP, BIAS, False, TOTAL, BLOCK,
        )  # fmt: skip
        log_mass = tl.log(mass)
        lse = largest + log_mass
        # Subtracting the largest logit and log(sum) one by one is exact if the target is nearly certain.
        loss = (1.0 - smoothing) * (log_mass - (target_logit - largest)) + z_loss * lse * lse
        if TOTAL:
            loss += smoothing * (lse - total / columns)

        tl.store(losses + i, w * loss)
        direct = w * (1.0 + 2.0 * z_loss * lse)
        target = w * (smoothing - 1.0)
        flat = -w * smoothing / columns
        _spread(
            row, out_row, bias, columns, y, lse, direct, 0.0, target, flat, scale, cap, heat,
            CAP, BIAS, False, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["start", "rows"])
def _statistics(
    z, bias, targets, stats, stride, columns, start, rows, scale, cap, heat,
    CAP: tl.constexpr, BIAS: tl.constexpr, ENTROPY: tl.constexpr, TOTAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge a tile into the statistics ``[5, rows]``: largest, mass, weighted, target and total."""
    i = tl.program_id(0)
    row = z + i.to(tl.int64) * stride
    stat = stats + i  # the first statistic of this row; the next is ``rows`` numbers on
    column = tl.load(targets + i) - start
    if (column >= 0) & (column < columns):
        target_index = column + tl.zeros([1], tl.int64)
        x, _ = _logits(row, bias, target_index, columns, scale, cap, heat, CAP, BIAS)
        tl.store(stat + 3 * rows, tl.sum(x))

    largest, mass, weighted, total = _sweep(
        row, bias, columns, scale, cap, heat,
        tl.load(stat), tl.load(stat + rows), tl.load(stat + 2 * rows), tl.load(stat + 4 * rows),
        CAP, BIAS, ENTROPY, TOTAL, BLOCK,
    )  # fmt: skip
    tl.store(stat, largest)
    tl.store(stat + rows, mass)
    if ENTROPY:
        tl.store(stat + 2 * rows, weighted)
    if TOTAL:
        tl.store(stat + 4 * rows, total)


@triton.jit(do_not_specialize=["start", "rows"])
def _gradient(
    z, out, bias, targets, factors, stride, out_stride, columns, start, rows, scale, cap, heat,
    CAP: tl.constexpr, BIAS: tl.constexpr, SLOPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a tile from factors ``[5, rows]``: lse, direct, slope, target and flat."""
    i = tl.program_id(0)
    row = z + i.to(tl.int64) * stride
    out_row = out + i.to(tl.int64) * out_stride
    factor = factors + i
    target_index = tl.load(targets + i) - start
    _spread(
        row, out_row, bias, columns, target_index,
        tl.load(factor), tl.load(factor + rows), tl.load(factor + 2 * rows), tl.load(factor + 3 * rows),
        tl.load(factor + 4 * rows), scale, cap, heat, CAP, BIAS, SLOPE, BLOCK,
    )  # fmt: skip


@triton.jit
def _log_probabilities(
    row, bias, index, columns, largest, log_mass, scale, cap, heat, CAP: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Load logits, and return log-probabilities, probabilities, and the cap's slope."""
    x, bend = _logits(row, bias, index, columns, scale, cap, heat, CAP, BIAS)
    # One by one, since the rounding of their sum would change all probabilities of a row.
    log_p = (x - largest) - log_mass
    return log_p, _exp(_exponent(log_p)), bend


@triton.jit
def _above_mixture(x, other, log_share, log_rest):
    """Return how far a log-probability is above the mixture, from the log-probability of the other model.

    With its share a and the rest b, that is ``-log(a + b e^(other - x))``, in which no large terms cancel.
    """
    log_other = log_rest + (other - x)
    larger = tl.maximum(log_share, log_other)
    return -(larger + tl.log(_exp(_exponent(log_share - larger)) + _exp(_exponent(log_other - larger))))


@triton.jit
def _slopes(s, t, beta, log_student, log_teacher, KIND: tl.constexpr):
    """Return g, with which the gradient for the student's logits is ``e^s (g - sum e^s g)``."""
    if KIND == 1:
        g = s - t
    else:
        g = (1.0 - beta) * _above_mixture(s, t, log_student, log_teacher)
    return g


@triton.jit(do_not_specialize=["rows"])
def _divergence_terms(
    z, u, bias, taught_bias, targets, factors, sums, stride, columns, rows, ignore, beta, log_student,
    log_teacher, scale, cap, taught_scale, taught_cap, heat, KIND: tl.constexpr, CAP: tl.constexpr,
    BIAS: tl.constexpr, TAUGHT_CAP: tl.constexpr, TAUGHT_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write sums ``[5, rows]`` for the kinds 1 and 2: divergence, inner, pivot, mass, and the largest s.

    ``pivot`` is the g of the largest s, ``mass`` is ``sum e^s``, and ``inner`` is ``sum e^s (g - pivot)``.
    Any pivot gives the same gradient. With this one, nothing large cancels if a token has nearly all the
    probability.
    """
    i = tl.program_id(0)
    row = z + i.to(tl.int64) * stride
    taught = u + i.to(tl.int64) * stride
    loss = tl.sum(tl.zeros([1], tl.float32))
    inner = loss
    pivot = loss
    mass = loss
    largest = loss - float("inf")

    if tl.load(targets + i) != ignore:
        top = tl.load(factors + i)
        log_mass = tl.load(factors + rows + i)
        taught_top = tl.load(factors + 2 * rows + i)
        taught_log_mass = tl.load(factors + 3 * rows + i)
        for start in range(0, columns, BLOCK):
            index = start + tl.arange(0, BLOCK)
            s, p, _ = _log_probabilities(
                row, bias, index, columns, top, log_mass, scale, cap, heat, CAP, BIAS
            )  # fmt: skip
            t, q, _ = _log_probabilities(
                taught, taught_bias, index, columns, taught_top, taught_log_mass, taught_scale, taught_cap,
                heat, TAUGHT_CAP, TAUGHT_BIAS,
            )  # fmt: skip
            if KIND == 2:
                of_teacher = _above_mixture(t, s, log_teacher, log_student)
                loss += beta * tl.sum(tl.where(q == 0.0, 0.0, q * of_teacher))

            g = _slopes(s, t, beta, log_student, log_teacher, KIND)
            above = tl.max(s)
            g_above = tl.max(tl.where(s == above, g, float("-inf")))
            # In a block of -inf, g is not a number. An infinite g is no pivot: the divergence is infinite.
            moves = (above > largest) & (tl.abs(g_above) < float("inf"))
            moved = tl.where(moves, g_above, pivot)
            inner += tl.sum(tl.where(p == 0.0, 0.0, p * (g - moved))) - (moved - pivot) * mass
            pivot = moved
            mass += tl.sum(p)
            largest = tl.maximum(largest, above)

        loss += inner + pivot * mass

    tl.store(sums + i, loss)
    tl.store(sums + rows + i, inner)
    tl.store(sums + 2 * rows + i, pivot)
    tl.store(sums + 3 * rows + i, mass)
    tl.store(sums + 4 * rows + i, largest)


@triton.jit(do_not_specialize=["rows"])
def _divergence_gradient(
    z, u, out, bias, taught_bias, targets, weights, factors, losses, stride, out_stride, columns, rows,
    ignore, beta, log_student, log_teacher, scale, cap, taught_scale, taught_cap, heat, KIND: tl.constexpr,
    CAP: tl.constexpr, BIAS: tl.constexpr, TAUGHT_CAP: tl.constexpr, TAUGHT_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the weighted gradient of the student's row over it, and for the kind 0 the row's divergence."""
    i = tl.program_id(0)
    row = z + i.to(tl.int64) * stride
    taught = u + i.to(tl.int64) * stride
    out_row = out + i.to(tl.int64) * out_stride
    counts = tl.load(targets + i) != ignore
    factor = tl.load(weights + i) * scale * heat
    top = tl.load(factors + i)
    log_mass = tl.load(factors + rows + i)
    taught_top = tl.load(factors + 2 * rows + i)
    taught_log_mass = tl.load(factors + 3 * rows + i)
    inner = tl.load(factors + 4 * rows + i)
    pivot = tl.load(factors + 5 * rows + i)
    loss = tl.sum(tl.zeros([1], tl.float32))

    blocks = tl.cdiv(columns, BLOCK)
    for done in range(blocks):
        index = (blocks - 1 - done) * BLOCK + tl.arange(0, BLOCK)
        d = tl.zeros([BLOCK], tl.float32)
        if counts:  # the divergence of other rows may be infinite
            s, p, bend = _log_probabilities(
                row, bias, index, columns, top, log_mass, scale, cap, heat, CAP, BIAS
            )  # fmt: skip
            t, q, _ = _log_probabilities(
                taught, taught_bias, index, columns, taught_top, taught_log_mass, taught_scale, taught_cap,
                heat, TAUGHT_CAP, TAUGHT_BIAS,
            )  # fmt: skip
            if KIND == 0:
                d = p - q
                loss += tl.sum(tl.where(q == 0.0, 0.0, q * (t - s)))
            else:
                g = _slopes(s, t, beta, log_student, log_teacher, KIND)
                d = tl.where(p == 0.0, 0.0, p * ((g - pivot) - inner))

            d *= factor
            if CAP:
                d *= bend

        tl.debug_barrier()  # all threads have read this block before one overwrites it
        tl.store(out_row + index, d.to(out.dtype.element_ty), mask=index < _padded(columns))

    if KIND == 0:
        tl.store(losses + i, loss)


def shape_of(columns: int, rows_at_once: int = 1) -> tuple[int, int]:
    """Return the columns of a block and the warps of a program that holds this many rows at a time."""
    widest = _WIDEST // rows_at_once
    block = min(widest, max(16, triton.next_power_of_2(columns)))
    warps = 16 if block == widest else 4
    return block, warps


def _options(columns: int, bias: Tensor | None, softcap: float | None) -> dict[str, object]:
    """Return the arguments of the other kernels that follow from a head and a number of columns."""
    block, warps = shape_of(columns)
    return {"CAP": softcap is not None, "BIAS": bias is not None, "BLOCK": block, "num_warps": warps}


def nll(
    z: Tensor, out: Tensor, losses: Tensor, targets: Tensor, weights: Tensor, bias: Tensor | None,
    columns: int, ignore: int, smoothing: float, z_loss: float,
    scale: float, softcap: float | None, temperature: float,
) -> None:  # fmt: skip
    """Launch ``_nll`` on rows ``z`` ``[c, stride]``; the gradient goes to ``out``."""
    _nll[(z.shape[0],)](
        z, out, bias, targets, weights, losses, z.stride(0), out.stride(0), columns, ignore, smoothing,
        z_loss, scale, softcap or 1.0, 1.0 / temperature, TOTAL=smoothing > 0.0,
        **_options(columns, bias, softcap),
    )  # fmt: skip


def statistics(
    z: Tensor, stats: Tensor, targets: Tensor, bias: Tensor | None, columns: int, start: int,
    entropy: bool, total: bool, scale: float, softcap: float | None, temperature: float,
) -> None:  # fmt: skip
    """Launch ``_statistics`` on rows ``z`` ``[c, stride]`` whose first column is ``start``."""
    _statistics[(z.shape[0],)](
        z, bias, targets, stats, z.stride(0), columns, start, stats.stride(0), scale, softcap or 1.0,
        1.0 / temperature, ENTROPY=entropy, TOTAL=total, **_options(columns, bias, softcap),
    )  # fmt: skip


def gradient(
    z: Tensor, out: Tensor, factors: Tensor, targets: Tensor, bias: Tensor | None, columns: int, start: int,
    slope: bool, scale: float, softcap: float | None, temperature: float,
) -> None:  # fmt: skip
    """Launch ``_gradient`` on rows ``z`` ``[c, stride]`` whose first column is ``start``."""
    _gradient[(z.shape[0],)](
        z, out, bias, targets, factors, z.stride(0), out.stride(0), columns, start, factors.stride(0), scale,
        softcap or 1.0, 1.0 / temperature, SLOPE=slope, **_options(columns, bias, softcap),
    )  # fmt: skip


# Kinds of divergences as the constant ``KIND`` of the kernels.
KINDS = {"kl": 0, "reverse_kl": 1, "jsd": 2}


def _pair_options(
    kind: str, beta: float, columns: int, bias: Tensor | None, softcap: float | None,
    taught_bias: Tensor | None, taught_softcap: float | None,
) -> dict[str, object]:  # fmt: skip
    """Return the arguments of the kernels of pairs that follow from a kind, heads and a number of columns."""
    block, warps = shape_of(columns, rows_at_once=2)
    return {
        "beta": beta, "log_student": math.log1p(-beta), "log_teacher": math.log(beta),
        "cap": softcap or 1.0, "taught_cap": taught_softcap or 1.0, "KIND": KINDS[kind],
        "CAP": softcap is not None, "BIAS": bias is not None, "TAUGHT_CAP": taught_softcap is not None,
        "TAUGHT_BIAS": taught_bias is not None, "BLOCK": block, "num_warps": warps,
    }  # fmt: skip


def divergence_terms(
    z: Tensor, u: Tensor, sums: Tensor, factors: Tensor, targets: Tensor, bias: Tensor | None,
    taught_bias: Tensor | None, columns: int, ignore: int, kind: str, beta: float, scale: float,
    softcap: float | None, taught_scale: float, taught_softcap: float | None, temperature: float,
) -> None:  # fmt: skip
    """Launch ``_divergence_terms`` on rows ``z`` of the student and ``u`` of the teacher, ``[c, stride]``."""
    _divergence_terms[(z.shape[0],)](
        z, u, bias, taught_bias, targets, factors, sums, z.stride(0), columns, factors.stride(0), ignore,
        scale=scale, taught_scale=taught_scale, heat=1.0 / temperature,
        **_pair_options(kind, beta, columns, bias, softcap, taught_bias, taught_softcap),
    )  # fmt: skip


def divergence_gradient(
    z: Tensor, u: Tensor, out: Tensor, losses: Tensor, factors: Tensor, targets: Tensor, weights: Tensor,
    bias: Tensor | None, taught_bias: Tensor | None, columns: int, ignore: int, kind: str, beta: float,
    scale: float, softcap: float | None, taught_scale: float, taught_softcap: float | None,
    temperature: float,
) -> None:  # fmt: skip
    """Launch ``_divergence_gradient`` on rows of student and teacher; the gradient goes to ``out``."""
    _divergence_gradient[(z.shape[0],)](
        z, u, out, bias, taught_bias, targets, weights, factors, losses, z.stride(0), out.stride(0), columns,
        factors.stride(0), ignore, scale=scale, taught_scale=taught_scale, heat=1.0 / temperature,
        **_pair_options(kind, beta, columns, bias, softcap, taught_bias, taught_softcap),
    )  # fmt: skip
