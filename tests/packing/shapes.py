"""The two distributions of lengths that the packing tests and benchmarks share."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SHAPES = {"long": (4096, 1.1, 1024, 8192), "chat": (600, 1.0, 16, 4096)}  # mean, sigma, shortest, longest


def draw(name: str, count: int, *, seed: int = 0) -> npt.NDArray[np.int64]:
    """Lognormal lengths, clipped to their bounds as in the Megatron mock data set."""
    mean, sigma, low, high = SHAPES[name]
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count), low, high).astype(np.int64)
