"""A tile's geometry and a window -> the additive mask the kernels take, or none where all is seen."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lightning_thd.attention.kernels.plan import Tiles
from lightning_thd.attention.spec import AttentionSpec

# Rows and keys of the causal mask that is kept: 256 KiB in fp32.
_SMALL = 256


@cache
def _triangle(dtype: torch.dtype) -> Tensor:
    return torch.full((_SMALL, _SMALL), -torch.inf, dtype=dtype, device="cpu").triu_(1)


class Masks:
    """The additive masks of one kernel run, built on first use and shared by tiles of equal geometry."""

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype) -> None:
        self._spec = spec
        self._dtype = dtype
        self._made: dict[tuple[int, int, int], Tensor] = {}
        self._diagonal: Tensor | None = None

    def of(self, tiles: Tiles) -> Tensor | None:
        """Return ``[rows, keys]`` with 0 where seen and -inf where hidden, or None when all is seen."""
        left, right = self._spec.left, self._spec.right
        if tiles.sees_all(left, right):
            return None
        last = tiles.shift + tiles.rows
        if left < 0 and right == 0 and tiles.shift >= 0 and max(last, tiles.keys) <= _SMALL:
            return _triangle(self._dtype)[tiles.shift : last, : tiles.keys]
        if left < 0 and right == 0 and tiles.shift == tiles.keys - tiles.rows:
            return self._ending_on_diagonal(tiles.rows, tiles.keys)
        key = (tiles.rows, tiles.keys, tiles.shift)
        if key not in self._made:
            hidden = hidden_pairs(*key, left=left, right=right)
            self._made[key] = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
        return self._made[key]

    def _ending_on_diagonal(self, rows: int, keys: int) -> Tensor:
        """Return a tile's causal mask as a corner of the largest one made so far."""
        have = (0, 0) if self._diagonal is None else tuple(self._diagonal.shape)
        if self._diagonal is None or rows > have[0] or keys > have[1]:
            rows_, keys_ = max(rows, have[0]), max(keys, have[1])
            self._diagonal = torch.full((rows_, keys_), -torch.inf, dtype=self._dtype).triu_(
                keys_ - rows_ + 1
            )
        return self._diagonal[self._diagonal.shape[0] - rows :, self._diagonal.shape[1] - keys :]


def hidden_pairs(rows: int, keys: int, shift: int, *, left: int, right: int) -> Tensor:
    """Return which keys each query of a tile may not see, as a bool mask.

    Args:
        rows: queries.
        keys: keys.
        shift: local query i stands at local key ``i + shift``.
        left: keys seen before that, -1 for all.
        right: keys seen after that, -1 for all.

    Returns:
        bool ``[rows, keys]``. ``(2, 2, 0, left=-1, right=0)`` gives ``[[False, True], [False, False]]``.
    """
    distance = torch.arange(keys) - torch.arange(rows)[:, None] - shift
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    return hidden
