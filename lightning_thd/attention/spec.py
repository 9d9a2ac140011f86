"""The options and offsets of a call -> one checked, frozen description that every kernel understands."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

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


known_spec = lru_cache(maxsize=256, typed=True)(make_spec)


def _window_sides(window: Window, *, causal: bool) -> tuple[int, int]:
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
        sides = window // 2, window // 2
        raise ValueError(f"window={window} with causal=False: give two sides, for example window={sides}.")
    return window - 1, -1


class Offsets(NamedTuple):
    """Offsets of sequences, int32 ``[S + 1]`` on the device of q, and max_seqlens as ints on the host."""

    cu_q: Tensor
    cu_kv: Tensor
    max_q: int
    max_kv: int

    def checked(self, rows: int, keys: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return CPU offsets as ints; raise if they miss rows, fall, or have a length over max_seqlen."""
        cu_q = _checked(self.cu_q, rows, self.max_q, "q")
        if self.cu_kv is self.cu_q and (rows, self.max_q) == (keys, self.max_kv):
            return cu_q, cu_q
        return cu_q, _checked(self.cu_kv, keys, self.max_kv, "kv")


def _checked(cu_seqlens: Tensor, total: int, max_seqlen: int, side: str) -> tuple[int, ...]:
    offsets, longest, fall = read_offsets(cu_seqlens)
    name = f"cu_seqlens_{side}"
    if offsets[0] != 0 or offsets[-1] != total:
        raise ValueError(
            f"{name} runs from {offsets[0]} to {offsets[-1]} but must run from 0 to {total}, the rows of "
            f"{'q' if side == 'q' else 'k and v'}. Count padding at the end as one more sequence."
        )
    if fall is not None:
        raise ValueError(
            f"{name} falls from {offsets[fall]} to {offsets[fall + 1]} at sequence {fall}; "
            "offsets must never fall."
        )
    if longest > max_seqlen:
        raise ValueError(
            f"max_seqlen_{side}={max_seqlen} but {name} has a sequence of {longest}: pass its length or more."
        )
    return offsets


def read_offsets(cu_seqlens: Tensor) -> tuple[tuple[int, ...], int, int | None]:
    """Return CPU offsets as ints, the longest length, and the index where they fall most, None if nowhere."""
    array = cu_seqlens.numpy()
    return _parse(array.tobytes(), array.dtype.str)  # type: ignore[no-any-return]


@lru_cache(maxsize=32)
@torch.compiler.disable  # type: ignore[untyped-decorator]  # dynamo takes no array over bytes
def _parse(raw: bytes, dtype: str) -> tuple[tuple[int, ...], int, int | None]:
    offsets = np.frombuffer(raw, dtype)
    lengths = np.diff(offsets)
    lowest = int(lengths.argmin())
    return tuple(offsets.tolist()), int(lengths.max()), lowest if lengths[lowest] < 0 else None
