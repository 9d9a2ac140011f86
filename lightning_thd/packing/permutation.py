"""A key and positions -> the entries that a shuffle puts there, without holding the shuffle in memory.

n entries are permuted. A Feistel network with modular addition permutes pairs (i < a, j < b), where
``a * b >= n``. It is the method FE of Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA
2002. A pair whose value ``i * b + j`` is not below n goes through the network again. With a and b near
sqrt(n), fewer than one in sqrt(n) values need that. Each of the eight rounds hashes one half by splitmix64's
finaliser, with its own key. numpy's generators are not used, because they may change.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lightning_thd._checks import host_ints, whole_number

IntArray = npt.NDArray[np.int64]
_U64 = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1  # keeps the low 64 bits of a Python int
_ROUNDS = 8
# Up to this many entries, sorting keyed hashes shuffles more evenly and costs less than the network.
_SMALL = 4096
# splitmix64 (Steele, Lea, Flood 2014): the golden-ratio increment and the two multipliers of its finaliser.
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def derive_key(*parts: int) -> int:
    """Mix ints of any sign into a key in ``[0, 2**64)`` that depends on each int and on their order."""
    key = len(parts)
    for part in map(int, parts):  # numpy's integers overflow
        key = _mix_int((key ^ (part & _MASK)) + _GAMMA)
        if part.bit_length() > 63:  # a seed may be longer than one word
            key = derive_key(key, part >> 63)
    return key


def permute(positions: npt.ArrayLike, total: int, *, key: int) -> IntArray:
    """Return the entries that the shuffle of ``range(total)`` by ``key`` puts at positions ``[K]``."""
    whole_number(total, "total", most=2**62, advice="It is the number of entries that are permuted.")
    whole_number(key, "key", most=_MASK, advice="Make it with derive_key().")
    spots = host_ints(positions, "positions")
    if spots.size and (spots.min() < 0 or spots.max() >= total):
        raise ValueError(
            f"Positions {spots.min()} to {spots.max()} are not all in a permutation of {total} entries. "
            "Positions count from 0."
        )
    if total <= _SMALL:
        return shuffled(total, key=key)[spots]

    columns = math.isqrt(total - 1) + 1
    rows = -(-total // columns)
    values = _network(spots.astype(np.uint64), rows, columns, key)
    outside = np.flatnonzero(values >= total)
    while outside.size:
        values[outside] = _network(values[outside], rows, columns, key)
        outside = np.flatnonzero(values >= total)
    return values.astype(np.int64)


def spread(positions: IntArray, total: int, size: int, *, key: int) -> IntArray:
    """Return what a spread-out order has at positions ``[K]``; a group is ``size`` neighbours.

    Of any ``c`` neighbouring entries, each whole group has about ``c * size / total``. A smaller last group
    has its proportional share. The key decides the order of the whole groups.
    """
    groups, rest = divmod(total, size)
    group, place = np.divmod(positions, size)
    # The smaller last group takes the entries in the middle of ``rest`` equal parts of all entries.
    last = np.arange(1, 2 * rest, 2) * total // (2 * max(rest, 1))
    entries = last[np.minimum(place, rest - 1)] if rest else np.empty(len(positions), np.int64)

    # The other entries are cut into runs of one entry for each whole group; place p of a group is in run p.
    # ``ranks`` number these entries without gaps; the search then skips the entries of the last group.
    whole = group < groups
    ranks = place[whole] * groups + permute(group[whole], groups, key=key)
    entries[whole] = ranks + np.searchsorted(last - np.arange(rest), ranks, side="right")
    return entries


def shuffled(total: int, *, key: int) -> IntArray:
    """Shuffle ``range(total)`` by sorting keyed 64-bit hashes: uniform, but in memory for all entries."""
    return np.argsort(keyed_hashes(np.arange(total, dtype=np.uint64), key), kind="stable")


def keyed_hashes(values: _U64, key: int) -> _U64:
    """Hash each value to 64 pseudo-random bits, which depend on the key."""
    return _mix(values * np.uint64(_GAMMA) + np.uint64(key))


def _network(values: _U64, rows: int, columns: int, key: int) -> _U64:
    """Permute ``range(rows * columns)`` by the Feistel network; a value is ``left * columns + right``."""
    left, right = np.divmod(values, np.uint64(columns))
    for number in range(0, _ROUNDS, 2):
        left = (left + _hash(right, derive_key(key, number), rows)) % np.uint64(rows)
        right = (right + _hash(left, derive_key(key, number + 1), columns)) % np.uint64(columns)
    return left * np.uint64(columns) + right


def _hash(values: _U64, key: int, bound: int) -> _U64:
    """Hash each value to a number below ``bound``."""
    return keyed_hashes(values, key) % np.uint64(bound)


def _mix(values: _U64) -> _U64:
    """Apply splitmix64's finaliser to each value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))


def _mix_int(value: int) -> int:
    """Apply splitmix64's finaliser to a Python int, whose high bits are cut as those of uint64 are."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)
