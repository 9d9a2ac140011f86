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
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lightning_thd._checks import choice, flags, host_ints, whole_number

Recipe = Literal["tensorwise", "blockwise", "mxfp8", "nvfp4"]
Layout = Literal["dual_chunk", "contiguous", "striped", "mixed"]
Product = Literal["forward", "weight_gradient"]
Shard = Literal["local", "gathered"]


@dataclass(frozen=True, slots=True)
class Rule:
    """What one kernel or collective requires of the number of slots.

    Attributes:
        product: the product that is checked; the input gradient has the forward's shapes.
        shard: "local" counts T / (cp x tp) slots, "gathered" T / cp; the same without sequence parallel.
        multiple: slots of that shard must be a multiple of this.
        name: what is checked, in words.
        source: where the assertion is.
    """

    product: Product
    shard: Shard
    multiple: int
    name: str
    source: str


_GEMM = "Transformer Engine cublaslt_gemm.cu, CanonicalizeGemmInput"
_INPUT = Rule(
    "forward", "local", 8, "rows of an fp8 input", "Transformer Engine utils.py, assert_dim_for_fp8_exec"
)

# Every assertion on the number of slots, by recipe, in Transformer Engine (main, 2026) and torch 2.13.
# The model decides whether its features meet the rules on features. In a weight gradient slots are the inner
# dimension.
RULES: dict[Recipe, tuple[Rule, ...]] = {
    "tensorwise": (  # delayed and current scaling, and torchao
        _INPUT,
        Rule("weight_gradient", "gathered", 16, "leading dimensions of an fp8 product", _GEMM),
        Rule(
            "weight_gradient", "gathered", 16, "inner dimension of torch._scaled_mm", "torch, meta_scaled_mm"
        ),
    ),
    "blockwise": (
        _INPUT,
        Rule("forward", "gathered", 8, "outer dimension of a block-scaled product", _GEMM),
        Rule("weight_gradient", "gathered", 16, "leading dimensions of a block-scaled product", _GEMM),
        Rule(
            "weight_gradient",
            "local",
            128,
            "one scale for 128 slots",
            "Transformer Engine float8_blockwise_tensor.py, Float8BlockQuantizer.is_quantizable",
        ),
    ),
    "mxfp8": (
        _INPUT,
        Rule(
            "weight_gradient",
            "local",
            32,
            "one scale for 32 slots",
            "Transformer Engine mxfp8_tensor.py, MXFP8Quantizer.make_empty",
        ),
    ),
    "nvfp4": (
        _INPUT,
        Rule(
            "weight_gradient",
            "local",
            16,
            "one scale for 16 slots",
            "Transformer Engine nvfp4_tensor.py, NVFP4Quantizer.make_empty",
        ),
        Rule("weight_gradient", "gathered", 32, "16-byte rows of 4-bit numbers", "cuBLAS, Tensor Core Usage"),
        Rule(
            "weight_gradient",
            "local",
            128,
            "fused Hadamard transform and cast, else three kernels",
            "Transformer Engine quantization.py, get_align_size_for_quantization",
        ),
    ),
}

# One multiple a recipe, of the local shard, which satisfies every rule above whatever cp and tp are.
TOKEN_MULTIPLE: dict[Recipe, int] = {
    recipe: math.lcm(*(rule.multiple for rule in rules)) for recipe, rules in RULES.items()
}

_CONTEXT_SHARDS = Rule(
    "forward",
    "gathered",
    1,
    "equal shards of context parallelism",
    "torch.distributed, all_gather_into_tensor",
)
_SEQUENCE_SHARDS = Rule(
    "forward", "local", 1, "equal shards of sequence parallelism", "torch DTensor; gloo aborts the process"
)
_DUAL_CHUNK = "Transformer Engine context_parallel.py: two chunks of every sequence on every rank"


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """A rule together with the number of ranks that the pack is cut for.

    Attributes:
        rule: what is asserted on one rank.
        ranks: ranks among which the T slots are shared: cp, or cp x tp.
    """

    rule: Rule
    ranks: int

    @property
    def multiple(self) -> int:
        """Return what the number of slots of the whole pack must be a multiple of."""
        return self.rule.multiple * self.ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """The numbers that lengths and totals of a pack must be multiples of, and the rules behind them.

    Attributes:
        sequence_multiple: every padded length, in slots.
        total_multiple: the slots of the pack; a multiple of the other, so that the trailing pad fits.
        requirements: the rules behind the numbers, for ``check`` to name.
    """

    sequence_multiple: int = 1
    total_multiple: int = 1
    requirements: tuple[Requirement, ...] = field(default=(), repr=False, compare=False)

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
                Requirement(rule=rule, ranks=slot_ranks if rule.shard == "local" else cp) for rule in rules
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
        for requirement in self.requirements:
            if slots % requirement.multiple:
                raise ValueError(_broken(requirement, slots))
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


def _broken(requirement: Requirement, slots: int) -> str:
    rule, ranks = requirement.rule, requirement.ranks
    share = f"{slots} slots" if ranks == 1 else f"{slots} slots over {ranks} ranks"
    product = rule.product.replace("_", " ")
    return (
        f"{share} break the rule '{rule.name}' of the {product} ({rule.source}): wanted "
        f"a multiple of {rule.multiple} on a rank, {requirement.multiple} in the pack. {_WHO_PADS}"
    )
