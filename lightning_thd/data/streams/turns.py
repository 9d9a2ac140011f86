"""Shares of several sources -> whose turn it is, so that every prefix has each source's share within one.

The rule is Tijdeman's for the chairman assignment problem (Discrete Mathematics 32, 1980): among the sources
that are behind by at least 1 / (2 n - 2), the one that must come soonest. After any number of turns no source
is off its share by more than 1 - 1 / (2 n - 2) turns, the least that any rule can promise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import gcd, lcm

# Weights become fractions of at most this denominator: 0.3 is 3/10, and numbers of tokens stay what they are.
_DENOMINATOR = 10**9


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Turn weights into whole numbers of the same proportions, so that turns are exact for ever.

    Args:
        weights: above 0, in any unit.

    Returns:
        Whole numbers without a common divisor: ``[0.3, 0.7]`` becomes ``[3, 7]``.
    """
    fractions = [Fraction(weight).limit_denominator(_DENOMINATOR) or Fraction(weight) for weight in weights]
    common = lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * common) for fraction in fractions]
    divisor = gcd(*whole)
    return [number // divisor for number in whole]


def take_turns(
    shares: Mapping[int, int], used: Sequence[int], waiting: Sequence[int], most: int | None = None
) -> tuple[list[int], int | None]:
    """Say which source every next sequence is from, until one is wanted that has none.

    Args:
        shares: whole numbers of the sources that take part, by their number.
        used: sequences that each source gave since it takes part with these.
        waiting: sequences that each source has at hand.
        most: turns that are enough; None for all there are.

    Returns:
        The numbers of the sources, turn after turn, and the one whose turn could not be taken; None where
        ``most`` turns were found. ``({0: 1, 1: 2}, [0, 0], [9, 4])`` gives
        ``([1, 0, 1, 1, 0, 1], 1)``.
    """
    names, total = list(shares), sum(shares.values())
    taken = {i: int(used[i]) for i in names}
    left = {i: int(waiting[i]) for i in names}
    number = sum(taken.values())
    twice = 2 * len(names) - 2
    found: list[int] = []
    if not twice:
        (only,) = names
        count = left[only] if most is None else min(most, left[only])
        return [only] * count, only if count != most else None
    while len(found) != most:
        number += 1
        first, chosen = None, None
        for i in names:
            behind = shares[i] * number - taken[i] * total
            if behind * twice >= total:
                due = ((twice - 1) * total - twice * behind) / shares[i]
                if first is None or due < first:
                    first, chosen = due, i
        assert chosen is not None  # together they are behind by one turn, so that some source is by 1 / n
        if not left[chosen]:
            return found, chosen
        found.append(chosen)
        taken[chosen] += 1
        left[chosen] -= 1
    return found, None
