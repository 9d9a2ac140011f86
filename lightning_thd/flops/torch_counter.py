"""A step run once under torch's FLOP counter -> layers, for models without a config that we know.

The counter sees matmuls and convolutions, which grow with the slots, and fused attention, which it counts as
dense squares: divided by the squares it ran on, that gives what one pair costs. Grouped products and
attention on a CPU, which torch counts as nothing, have formulas here; an operator that has none is named.
Kernels launched past torch's dispatcher, as flash-linear-attention's are, cannot be seen at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.flop_counter import FlopCounterMode

from lightning_thd._checks import described, instance
from lightning_thd.flops.operators import formulas, unknown_product
from lightning_thd.flops.terms import Layer, Term
from lightning_thd.stats import SeqStats

_NEEDED = 4 / 5  # products of attention's backward without the recomputed scores
_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention", "varlen")


class StepCounter(FlopCounterMode):
    """A FLOP counter with formulas that torch's lacks, which lists operators of unknown cost.

    Attributes:
        unknown: operators that may multiply and have no formula.
        attention: FLOPs of attention by operator, rows and length of the queries.
    """

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=formulas())
        self.unknown: set[str] = set()
        self.attention: dict[tuple[str, int, int], int] = defaultdict(int)

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if func_packet in self.flop_registry:
            name = str(func_packet)
            if any(key in name for key in _ATTENTION):
                query = args[1] if "backward" in name else args[0]
                rows, length = (query.shape[0], query.shape[-2]) if query.dim() > 3 else (1, query.shape[0])
                self.attention[name, rows, length] += self.flop_registry[func_packet](
                    *args, **kwargs, out_val=out
                )
        elif (unknown := unknown_product(func_packet)) is not None:
            self.unknown.add(unknown)
        return super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]


def count_layers(run: Callable[[], object], stats: SeqStats, *, name: str) -> tuple[Layer, ...]:
    """Count one training step; return its FLOPs as layers that scale with slots and pairs.

    Raises:
        ValueError: when nothing was counted, or the batch is empty.
    """
    instance(stats, "stats", SeqStats, advice="Pass batch.stats, or SeqStats.from_lengths(lengths).")
    if not callable(run):
        raise TypeError(f"run is {described(run)}; wanted a function that runs a training step.")
    rank_zero_info(
        f"FLOPs of {name} are those of one step under torch's FlopCounterMode, scaled by its size."
    )
    with StepCounter() as counter:
        run()
    return counted_layers(counter, stats, name=name)


def counted_layers(counter: StepCounter, stats: SeqStats, *, name: str) -> tuple[Layer, ...]:
    """Convert what ``counter`` saw of one training step to layers; see ``count_layers``."""
    matmuls = counter.get_total_flops() - sum(counter.attention.values())
    if not matmuls or not stats.slots:
        raise ValueError(
            f"torch counted {matmuls} FLOPs of matmuls in {name} on {stats.slots} slots. Run a whole step on "
            "a batch with tokens; kernels that torch cannot count need FlopsModel.register."
        )
    if counter.unknown:
        rank_zero_warn(
            f"FLOPs of {name} are too few: torch has no formula for {', '.join(sorted(counter.unknown))}. "
            "Teach FlopsModel.register the family, or pass flops_model=."
        )
    per_pair = 0.0
    for (operator, rows, length), flops in counter.attention.items():
        whole = "varlen" not in operator and rows * length >= stats.slots
        # torch counts the scores of a backward pass twice, which the model needs once
        needed = flops * _NEEDED if "backward" in operator else flops
        per_pair += needed / (rows * length**2 if whole else max(stats.sum_squares, 1))
    terms = (
        _third("counted", "linear", "token", matmuls / stats.slots),
        _third("counted_attention", "attention", "pair", per_pair),
    )
    return (Layer(path="", terms=terms, recomputable=False),)


def _third(name: str, kind: Any, basis: Any, cost: float) -> Term:
    """Return a term whose forward is a third of the counted FLOPs and whose backward is the rest."""
    total = round(cost)
    return Term(
        name=name, kind=kind, basis=basis, forward=total // 3, input_grad=total - total // 3, weight_grad=0
    )
