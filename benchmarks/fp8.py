"""What FP8 alignment costs in padding, by recipe and layout, beside the rules of verl, SkyRL and NeMo-RL.

``python -m benchmarks.fp8`` packs chat-like and long lengths into 16,384 slots under each system's rule, then
counts slots that hold no token, and packs that some kernel of the recipe would refuse. The rules were read in
the systems' sources in November 2026: verl pads sequences to lcm(16, 2 tp cp) and totals to 128 x 2 tp cp;
SkyRL sequences to lcm(2 tp cp, 16 cp); NeMo-RL sequences to 2 tp cp and totals to the recipe's block.
Then it trains in emulated FP8 and in bf16 (``benchmarks.fp8_training``); ``--quick`` leaves that out.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks import fp8_training
from benchmarks.packing import draw
from benchmarks.results import less
from lightning_thd.alignment import Alignment, Recipe
from lightning_thd.packing import pack_lengths

IntArray = npt.NDArray[np.int64]
CAPACITY, SEQUENCES = 16_384, 40_000
RECIPES: tuple[Recipe, ...] = ("tensorwise", "blockwise", "mxfp8", "nvfp4")
LAYOUTS = ((1, 1), (2, 4), (4, 2), (8, 1))  # tp, cp; sequence parallel where tp > 1
GOALS = {"tensorwise": 1.5, "blockwise": 3.0}  # per cent at tp2 x cp4
BLOCKS: dict[Recipe, int] = {"tensorwise": 16, "blockwise": 128, "mxfp8": 32, "nvfp4": 128}


@dataclass(frozen=True, slots=True)
class Rule:
    """What a system pads to.

    Attributes:
        sequence: multiple of every sequence.
        total: multiple of the pack.
    """

    sequence: int
    total: int


def ours(tp: int, cp: int, recipe: Recipe) -> Rule:
    """The least that every kernel accepts."""
    found = Alignment.for_(cp=cp, tp=tp, sequence_parallel=tp > 1, recipe=recipe)
    return Rule(found.sequence_multiple, found.total_multiple)


def verl(tp: int, cp: int, recipe: Recipe) -> Rule:
    """One rule for every recipe."""
    align = 2 * tp * cp if cp > 1 else tp
    return Rule(math.lcm(16, align), 128 * align)


def skyrl(tp: int, cp: int, recipe: Recipe) -> Rule:
    """One rule for every recipe, of sequences alone."""
    align = 2 * tp * cp if cp > 1 else tp
    return Rule(math.lcm(align, 16 * cp), 1)


def nemo_rl(tp: int, cp: int, recipe: Recipe) -> Rule:
    """The block of the recipe for the pack, whatever the ranks."""
    align = (2 * cp if cp > 1 else 1) * tp
    return Rule(align, math.lcm(align, BLOCKS[recipe] * cp))


SYSTEMS: dict[str, Callable[[int, int, Recipe], Rule]] = {
    "ours": ours,
    "verl": verl,
    "SkyRL": skyrl,
    "NeMo-RL": nemo_rl,
}


def planned(padded: IntArray) -> IntArray:
    """Slots of best-fit-decreasing packs, which are nearly full."""
    packs = pack_lengths(padded, CAPACITY)
    found: IntArray = np.add.reduceat(padded[packs.indices], packs.offsets[:-1])
    return found


def in_order(padded: IntArray) -> IntArray:
    """Slots of packs filled in the order of arrival, as a rollout's microbatches are."""
    slots, used = [], 0
    for length in padded.tolist():
        if used + length > CAPACITY:
            slots.append(used)
            used = 0
        used += length
    return np.array([*slots, used], dtype=np.int64)


PACKERS: dict[str, Callable[[IntArray], IntArray]] = {"planned": planned, "in order": in_order}


def waste(
    lengths: IntArray, rule: Rule, check: Alignment, pack: Callable[[IntArray], IntArray]
) -> tuple[float, float]:
    """Pack under a rule: per cent of the slots without a token, and of the packs that a kernel refuses.

    Args:
        lengths: of the sequences.
        rule: of the system.
        check: what the kernels of the recipe accept.
        pack: padded lengths to slots of packs.
    """
    slots = pack(-(-lengths // rule.sequence) * rule.sequence)
    slots = -(-slots // rule.total) * rule.total
    refused = 0
    for total in slots.tolist():
        try:
            check.check(total)
        except ValueError:
            refused += 1
    return 100 * (1 - float(lengths.sum()) / float(slots.sum())), 100 * refused / len(slots)


def main(argv: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="padding alone, seconds")
    parser.add_argument("--training", action="store_true", help="the loss of 200 steps alone, minutes")
    given = parser.parse_args(argv)
    if not given.training:
        show_padding()
    if not given.quick:
        fp8_training.show()


def show_padding() -> None:
    """Print what alignment costs under every rule."""
    for shape, how in itertools.product(("chat", "long"), PACKERS):
        lengths = draw(shape, SEQUENCES)
        print(f"\n{shape}, {how}: {SEQUENCES:,} sequences, mean {lengths.mean():.0f}, {CAPACITY:,} slots")
        print("per cent of slots without a token (per cent of packs that a kernel refuses)")
        print(f"{'recipe':<12}{'layout':<10}" + "".join(f"{name:>16}" for name in SYSTEMS))
        for recipe in RECIPES:
            for tp, cp in LAYOUTS:
                check = Alignment.for_(cp=cp, tp=tp, sequence_parallel=tp > 1, recipe=recipe)
                cells, first = "", 0.0
                for name, system in SYSTEMS.items():
                    lost, refused = waste(lengths, system(tp, cp, recipe), check, PACKERS[how])
                    cells += f"{lost:>8.2f} ({refused:>4.0f})"
                    if name == "ours":
                        first = lost
                        assert refused == 0
                print(f"{recipe:<12}{f'tp{tp} cp{cp}':<10}{cells}")
                if (tp, cp) == (2, 4) and recipe in GOALS and how == "planned":
                    less(f"{shape}, {how}: padding of {recipe} at tp2 x cp4", first, "%", GOALS[recipe])


if __name__ == "__main__":
    main()
