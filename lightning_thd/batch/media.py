"""A sample's images and videos, as model inputs -> their numbers of patches, from grids or pixel sizes.

A grid is the number of frames, rows and columns of patches, as Qwen-VL's processors return it. Other
processors return ``[images, channels, height, width]`` pixels. Their patch size is in the model's config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_thd._checks import host_ints
from lightning_thd.stats import Vision

IntArray = NDArray[np.int64]
GRIDS = ("image_grid_thw", "video_grid_thw")
PIXELS = ("pixel_values", "pixel_values_videos")
# Columns of the table of sizes: the number of patches, the sum over frames of squared patch counts, and
# the same two in pixels. The last two are for samples without a grid.
COLUMNS = 4
_MOST_SQUARES = 2**62  # sums of squared patch counts are int64

# A sample -> the number of its image patches, or the grids of its images: frames, rows and columns, [N, 3].
ExtrasCost = Callable[[Any], Any]


def of_grids(grids: IntArray, name: str) -> tuple[int, int]:
    """Return the number of patches in grids ``[N, 3]``, and the sum over frames of squared patch counts."""
    frames, rows, columns = grids.astype(np.float64).T
    if (squares := float((frames * (rows * columns) ** 2).sum())) > _MOST_SQUARES:
        raise ValueError(
            f"{name} gives images whose squared patch counts add up to {squares:.1e}, more than 2**62. Give "
            "patches, not pixels or bytes: an image of 1,000 by 1,000 pixels has about 4,000."
        )
    areas = grids[:, 1] * grids[:, 2]
    return int((grids[:, 0] * areas).sum()), int((grids[:, 0] * areas * areas).sum())


def sizes_of(sample: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return a sample's row of the table of sizes; zeros for text."""
    found = [name for name in GRIDS if sample.get(name) is not None]
    if grids := [_grid(sample[name], name) for name in found]:
        return (*of_grids(np.concatenate(grids), " and ".join(found)), 0, 0)
    pixels = squares = 0
    for name in PIXELS:
        shape = _shape(sample.get(name))
        if len(shape) >= 4:  # with fewer axes, the rows are flattened patches, not images
            area, count = shape[-1] * shape[-2], int(np.prod(shape[:-3]))
            pixels, squares = pixels + count * area, squares + count * area * area
    return 0, 0, pixels, squares


def declared(cost: ExtrasCost, sample: Any, name: str) -> tuple[int, int, int, int]:
    """Return a sample's sizes from a user's function, which returns grids or a number of patches."""
    given = f"{name}: extras_cost(sample)"
    found = host_ints(
        np.asarray(cost(sample)),
        given,
        ndim=None,
        least=0,
        advice="Return a number of patches (0 for text), or frames, rows and columns of images [N, 3].",
    )
    grids = np.array([[1, 1, int(found)]]) if found.ndim == 0 else _grid(found, given)
    return (*of_grids(grids, given), 0, 0)


def patch_table(sizes: IntArray, patch: int | None) -> IntArray:
    """Return patches and sums of squares ``[N, 2]`` of a table of sizes; a patch has ``patch**2`` pixels."""
    table: IntArray = sizes[:, :2].copy()
    if patch is not None:
        table += sizes[:, 2:] // np.array([patch**2, patch**4])
    return table


def counted(extras: Mapping[str, Any], vision: Vision | None) -> dict[str, Any]:
    """Return the arguments of ``SeqStats.from_lengths`` for a batch's images: grids and windows."""
    grids = {name: extras[name] for name in GRIDS if name in extras}
    patch = None if vision is None else vision.patch
    if not grids and patch is not None:
        shapes = [shape for name in PIXELS if len(shape := _shape(extras.get(name))) >= 4]
        rows = [(int(np.prod(s[:-3])), s[-2] // patch, s[-1] // patch) for s in shapes if s[0]]
        grids = {GRIDS[0]: rows} if rows else {}
    return {**grids, "vision_windows": () if vision is None else vision.windows}


def _shape(value: Any) -> tuple[int, ...]:
    if isinstance(value, list | tuple):
        value = np.asarray(value)
    return tuple(value.shape) if isinstance(value, np.ndarray | Tensor) else ()


def _grid(value: Any, name: str) -> IntArray:
    grid = host_ints(value, name, ndim=None, least=0)
    if grid.size % 3 or (grid.ndim > 1 and grid.shape[-1] != 3):
        raise ValueError(
            f"{name} has the shape {grid.shape}; wanted [N, 3]: frames, rows and columns of patches."
        )
    return grid.reshape(-1, 3)
