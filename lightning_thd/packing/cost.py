"""The length of a sequence -> its work: linear in the tokens for the layers, quadratic for attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_thd._checks import whole_number
from lightning_thd.flops.model import FlopsModel
from lightning_thd.stats import SeqStats

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Work of a sequence of ``s`` tokens: ``linear * s + quadratic * s**2``, in any unit.

    The default is a dense transformer of hidden size 4096 (12 h^2 weights a layer, causal attention): 12 h
    tokens of linear work for each s of attention, so that attention is a fifth of the work at 12k tokens.

    Attributes:
        linear: work of a token.
        quadratic: work of a pair of tokens.
    """

    linear: float = 12 * 4096
    quadratic: float = 1.0

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise TypeError(f"Cost.{name} is a {type(value).__name__}. Pass a number of at least 0.")
        if not (self.linear >= 0 and self.quadratic >= 0 and 0 < self.linear + self.quadratic < np.inf):
            raise ValueError(
                f"Cost(linear={self.linear}, quadratic={self.quadratic}): wanted finite numbers of at least "
                "0, and not both 0. Cost(linear=1, quadratic=0) balances tokens."
            )

    @classmethod
    def from_flops(cls, model: FlopsModel, *, longest: int = 8192) -> Cost:
        """Build a cost from a model's own FLOPs, recomputation included."""
        whole_number(longest, "longest", least=1, advice="It is the tokens of the longest sequence.")
        half = max(1, longest // 2)
        short, long = (
            float(model.training_flops(SeqStats.from_lengths([n], windows=model.windows)).hardware)
            for n in (half, 2 * half)
        )
        quadratic = max(0.0, (long - 2 * short) / (2 * half**2))
        return cls(linear=long / (2 * half) - quadratic * 2 * half, quadratic=quadratic)

    def __call__(self, lengths: npt.ArrayLike) -> FloatArray:
        """Return the work of each sequence, float64 ``[S]``: 2 s + s**2 of ``[3]`` is ``[15.0]``."""
        given = np.asarray(lengths)
        if given.size and (given.dtype.kind not in "iuf" or not np.isfinite(given).all()):
            raise ValueError(f"lengths has the type {given.dtype}, or is not finite. Pass numbers.")
        tokens = given.astype(np.float64)
        return tokens * (self.linear + self.quadratic * tokens)
