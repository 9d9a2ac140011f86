"""A step run once under torch's FlopCounterMode -> a FlopsModel, for models without a config we know.

The counter sees matmuls and convolutions, which grow with the slots, and fused attention, which it counts as
dense squares: divided by the squares it ran on, that gives what one pair costs. What it cannot see it counts
as 0: attention on a CPU, grouped matmuls, custom kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_thd.flops.model import FlopsModel
from lightning_thd.flops.terms import Layer, Term
from lightning_thd.stats import SeqStats

_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention", "varlen")


def from_module(module: nn.Module, run: Callable[[], object], *, stats: SeqStats) -> FlopsModel:
    """Count one training step of ``module``.

    Args:
        module: names the result.
        run: runs a forward and a backward pass.
        stats: of the batch that ``run`` uses.

    Returns:
        A model that scales the count with slots and pairs.

    Raises:
        ValueError: when nothing was counted, or the batch is empty.
    """
    name = type(module).__name__
    rank_zero_info(
        f"FLOPs of {name} are those of one step under torch's FlopCounterMode, scaled by its size."
    )
    with FlopCounterMode(display=False) as counter:
        run()
    return from_counter(counter, stats, name=name)


def from_counter(counter: FlopCounterMode, stats: SeqStats, *, name: str) -> FlopsModel:
    """Turn what ``counter`` saw of one training step into a model; see ``from_module``."""
    by_op: Mapping[Any, int] = counter.get_flop_counts().get("Global", {})
    fused = {str(op): flops for op, flops in by_op.items() if any(key in str(op) for key in _ATTENTION)}
    matmuls = sum(by_op.values()) - sum(fused.values())
    if not matmuls or not stats.slots:
        raise ValueError(
            f"torch counted {matmuls} FLOPs of matmuls in {name} on {stats.slots} slots. Run a whole step on "
            "a batch with tokens; kernels that torch cannot count need FlopsModel.register."
        )
    squares = stats.sum_squares if any("varlen" in op for op in fused) else stats.slots**2
    terms = (
        _third("counted", "linear", "token", matmuls, stats.slots),
        _third("counted_attention", "attention", "pair", sum(fused.values()), squares),
    )
    return FlopsModel(name=name, layers=(Layer(path="", terms=terms, recomputable=False),), tokens="slots")


def _third(name: str, kind: Any, basis: Any, flops: int, count: int) -> Term:
    """A term whose forward is a third of what was counted and whose backward is the rest."""
    total = round(flops / count)
    return Term(
        name=name, kind=kind, basis=basis, forward=total // 3, input_grad=total - total // 3, weight_grad=0
    )
