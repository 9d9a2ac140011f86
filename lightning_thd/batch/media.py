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
    frames, rows, columns = grids.astype(np.float64).T  # floats, because int64 would wrap
    squares = float((frames * (rows * columns) ** 2).sum())
    if squares > _MOST_SQUARES:
        raise ValueError(
            f"{name} gives images whose squared patch counts add up to {squares:.1e}, more than 2**62. Give "
            "patches, not pixels or bytes: an image of 1,000 by 1,000 pixels has about 4,000."
        )

    areas = grids[:, 1] * grids[:, 2]
    patches = (grids[:, 0] * areas).sum()
    squared_patches = (grids[:, 0] * areas * areas).sum()
    return int(patches), int(squared_patches)


def sizes_of(sample: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return a sample's row of the table of sizes; zeros for text."""
    names = [name for name in GRIDS if sample.get(name) is not None]
    if names:
        grids = [_grid(sample[name], name) for name in names]
        return (*of_grids(np.concatenate(grids), " and ".join(names)), 0, 0)

    pixels = 0
    squares = 0
    for shape in _image_shapes(sample):
        images = int(np.prod(shape[:-3]))
        area = shape[-1] * shape[-2]
        pixels += images * area
        squares += images * area * area
    return 0, 0, pixels, squares


def declared(cost: ExtrasCost, sample: Any, name: str) -> tuple[int, int, int, int]:
    """Return a sample's sizes from a user's function, which returns grids or a number of patches."""
    source = f"{name}: extras_cost(sample)"
    result = host_ints(
        np.asarray(cost(sample)),
        source,
        ndim=None,
        least=0,
        advice="Return a number of patches (0 for text), or frames, rows and columns of images [N, 3].",
    )
    if result.ndim == 0:
        grids = np.array([[1, 1, int(result)]])  # a number of patches counts as one image of one row
    else:
        grids = _grid(result, source)
    return (*of_grids(grids, source), 0, 0)


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
        # The images of a tensor have one size, so they count like the frames of one grid.
        of_pixels = [
            (int(np.prod(shape[:-3])), shape[-2] // patch, shape[-1] // patch)
            for shape in _image_shapes(extras)
            if shape[0]
        ]
        if of_pixels:
            grids[GRIDS[0]] = of_pixels
    return {**grids, "vision_windows": () if vision is None else vision.windows}


def _image_shapes(inputs: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Return the shapes of pixel inputs that are images; with fewer than 4 axes, rows are flat patches."""
    shapes = [_shape(inputs.get(name)) for name in PIXELS]
    return [shape for shape in shapes if len(shape) >= 4]


def _shape(value: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, array or nested list; () for anything else."""
    if isinstance(value, list | tuple):
        value = np.asarray(value)
    if isinstance(value, np.ndarray | Tensor):
        return tuple(value.shape)
    return ()


def _grid(value: Any, name: str) -> IntArray:
    """Return grids as ``[N, 3]``, or raise."""
    grid = host_ints(value, name, ndim=None, least=0)
    if grid.size % 3 or (grid.ndim > 1 and grid.shape[-1] != 3):
        raise ValueError(
            f"{name} has the shape {grid.shape}; wanted [N, 3]: frames, rows and columns of patches."
        )
    return grid.reshape(-1, 3)
