"""How much one optimizer step takes: a number of packs, or a number of sequences."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral


@dataclass(frozen=True, slots=True)
class Packs:
    """``n`` packs of the whole job to an optimizer step: ranks times microbatches.

    Args:
        n: packs, at least one; a multiple of the data-parallel ranks.
    """

    n: int

    def __post_init__(self) -> None:
        _check("Packs", "packs", self.n)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Exactly ``n`` sequences to an optimizer step, in as many microbatches as they need.

    Args:
        n: sequences, at least one.
    """

    n: int

    def __post_init__(self) -> None:
        _check("Sequences", "sequences", self.n)


def _check(name: str, unit: str, n: object) -> None:
    if not isinstance(n, Integral) or isinstance(n, bool) or n < 1:
        raise ValueError(
            f"{name}({n!r}): a step needs a whole number of {unit}, at least one, for example {name}(512)."
        )
