"""A parallel layout and an FP8 recipe -> the multiples to which sequences and packs are padded.

FP8 kernels require a multiple of slots on each rank. Of a pack's T slots, a rank has T / (cp x tp) before
sequence parallelism gathers them, and T / cp afterwards. Padding every sequence to all these multiples wastes
up to 10 % of a pack of chats. So sequences are padded only for context parallelism, and the pack for the
rest. This wastes 1 to 3 % (python -m benchmarks.segments prints both). The padding at the end of a pack is a
separate sequence, so no real token attends to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lightning_thd._checks import choice, flags, host_ints, whole_number

Recipe = Literal["tensorwise", "blockwise", "mxfp8", "nvfp4"]
Layout = Literal["dual_chunk", "contiguous", "striped", "mixed"]

# The multiples of slots on one rank, before sequence parallelism gathers them. Transformer Engine (main,
# 2026) and torch 2.13 check them for a layer's input rows and for the product that gives a weight's gradient.
TOKEN_MULTIPLE: dict[Recipe, int] = {
    "tensorwise": 16,  # CanonicalizeGemmInput, for delayed and current scaling; torch._scaled_mm for torchao
    "blockwise": 128,  # one scale for 128 slots: Float8BlockQuantizer.is_quantizable
    "mxfp8": 32,  # one scale for 32 slots: MXFP8Quantizer.make_empty
    "nvfp4": 128,  # fused Hadamard transform and cast: get_align_size_for_quantization
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """The multiples to which the lengths of sequences and the slots of a pack are padded."""

    sequence_multiple: int = 1  # for every padded length, in slots
    total_multiple: int = 1  # for the slots of the pack; itself a multiple of sequence_multiple

    def __post_init__(self) -> None:
        for name in ("sequence_multiple", "total_multiple"):
            number = whole_number(getattr(self, name), name, least=1, advice="1 means no padding.")
            object.__setattr__(self, name, number)
        if self.total_multiple % self.sequence_multiple:
            raise ValueError(
                f"{self}: total_multiple must be a multiple of sequence_multiple, because the padding of a "
                "pack is a sequence too. "
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
            whole_number(size, name, least=1, advice="1 means no such parallelism.")
        flags(sequence_parallel=sequence_parallel)
        choice(layout, "layout", *get_args(Layout))
        if recipe is not None:
            advice = "Use 'tensorwise' for delayed scaling, current scaling and torchao."
            choice(recipe, "recipe", *TOKEN_MULTIPLE, advice=advice)

        # A rank gets two chunks of every sequence, one from each half.
        cuts_sequences = cp > 1 and layout in ("dual_chunk", "mixed")
        sequence_multiple = 2 * cp if cuts_sequences else 1
        slot_ranks = cp * tp if sequence_parallel else cp  # ranks that share the slots of a pack
        token_multiple = 1 if recipe is None else TOKEN_MULTIPLE[recipe]
        return cls(
            sequence_multiple=sequence_multiple,
            total_multiple=math.lcm(sequence_multiple, slot_ranks * token_multiple),
        )

    def joined_with(self, other: Alignment) -> Alignment:
        """Return the alignment that satisfies both: 16 and 24 give 48."""
        sequence = math.lcm(self.sequence_multiple, other.sequence_multiple)
        return Alignment(
            sequence_multiple=sequence,
            total_multiple=math.lcm(sequence, self.total_multiple, other.total_multiple),
        )

    def padded_length(self, length: int) -> int:
        """Round a sequence's length up: 13 tokens become 16 slots if sequence_multiple is 8."""
        length = whole_number(length, "length")
        return -(-length // self.sequence_multiple) * self.sequence_multiple

    def padded_lengths(self, lengths: npt.ArrayLike | Tensor) -> npt.NDArray[np.int64]:
        """Round the lengths ``[S]`` of many sequences up, in one call."""
        values = host_ints(lengths, "lengths", least=0)
        return -(-values // self.sequence_multiple) * self.sequence_multiple

    def padded_total(self, total: int) -> int:
        """Round the slots of a pack up: 1,000 become 1,024 if total_multiple is 128."""
        total = whole_number(total, "total")
        return -(-total // self.total_multiple) * self.total_multiple

    def check(self, slots: int) -> None:
        """Raise ValueError if a pack's number of slots is not a multiple of ``total_multiple``."""
        slots = whole_number(slots, "slots")
        if slots % self.total_multiple:
            raise ValueError(
                f"A pack has {slots} slots; wanted a multiple of {self.total_multiple}. THDDataModule pads "
                f"packs itself; else pass align= to THDBatch.collate. Use {self.padded_total(slots)} slots."
            )
