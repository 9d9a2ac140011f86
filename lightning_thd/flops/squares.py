"""Products of activations -> those that multiply all slots of a row by each other, as attention by hand does.

T slots of a pack, N slots of a padded row. Such a product computes T x T pairs, and a mask then hides those
that no sequence has. torch's counter cannot know the mask, so the pairs are compared with the lengths.
Found are products of queries and keys, products of weights and a vector of each pair (additive attention),
and the product of T x T with values, however its scores were made.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

from torch import Tensor, nn

from lightning_thd.flops.terms import Causal, Tokens
from lightning_thd.stats import SeqStats

_Shape: TypeAlias = tuple[int, ...]

# Products of two tensors that may make attention's scores, or multiply the scores by values.
_OF_PAIRS = frozenset(
    {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "linear", "einsum", "tensordot", "inner", "cdist"}
    | {"addmm", "addmm_", "baddbmm", "baddbmm_", "addbmm", "addbmm_"}
)


@dataclass(slots=True)
class Square:
    """The products of a step that multiply n rows by n rows."""

    flops: int = 0  # forward and backward, also of products that use the n x n result
    is_used: bool = False  # whether a product used it, as that of attention's weights and values does
    names: set[str] = field(default_factory=set)  # the functions that made or used such results
    has_rows: bool = False  # whether a result had more dimensions than n x n


@dataclass(frozen=True, slots=True)
class HiddenPairs:
    """The pairs of slots that products compute although no sequence has them."""

    names: tuple[str, ...]  # the functions that compute them
    slots: int  # those of a row, each multiplied by each
    times: float  # FLOPs of the step with these pairs, over those without them

    @property
    def reason(self) -> str:
        """Return a sentence that says what was counted, and one that says what to do."""
        verb = "multiplies" if len(self.names) == 1 else "multiply"
        return (
            f"{', '.join(self.names)} {verb} all {self.slots:,} x {self.slots:,} slots of a row, and a "
            "mask hides the pairs that no sequence has. Call varlen_attention(q, k, v, batch.boundaries) or "
            "F.scaled_dot_product_attention, whose pairs are counted by sequence, or pass flops_model=."
        )


class Weights:
    """The tensors of a step that depend on weights only.

    These are parameters and buffers, their views, and all that functions make of such tensors alone, such as
    a weight in another dtype.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._places = {place for x in tensors if (place := _place(x))}
        self._made: dict[int, weakref.ref[Tensor]] = {}

    def __contains__(self, x: Tensor) -> bool:
        if isinstance(x, nn.Parameter):
            return True
        made = self._made.get(id(x))
        if made is not None and made() is x:
            return True
        return _place(x) in self._places

    def note(self, args: Any, kwargs: Any, out: Any) -> None:
        """Note the results of a function as weights if all tensors that it got are weights."""
        results = list(_tensors(out))
        if not results:
            return
        operands = [*_tensors(args), *_tensors([*kwargs.values()])]
        if operands and all(x in self for x in operands):
            self._made |= {id(x): weakref.ref(x) for x in results}


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments or results of a function, also of lists."""
    if isinstance(values, Tensor):
        yield values
        return
    if not isinstance(values, list | tuple):  # an iterator would be used up
        return
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (x for x in value if isinstance(x, Tensor))


def _place(x: Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none of its own, as on the meta device."""
    if type(x) not in (Tensor, nn.Parameter):
        return 0
    try:
        return x.untyped_storage().data_ptr()
    except RuntimeError:  # a tensor inside a transform of torch.func
        return 0


def note_square(
    squares: dict[int, Square],
    weights: Weights,
    name: str,
    args: Any,
    tensors: Sequence[Tensor],
    out: Any,
    flops: int,
) -> None:
    """Note a product that multiplies rows of activations by each other, or multiplies what came of that."""
    if name not in _OF_PAIRS or not isinstance(out, Tensor):
        return
    factors = _factors(name, tensors)
    activations = [x for x in factors if x not in weights]
    shapes = [tuple(x.shape) for x in activations]
    used = 0
    if len(activations) == len(factors):
        made = _made_square(name, args, shapes, tuple(out.shape))
        used = max(map(_last_square, shapes), default=0)
        has_rows = out.dim() > 2
    else:
        pairs = max(shapes, key=_square_of_rows, default=())
        made = _square_of_rows(pairs)
        has_rows = len(pairs) > 3
    if max(made, used) < 2:
        return

    square = squares[made or used]
    square.flops += flops
    square.is_used = square.is_used or used == (made or used)
    if made or _last_square(shapes[0]) == used:  # a second factor of n x n may be a layer of n features
        square.names.add(name.strip("_"))
    if made:
        square.has_rows = square.has_rows or has_rows


def _factors(name: str, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the tensors that a product multiplies, without those that it adds."""
    if name == "linear":
        return tensors[:2]
    if "add" in name:
        return tensors[1:3]
    return tensors


def hidden_pairs(
    squares: Mapping[int, Square],
    microbatches: Sequence[tuple[SeqStats, tuple[int, int]]],
    flops: int,
    *,
    causal: Causal,
    tokens: Tokens,
) -> HiddenPairs | None:
    """Compare a step's products with its lengths; None if all computed pairs are pairs of a sequence.

    Args:
        squares: the products that multiply n rows by n rows, by n.
        microbatches: the counts of each one, with its shape (rows, slots of a row).
        flops: the FLOPs of all products of the step, forward and backward.
        causal: which pairs of a sequence count.
        tokens: whether FLOPs are those of "real" tokens or of all "slots".
    """
    total = _share(microbatches, tokens) * flops
    wanted = total
    hiding: dict[int, Square] = {}
    for slots, square in squares.items():
        # A matrix of B x B rows, such as that of a contrastive loss, may by chance look like N x N slots.
        of_slots = [
            (stats, rows)
            for stats, (rows, length) in microbatches
            if length == slots and (square.has_rows or rows != slots)
        ]
        computed = sum(rows * slots * slots for _, rows in of_slots)
        squared = sum(stats.sum_squares for stats, _ in of_slots)
        if not square.names or not square.is_used or squared >= computed:
            continue

        hiding[slots] = square
        diagonal = sum(stats.real_tokens for stats, _ in of_slots)
        pairs = {"half": squared / 2, "exact": (squared + diagonal) / 2, "full": squared}[causal]
        wanted -= square.flops * (_share(microbatches, tokens) - pairs / computed)
    if not hiding:
        return None
    names = sorted({name for square in hiding.values() for name in square.names})
    return HiddenPairs(names=tuple(names), slots=max(hiding), times=total / wanted)


def _share(microbatches: Sequence[tuple[SeqStats, tuple[int, int]]], tokens: Tokens) -> float:
    """Return which share of the slots' FLOPs counts."""
    slots = sum(stats.slots for stats, _ in microbatches)
    return 1.0 if tokens == "slots" else sum(stats.real_tokens for stats, _ in microbatches) / slots


def _made_square(name: str, args: Any, shapes: Sequence[_Shape], out: _Shape) -> int:
    """Return n if a product's result has n rows of one factor by n rows of the other, else 0."""
    if name == "einsum":
        return _square_of_einsum(args, shapes)
    if name == "inner":
        of_left = out[: len(shapes[0]) - 1]
        return max({*of_left} & {*out[len(of_left) :]}, default=0)
    return _last_square(out)


def _square_of_einsum(args: Any, shapes: Sequence[_Shape]) -> int:
    """Do as ``_made_square``, for an equation of two factors such as ``"qhd,khd->hqk"``."""
    equation = args[0] if args and isinstance(args[0], str) else ""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    factors = inputs.split(",")
    if len(factors) != 2 or len(shapes) != 2:
        return 0
    if not arrow:  # torch's own output: all letters that are there once
        output = "".join(letter for letter, times in Counter("".join(factors)).items() if times == 1)

    left, right = (_sizes(letters, shape) for letters, shape in zip(factors, shapes, strict=True))
    of_left = {size for letter, size in left.items() if letter in output and letter not in right}
    of_right = {size for letter, size in right.items() if letter in output and letter not in left}
    return max(of_left & of_right, default=0)


def _sizes(letters: str, shape: _Shape) -> dict[str, int]:
    """Return the size of each letter of an einsum's factor, without the dimensions of its dots."""
    before, dots, after = letters.partition("...")
    sizes = dict(zip(before, shape, strict=False))
    if dots and after:
        sizes |= zip(after, shape[-len(after) :], strict=False)
    return sizes


def _last_square(shape: _Shape) -> int:
    """Return n for a shape that ends in n x n, else 0."""
    return shape[-1] if len(shape) > 1 and shape[-1] == shape[-2] else 0


def _square_of_rows(shape: _Shape) -> int:
    """Return n for a shape of n x n vectors, or of n x n rows of heads, else 0."""
    rows = shape[:-1]
    return max((one for one, other in pairwise(rows) if one == other), default=0)
