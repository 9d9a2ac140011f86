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
            value = getattr(self, name)
            real_number(value, f"Cost.{name}", least=0)
            object.__setattr__(self, name, float(value))  # so that 1 and 1.0 have one fingerprint
        if not self.linear + self.quadratic:
            raise ValueError(f"{self!r} costs nothing. Cost(linear=1, quadratic=0) balances tokens.")

    @classmethod
    def from_flops(cls, model: FlopsModel, *, longest: int = 8192) -> Cost:
        """Fit a cost to a model's FLOPs at ``longest`` tokens and at half; vision and recomputation count."""
        whole_number(longest, "longest", least=1, advice="It is the tokens of the longest sequence.")
        windows = model.windows
        edges = model.vision_windows

        def one_sequence(tokens: int) -> SeqStats:
            return SeqStats.from_lengths([tokens], windows=windows)

        linear, quadratic = _fit(model, one_sequence, max(1, longest // 2))
        if not model.sees_images:
            return cls(linear=linear, quadratic=quadratic)

        window = max(edges, default=1)
        edge = -(-_EDGE // window) * window  # whole windows, as in most images

        def one_image(patches: int) -> SeqStats:
            grid = [[1, edge, patches // edge]]
            return SeqStats.from_lengths([], image_grid_thw=grid, vision_windows=edges)

        patch, patch_pair = _fit(model, one_image, edge * edge)
        return cls(linear=linear, quadratic=quadratic, patch=patch, patch_pair=patch_pair)

    def __call__(self, lengths: npt.ArrayLike, media: npt.ArrayLike | None = None) -> FloatArray:
        """Return the work of each sequence, float64 ``[S]``: 2 s + s**2 of ``[3]`` is ``[15.0]``.

        Args:
            lengths: tokens of each sequence, ``[S]``.
            media: image patches of each sequence: ints ``[S]`` if each has one frame, else ``[S, 2]`` with
                the sum over frames of squared patch counts; None for text.
        """
        values = np.asarray(lengths)
        if values.size and (values.dtype.kind not in "iuf" or not np.isfinite(values).all()):
            raise ValueError(f"lengths holds {values.dtype} values, wanted finite numbers of tokens.")
        tokens = values.astype(np.float64)
        work: FloatArray = tokens * (self.linear + self.quadratic * tokens)
        if media is None:
            return work

        patches, squares = media_table(media, values.size).T
        work += self.patch * patches + self.patch_pair * squares
        return work


def _fit(model: FlopsModel, stats_of: Callable[[int], SeqStats], size: int) -> tuple[float, float]:
    """Fit linear and quadratic work to the FLOPs of ``size`` and twice as many tokens or patches."""
    double = 2 * size
    short = float(model.training_flops(stats_of(size)).hardware)
    long = float(model.training_flops(stats_of(double)).hardware)

    # Rounding, or work that grows more slowly than linearly, must not make pairs cheaper than nothing.
    quadratic = max(0.0, (long - 2 * short) / (2 * size**2))
    linear = long / double - quadratic * double
    return linear, quadratic


def media_table(patches: npt.ArrayLike, sequences: int) -> IntArray:
    """Check patches, ``[S]`` (one frame each) or ``[S, 2]`` (with squares); return int64 ``[S, 2]``."""
    values = host_ints(patches, "patches", least=0, ndim=None, advice="Pass 0 for text.")
    if values.shape not in ((sequences,), (sequences, 2)):
        raise ValueError(
            f"patches has the shape {values.shape} for {sequences} sequences; wanted one number each, or two."
        )
    if values.ndim == 2:
        return values
    return np.stack([values, values * values], axis=1)
