"""A head's raw product -> the logits that a softmax sees: factor, cap, temperature, columns kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitMap:
    """The map ``z = cap * tanh(scale * x / cap) / temperature``; uncapped ``scale * x / temperature``.

    Attributes:
        scale: factor before the cap; granite's 1 / ``logits_scaling``, cohere's ``logit_scale``.
        softcap: the cap, in logits; None for none. Gemma 2 has 30.
        temperature: divides what comes out of the cap.
        valid_vocab_size: columns of the vocabulary that exist; None for all.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    valid_vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("scale", "temperature", "softcap"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"{name} is a {type(value).__name__}, wanted a Python number.")
            bad_sign = value == 0 if name == "scale" else value <= 0
            if not math.isfinite(value) or bad_sign:
                wanted = "a finite number other than 0" if name == "scale" else "a finite number above 0"
                hint = " Greedy decoding is argmax, not temperature 0." if name == "temperature" else ""
                raise ValueError(f"{name} is {value!r}, wanted {wanted}; leave it out for none.{hint}")
        size = self.valid_vocab_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
            raise TypeError(f"valid_vocab_size is {size!r}, wanted an int or None.")
        if self.valid_vocab_size is not None and self.valid_vocab_size < 1:
            raise ValueError(f"valid_vocab_size is {self.valid_vocab_size}, wanted at least 1 column.")

    def agrees(self, other: LogitMap) -> bool:
        """Return whether two maps give the same logits, up to the rounding of their factors."""
        mine = (self.scale, self.softcap or 0.0, self.temperature)
        theirs = (other.scale, other.softcap or 0.0, other.temperature)
        close = all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(mine, theirs, strict=True))
        return close and self.valid_vocab_size == other.valid_vocab_size

    def apply_(self, x: Tensor) -> Tensor:
        """Map a tile of raw products in place, ``[c, v]`` fp32."""
        if self.softcap is None:
            factor = self.scale / self.temperature
            return x if factor == 1.0 else x.mul_(factor)
        return x.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
