"""A few rows of a head -> whether a loss's kernels compute them as torch's operators do.

The kernels are exact in Triton's interpreter, but compilers and devices differ. So the first loss of every
kind, on every device, vocabulary and map of logits, computes a few of its rows both ways.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from copy import copy
from dataclasses import replace

from torch import Tensor, nn

from lightning_thd._modes import may_compare_here
from lightning_thd.loss.tiles.logits import Head
from lightning_thd.warnings import THDWarning, warn

# A head of a few rows -> results of each row, such as losses and gradients.
Run = Callable[[Head], tuple[Tensor, ...]]
_ROWS = 16
# Gradients are rounded to bf16, by 2^-8 of their size. A wrong kernel is off by more.
_TOLERANCE = 0.02
_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
_VERDICTS: dict[Hashable, bool] = {}
# Rows without a target, or with a NaN in their hidden states, show nothing. After so many of them, trust.
_TRIES = 4
_FRUITLESS: Counter[Hashable] = Counter()


def kernels_hold(kind: str, head: Head, options: Hashable, by_kernels: Run, by_operators: Run) -> bool:
    """Return whether the kernels of a loss may compute a head's rows; if their trial fails, warn.

    Code that may not read the device (a capture, a dispatch mode, fake tensors) uses them untried.

    Args:
        kind: the loss, for the message.
        head: the rows to compute.
        options: what else decides which kernels run.
        by_kernels: computes rows by the kernels.
        by_operators: computes the same rows by torch's operators.
    """
    settings = head.settings
    device = head.hidden.device
    key = (kind, device, settings.columns, settings.compute, settings.logit_map, head.bias is None, options)
    known = _VERDICTS.get(key)
    if known is not None:
        return known
    holds_values = type(head.hidden) in (Tensor, nn.Parameter)  # fake tensors do not
    if not len(head.hidden) or not holds_values or not may_compare_here(device):
        return True

    few = few_rows(head)
    wanted = by_operators(few)
    if not all(bool(x.isfinite().all()) and bool(x.any()) for x in wanted):
        _FRUITLESS[key] += 1
        if _FRUITLESS[key] == _TRIES:
            _VERDICTS[key] = True
        return True

    trouble = _trouble(few, by_kernels, wanted)
    _VERDICTS[key] = trouble is None
    if trouble is not None:
        warn(
            f"The Triton kernels of the loss {kind!r} are not used here: of {len(few.hidden)} rows over "
            f"{settings.columns} columns in {settings.compute}, {trouble}. Torch's operators compute the "
            "loss, more slowly. Please report it, with the output of `lightning-thd doctor`.",
            THDWarning,
        )
    return trouble is None


def _trouble(few: Head, by_kernels: Run, wanted: tuple[Tensor, ...]) -> str | None:
    """Return how the kernels' results differ from the wanted ones, or their error; None if they agree."""
    try:
        found = by_kernels(few)
    except _ERRORS as failure:
        return f"they failed: {type(failure).__name__}: {failure}"

    for result, expected in zip(found, wanted, strict=True):
        error = (result.double() - expected.double()).abs().max() / expected.double().abs().max()
        if not float(error) < _TOLERANCE:  # a NaN is an error
            return f"a result differs by {float(error):.2g} of the largest value"
    return None


def few_rows(head: Head) -> Head:
    """Return a head of the first rows, on this rank alone."""
    few = copy(head)
    rows = slice(0, min(_ROWS, head.hidden.shape[0]))
    few.hidden = head.hidden[rows]
    few.counts = None if head.counts is None else head.counts[rows]
    few.settings = replace(head.settings, tp_group=None)
    few.tile = (rows.stop, head.tile[1])
    few.row_tiles = [rows]
    return few
