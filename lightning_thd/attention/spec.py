"""The options of a call -> one frozen description that every kernel understands, in flash-attn's words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lightning_thd._checks import instance

Window = int | tuple[int, int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """The options of an attention call: causality, window, scale, softcap; everything but tensors.

    Query i of a sequence with Lq queries and Lkv keys stands at key position ``p = i + Lkv - Lq``
    (bottom-right) and sees the keys j with ``p - left <= j <= p + right``.

    Attributes:
        left: how many keys before its own position a query sees; -1 is all of them.
        right: how many keys after its own position; -1 is all, 0 is causal.
        scale: what scores are multiplied with before softcap and softmax.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0.0 is none.
    """

    left: int = -1
    right: int = -1
    scale: float
    softcap: float = 0.0

    @property
    def causal(self) -> bool:
        """Return whether no query sees a key after its own position."""
        return self.right == 0

    @property
    def windowed(self) -> bool:
        """Return whether keys are hidden beyond those that causality hides."""
        return self.left >= 0 or self.right > 0


def make_spec(
    head_size: int,
    *,
    causal: bool = True,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> AttentionSpec:
    """Check and normalise the options of ``varlen_attention``.

    Args:
        head_size: of queries and keys; the default scale is its inverse square root.
        causal: hide the keys after a query's own position.
        window: None; or with ``causal`` an int W: the last W keys, the query's own included, as Hugging
            Face's ``sliding_window``; or ``(left, right)`` keys before and after, -1 for all, as
            flash-attn's ``window_size``.
        scale: None is ``head_size ** -0.5``.
        softcap: None or 0 is none.

    Returns:
        The specification. ``make_spec(64, window=512)`` has left 511, right 0, scale 0.125.
    """
    instance(causal, "causal", bool, np.bool_, advice="Pass True or False.")
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None:  # a size that is being traced may be symbolic
            instance(value, name, int, float, np.number, torch.SymFloat, advice="Pass a number, or None.")
    left, right = _window_sides(window, causal=causal)
    if causal:
        right = 0
    if scale is None:
        scale = head_size**-0.5
    if not 0.0 < scale < float("inf"):
        raise ValueError(f"scale={scale} is not a positive finite number; None is head_size ** -0.5.")
    if softcap is not None and not 0.0 <= softcap < float("inf"):
        raise ValueError(
            f"softcap={softcap} is negative or not finite; give a positive number, or None for no cap."
        )
    return AttentionSpec(left=left, right=right, scale=float(scale), softcap=float(softcap or 0.0))


def _window_sides(window: Window, *, causal: bool) -> tuple[int, int]:
    if window is None:
        return -1, -1
    if isinstance(window, tuple | list):
        if len(window) != 2 or any(not isinstance(side, int) or side < -1 for side in window):
            raise ValueError(
                f"window={window!r}: want (left, right), two ints of at least -1, where -1 is no limit."
            )
        return window[0], window[1]
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ValueError(
            f"window={window!r}: want None, the number of keys a query sees (at least 1, its own included), "
            "or (left, right)."
        )
    if not causal:
        raise ValueError(
            f"window={window} with causal=False leaves open where the keys lie; give (left, right), "
            f"for example window=({window // 2}, {window // 2})."
        )
    return window - 1, -1
