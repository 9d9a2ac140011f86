"""A kind of loss -> whether its kernels compute rows as torch's operators do, tried once on a small head.

The kernels are exact in Triton's interpreter, but compilers and devices differ. So before the first loss of
every kind, on every device, vocabulary and map of logits, both ways compute a few rows of random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_thd._modes import KERNEL_ERRORS, MayNotCompare, may_compare_here
from lightning_thd.loss.tiles.logits import Head, Settings
from lightning_thd.warnings import THDWarning, warn

# (a way, a small head, its targets, the weights of its rows, the loss's options) -> results of that way
Run = Callable[..., tuple[Tensor, ...]]
# By the kernels, and by torch's operators. Both are functions of modules, so that results can be cached.
Ways = tuple[Callable[..., Any], Callable[..., Any]]
_ROWS = 16
_HIDDEN_SIZE = 64
# Gradients are rounded to bf16, by 2^-8 of their size. A wrong kernel is off by more.
_TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadKind:
    """The properties of a head on which its kernels depend, without those of other ranks."""

    settings: Settings
    device: torch.device
    hidden_dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None  # None without a bias

    @classmethod
    def of(cls, head: Head) -> HeadKind:
        """Return the kind of a head; heads of other ranks, rows and tile sizes have the same."""
        alone = replace(
            head.settings,
            vocabulary=head.settings.columns,
            start=0,
            chunk="auto",
            tp_group=None,
            partial_hidden=False,
        )
        return cls(
            settings=alone,
            device=head.hidden.device,
            hidden_dtype=head.hidden.dtype,
            weight_dtype=head.weight.dtype,
            bias_dtype=None if head.bias is None else head.bias.dtype,
        )

    def example(self, targets: Tensor, seed: int) -> Head:
        """Return a head of this kind with random numbers, which the user's generators do not give."""
        generator = torch.Generator().manual_seed(seed)
        columns = self.settings.columns
        hidden = torch.randn(len(targets), _HIDDEN_SIZE, generator=generator, device="cpu")
        weight = torch.randn(columns, _HIDDEN_SIZE, generator=generator, device="cpu") / _HIDDEN_SIZE**0.5
        bias: Tensor | None = None
        if self.bias_dtype is not None:
            bias = torch.randn(columns, generator=generator, device="cpu").to(self.device, self.bias_dtype)
        operands = (
            hidden.to(self.device, self.hidden_dtype),
            weight.to(self.device, self.weight_dtype),
            bias,
        )
        return Head.of(operands, targets, self.settings, chunk=len(targets))


def kernels_hold(loss: str, head: Head, run: Run, ways: Ways, *options: Hashable) -> bool:
    """Return whether the kernels of a loss may compute a head's rows; if their trial fails, warn.

    Code that may not read the device (a capture, a dispatch mode, fake tensors) uses them untried.

    Args:
        loss: its name, for the message.
        head: the rows to compute.
        run: computes the results of a small head in one of the two ways.
        ways: how the kernels and torch's operators compute the loss.
        options: what else decides which kernels run; ``run`` gets it too.
    """
    holds_values = type(head.hidden) in (Tensor, nn.Parameter)  # fake tensors do not
    if not holds_values or torch.compiler.is_compiling():
        return True
    try:
        return _trial(loss, HeadKind.of(head), run, ways, options)
    except MayNotCompare:
        return True


@lru_cache(maxsize=256)
def _trial(loss: str, kind: HeadKind, run: Run, ways: Ways, options: tuple[Hashable, ...]) -> bool:
    """Compute a few rows both ways, once for each kind of head and loss; warn if they differ."""
    if not may_compare_here(kind.device):
        raise MayNotCompare

    targets, weights = _targets_and_weights(kind)
    few = kind.example(targets, seed=0)
    by_kernels, by_operators = ways
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(kind.device.type, enabled=False):
        wanted = run(by_operators, few, targets, weights, *options)
        try:
            found = run(by_kernels, few, targets, weights, *options)
        except KERNEL_ERRORS as failure:
            trouble: str | None = f"they failed: {type(failure).__name__}: {failure}"
        else:
            trouble = _difference(found, wanted)
    if trouble is None:
        return True

    warn(
        f"The Triton kernels of the loss {loss!r} are not used here: of {_ROWS} rows over "
        f"{kind.settings.columns} columns in {kind.settings.compute}, {trouble}. Torch's operators compute "
        "the loss, more slowly. Please report it, with the output of `lightning-thd doctor`.",
        THDWarning,
    )
    return False


def _targets_and_weights(kind: HeadKind) -> tuple[Tensor, Tensor]:
    """Return random targets of a few rows, the last one ignored if targets may be, and its weight 0 then."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(kind.settings.columns, (_ROWS,), generator=generator, device="cpu")
    weights = torch.rand(_ROWS, generator=generator, device="cpu") + 0.5
    if kind.settings.ignore_index is not None:
        targets[-1] = kind.settings.ignore_index
        weights[-1] = 0.0
    return targets.to(kind.device), weights.to(kind.device, kind.settings.accumulator)


def _difference(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> str | None:
    """Return how the kernels' results differ from the wanted ones; None if they agree."""
    for result, expected in zip(found, wanted, strict=True):
        error = (result.double() - expected.double()).abs().max() / expected.double().abs().max()
        if not float(error) < _TOLERANCE:  # a NaN is an error
            return f"a result differs by {float(error):.2g} of the largest value"
    return None
