"""A parallel layout and an fp8 recipe -> what lengths and totals must be multiples of, and padded numbers.

Kernels assert on what one rank holds, not on the pack: on T / (cp x tp) slots before sequence parallel
gathers them ("local") and on T / cp after ("gathered"). If every sequence is padded for all of these, a pack
of chats wastes up to ten per cent. So sequences are padded only for context parallelism, and the pack once
for everything else, which wastes one to three (python -m benchmarks.segments prints both). The pad at the end
of a pack is a sequence of its own: nothing attends to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lightning_thd._checks import choice, flags, host_ints, whole_number

Recipe = Literal["tensorwise", "blockwise", "mxfp8", "nvfp4"]
Layout = Literal["dual_chunk", "contiguous", "striped", "mixed"]


class Rule(NamedTuple):
    """What one kernel or collective requires of the slots on one rank.

    ``shard`` is "local" for T / (cp x tp) slots and "gathered" for T / cp; without sequence parallel both are
    T / cp. The slots of that shard must be a multiple of ``multiple``. ``name`` says what asserts it.
    """

    shard: Literal["local", "gathered"]
    multiple: int
    name: str


_TE = "of Transformer Engine"
_INPUT = Rule("local", 8, f"rows of an fp8 input: assert_dim_for_fp8_exec {_TE}")
_GEMM = f"leading dimensions of a weight gradient: CanonicalizeGemmInput {_TE}"

# Every assertion on the number of slots, by recipe, in Transformer Engine (main, 2026) and torch 2.13.
# The model decides whether its features meet the rules on features. In a weight gradient slots are the inner
# dimension.
RULES: dict[Recipe, tuple[Rule, ...]] = {
    "tensorwise": (  # delayed and current scaling, and torchao; torch's meta_scaled_mm wants the same 16
        _INPUT,
        Rule("gathered", 16, _GEMM),
    ),
    "blockwise": (
        _INPUT,
        Rule("gathered", 16, _GEMM),
        Rule("local", 128, f"one scale for 128 slots: Float8BlockQuantizer.is_quantizable {_TE}"),
    ),
    "mxfp8": (_INPUT, Rule("local", 32, f"one scale for 32 slots: MXFP8Quantizer.make_empty {_TE}")),
    "nvfp4": (
        _INPUT,
        Rule("local", 16, f"one scale for 16 slots: NVFP4Quantizer.make_empty {_TE}"),
        Rule("gathered", 32, "16-byte rows of 4-bit numbers: cuBLAS"),
        # Without this, three kernels run in place of one.
        Rule("local", 128, f"fused Hadamard transform and cast: get_align_size_for_quantization {_TE}"),
    ),
}

# One multiple a recipe, of the local shard, which satisfies every rule above whatever cp and tp are.
TOKEN_MULTIPLE: dict[Recipe, int] = {
    recipe: math.lcm(*(rule.multiple for rule in rules)) for recipe, rules in RULES.items()
}

_CONTEXT_SHARDS = Rule("gathered", 1, "equal shards of context parallelism")
_SEQUENCE_SHARDS = Rule("local", 1, "equal shards of sequence parallelism")  # gloo aborts the process
_DUAL_CHUNK = "Transformer Engine context_parallel.py: two chunks of every sequence on every rank"


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """The numbers that lengths and totals of a pack must be multiples of, and the rules behind them.

    Attributes:
        sequence_multiple: every padded length, in slots.
        total_multiple: the slots of the pack; a multiple of the other, so that the trailing pad fits.
        requirements: the rules behind the numbers, for ``check``: (multiple of the pack's slots, name).
    """

    sequence_multiple: int = 1
    total_multiple: int = 1
    requirements: tuple[tuple[int, str], ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("sequence_multiple", "total_multiple"):
            number = whole_number(getattr(self, name), name, least=1, advice="1 asks for nothing.")
            object.__setattr__(self, name, number)
        if self.total_multiple % self.sequence_multiple:
            raise ValueError(
                f"{self}: the total must be a multiple of sequence_multiple, or the trailing pad is none. "
                f"Use total_multiple={math.lcm(self.sequence_multiple, self.total_multiple)}."
            )

    @classmethod
    def for_(
        cls,
        *,
        cp: int = 1,
        tp: int = 1,
        sequence_parallel: bool = False,
        recipe: Recipe | None = None,
        layout: Layout = "dual_chunk",
    ) -> Alignment:
        """Return the alignment for one parallel layout and FP8 recipe."""
        for size, name in ((cp, "cp"), (tp, "tp")):
            whole_number(size, name, least=1, advice="1 means not at all.")
        flags(sequence_parallel=sequence_parallel)
        choice(layout, "layout", *get_args(Layout))
        if recipe is not None:
            advice = "Delayed and current scaling and torchao are 'tensorwise'."
            choice(recipe, "recipe", *RULES, advice=advice)
        slot_ranks = cp * tp if sequence_parallel else cp
        sequence_multiple = 2 * cp if cp > 1 and layout in ("dual_chunk", "mixed") else 1
        token_multiple = 1 if recipe is None else TOKEN_MULTIPLE[recipe]
        rules = (_CONTEXT_SHARDS, _SEQUENCE_SHARDS, *(() if recipe is None else RULES[recipe]))
        return cls(
            sequence_multiple=sequence_multiple,
            total_multiple=math.lcm(sequence_multiple, slot_ranks * token_multiple),
            requirements=tuple(
                (rule.multiple * (slot_ranks if rule.shard == "local" else cp), rule.name) for rule in rules
            ),
        )

    def joined_with(self, other: Alignment) -> Alignment:
        """Return the alignment that meets both: multiples of 16 and of 24 together are multiples of 48."""
        sequence = math.lcm(self.sequence_multiple, other.sequence_multiple)
        return Alignment(
            sequence_multiple=sequence,
            total_multiple=math.lcm(sequence, self.total_multiple, other.total_multiple),
            requirements=tuple(dict.fromkeys((*self.requirements, *other.requirements))),
        )

    def padded_length(self, length: int) -> int:
        """Round a sequence's length up: 13 tokens become 16 slots if sequence_multiple is 8."""
        return -(-whole_number(length, "length") // self.sequence_multiple) * self.sequence_multiple

    def padded_lengths(self, lengths: npt.ArrayLike | Tensor) -> npt.NDArray[np.int64]:
        """Round the lengths ``[S]`` of many sequences up, in one call."""
        return -(-host_ints(lengths, "lengths", least=0) // self.sequence_multiple) * self.sequence_multiple

    def padded_total(self, total: int) -> int:
        """Round the slots of a pack up: 1,000 become 1,024 if total_multiple is 128."""
        return -(-whole_number(total, "total") // self.total_multiple) * self.total_multiple

    def check(self, slots: int, *, padded_lengths: npt.ArrayLike | Tensor = ()) -> None:
        """Raise ValueError for lengths that break a kernel's or collective's rule, naming it and the remedy.

        Args:
            slots: slots T of the pack.
            padded_lengths: slots of every sequence, the trailing pad included.
        """
        slots = whole_number(slots, "slots")
        for multiple, name in self.requirements:
            if slots % multiple:
                raise ValueError(
                    f"{slots} slots break the rule '{name}': wanted a multiple of {multiple}. {_WHO_PADS}"
                )
        if slots % self.total_multiple:
            raise ValueError(
                f"A pack has {slots} slots; wanted a multiple of {self.total_multiple}. {_WHO_PADS} "
                f"Use {self.padded_total(slots)} slots."
            )
        for i, length in enumerate(host_ints(padded_lengths, "padded_lengths").tolist()):
            if length % self.sequence_multiple:
                raise ValueError(
                    f"Sequence {i} has {length} slots; wanted a multiple of {self.sequence_multiple} "
                    f"({_DUAL_CHUNK}). {_WHO_PADS}"
                )


_WHO_PADS = "THDBatch.collate pads when it is given align=, which THDDataModule takes from the strategy."
