"""The weight of a batch in means over an epoch -> the tensor whose rows Lightning counts for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ROUNDING = 1e-9  # of a weight that is a whole number of tokens


class _Rows(Tensor):
    """A meta tensor that gives a weight for its number of rows."""

    weight: float

    def size(self, dim: int | None = None) -> Any:
        """Return the weight as the rows, which a shape would round to a whole number."""
        return super().size() if dim is None else self.weight


def weighing_rows(weight: float) -> Tensor:
    """Return a tensor that weighs a batch in the epoch means of ``self.log``, without values or memory.

    Lightning takes ``size(0)`` of the first tensor it finds in a batch as the weight of a logged value. A
    step's loss tokens per microbatch, or the weights of its sequences, need not be whole, and rounded ones
    would change the mean, or make it NaN where all round to 0.

    Args:
        weight: at least 0.

    Returns:
        ``[rows]`` on the meta device: 12.5 gives ``size(0)`` 12.5 in a shape ``[12]``.
    """
    whole = round(weight)
    rows: Any = torch.empty(whole, device="meta").as_subclass(_Rows)
    rows.weight = float(whole) if abs(weight - whole) <= _ROUNDING * weight else weight
    found: Tensor = rows
    return found
