"""The length and image patches of a sequence -> its work, in the text model and in the vision tower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_thd._checks import host_ints, real_number, whole_number
from lightning_thd.flops.model import FlopsModel
from lightning_thd.stats import SeqStats

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
# Positions of sequences -> int64 [S, 2]: image patches, and the sum over frames of squared patch counts.
Media = Callable[[IntArray], IntArray]

_EDGE = 64  # least patches along an edge of the probed image; an edge of about 1,000 pixels has 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Computes the work, in any unit, of a sequence with ``s`` tokens and with frames of ``p`` patches.

    It is ``linear * s + quadratic * s**2``, plus ``patch * p + patch_pair * p**2`` for each frame. The
    default fits a dense transformer with hidden size h = 4096, 12 h^2 weights per layer and causal attention.
    Its work grows as ``12 h s + s**2``, so attention is a fifth of the work at 12k tokens.
    """

    linear: float = 12 * 4096  # work of a token
    quadratic: float = 1.0  # work of a pair of tokens
    patch: float = 0.0  # work of a patch of an image or of a frame of a video
    patch_pair: float = 0.0  # work of a pair of patches of one frame

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic", "patch", "patch_pair"):
            real_number(given := getattr(self, name), f"Cost.{name}", least=0)
            object.__setattr__(self, name, float(given))  # so that 1 and 1.0 have one fingerprint
        if not self.linear + self.quadratic:
            raise ValueError(f"{self!r} costs nothing. Cost(linear=1, quadratic=0) balances tokens.")

    @classmethod
    def from_flops(cls, model: FlopsModel, *, longest: int = 8192) -> Cost:
        """Fit a cost to a model's FLOPs at ``longest`` tokens and at half; vision and recomputation count."""
        whole_number(longest, "longest", least=1, advice="It is the tokens of the longest sequence.")
        half = max(1, longest // 2)
        linear, quadratic = _fitted(
            lambda n: SeqStats.from_lengths([n], windows=model.windows), half, 2 * half, model
        )
        if not model.sees_images:
            return cls(linear=linear, quadratic=quadratic)
        edges = model.vision_windows
        window = max(edges, default=1)
        edge = -(-_EDGE // window) * window  # whole windows, as in most images
        patch, pair = _fitted(
            lambda n: SeqStats.from_lengths([], image_grid_thw=[[1, edge, n // edge]], vision_windows=edges),
            edge * edge,
            2 * edge * edge,
            model,
        )
        return cls(linear=linear, quadratic=quadratic, patch=patch, patch_pair=pair)

    def __call__(self, lengths: npt.ArrayLike, media: npt.ArrayLike | None = None) -> FloatArray:
        """Return the work of each sequence, float64 ``[S]``: 2 s + s**2 of ``[3]`` is ``[15.0]``.

        Args:
            lengths: tokens of each sequence, ``[S]``.
            media: image patches of each sequence: ints ``[S]`` if each has one frame, else ``[S, 2]`` with
                the sum over frames of squared patch counts; None for text.
        """
        given = np.asarray(lengths)
        if given.size and (given.dtype.kind not in "iuf" or not np.isfinite(given).all()):
            raise ValueError(f"lengths holds {given.dtype} values, wanted finite numbers of tokens.")
        tokens = given.astype(np.float64)
        work: FloatArray = tokens * (self.linear + self.quadratic * tokens)
        if media is None:
            return work
        patches, squares = media_table(media, given.size).T
        work += self.patch * patches + self.patch_pair * squares
        return work


def _fitted(stats: Callable[[int], SeqStats], one: int, other: int, model: FlopsModel) -> tuple[float, float]:
    """Fit linear and quadratic work to the FLOPs at ``one`` and ``other = 2 * one`` tokens or patches."""
    short, long = (float(model.training_flops(stats(n)).hardware) for n in (one, other))
    quadratic = max(0.0, (long - 2 * short) / (2 * one**2))
    return long / other - quadratic * other, quadratic


def media_table(patches: npt.ArrayLike, sequences: int) -> IntArray:
    """Check patches, ``[S]`` (one frame each) or ``[S, 2]`` (with squares); return int64 ``[S, 2]``."""
    values = host_ints(patches, "patches", least=0, ndim=None, advice="Pass 0 for text.")
    if values.shape not in ((sequences,), (sequences, 2)):
        raise ValueError(
            f"patches has the shape {values.shape} for {sequences} sequences; wanted one number each, or two."
        )
    return values if values.ndim == 2 else np.stack([values, values * values], axis=1)
