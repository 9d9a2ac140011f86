"""A step run once under torch's FLOP counter -> layers, for models without a config that we know.

The counter sees matmuls and convolutions, which grow with the slots, and fused attention, which it counts as
dense squares: divided by the squares it ran on, that gives what one pair costs. What it cannot see it counts
as 0: attention on a CPU, grouped matmuls, custom kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.flop_counter import FlopCounterMode

from lightning_thd.flops.terms import Layer, Term
from lightning_thd.stats import SeqStats

_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention", "varlen")


def count_layers(run: Callable[[], object], stats: SeqStats, *, name: str) -> tuple[Layer, ...]:
    """Count one training step.

    Args:
        run: runs a forward and a backward pass.
        stats: of the batch that ``run`` uses.
        name: of the model, for messages.

    Returns:
        Layers that scale the count with slots and pairs.

    Raises:
        ValueError: when nothing was counted, or the batch is empty.
    """
    rank_zero_info(
        f"FLOPs of {name} are those of one step under torch's FlopCounterMode, scaled by its size."
    )
    with FlopCounterMode(display=False) as counter:
        run()
    return counted_layers(counter, stats, name=name)


def counted_layers(counter: FlopCounterMode, stats: SeqStats, *, name: str) -> tuple[Layer, ...]:
    """Turn what ``counter`` saw of one training step into layers; see ``count_layers``."""
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
    return (Layer(path="", terms=terms, recomputable=False),)


def _third(name: str, kind: Any, basis: Any, flops: int, count: int) -> Term:
    """A term whose forward is a third of what was counted and whose backward is the rest."""
    total = round(flops / count)
    return Term(
        name=name, kind=kind, basis=basis, forward=total // 3, input_grad=total - total // 3, weight_grad=0
    )
