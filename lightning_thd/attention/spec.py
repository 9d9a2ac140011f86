"""The options of a call -> one checked, frozen description that every kernel understands."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from lightning_thd._checks import instance

Window = int | tuple[int, int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """A call's options. Query i is at key p = i + num_keys - num_queries and sees p - left .. p + right."""

    left: int = -1  # keys before p that are seen; -1 means all
    right: int = -1  # keys after p that are seen; -1 means all, 0 is causal
    scale: float  # factor of scores before softcap and softmax
    softcap: float = 0.0  # 0 means no cap; else scores become softcap * tanh(scores / softcap)

    @property
    def causal(self) -> bool:
        """Return whether no query sees a key after its own position."""
        return self.right == 0

    @property
    def windowed(self) -> bool:
        """Return whether a side has a limit, apart from the limit ``right = 0`` of a causal mask."""
        return self.left >= 0 or self.right > 0


def make_spec(
    head_size: int,
    *,
    causal: bool = True,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> AttentionSpec:
    """Check and normalise the options of ``varlen_attention``; its docstring explains them."""
    instance(causal, "causal", bool, np.bool_, advice="Pass True or False.")
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None:  # torch.compile may pass a symbolic float
            instance(value, name, int, float, np.number, torch.SymFloat, advice="Pass a number, or None.")

    left, right = _window_sides(window, causal=causal)
    if causal:
        right = 0

    if scale is None:
        scale = head_size**-0.5
    if not 0.0 < scale < float("inf"):
        raise ValueError(f"scale={scale} is not a positive finite number; None is head_size ** -0.5.")
    if softcap is not None and not 0.0 <= softcap < float("inf"):
        raise ValueError(f"softcap={softcap} is negative or not finite; give a positive number, or None.")
    return AttentionSpec(left=left, right=right, scale=float(scale), softcap=float(softcap or 0.0))


# The checked spec of a kind of layer, made once; ``make_spec`` itself also takes what has no hash.
cached_spec = lru_cache(maxsize=256, typed=True)(make_spec)


def _window_sides(window: Window, *, causal: bool) -> tuple[int, int]:
    """Return the keys before and after its own that a query sees; -1 means all."""
    if window is None:
        return -1, -1

    if isinstance(window, tuple | list):
        if len(window) != 2 or any(not isinstance(side, int) or side < -1 for side in window):
            raise ValueError(f"window={window!r}: want (left, right), two ints; -1 means no limit.")
        return window[0], window[1]

    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ValueError(
            f"window={window!r}: want None, the number of keys a query sees (at least 1, its own included), "
            "or (left, right)."
        )
    if not causal:
        sides = (window // 2, window // 2)
        raise ValueError(f"window={window} with causal=False: give two sides, for example window={sides}.")
    return window - 1, -1
