"""A device and a dtype -> the FLOP/s its matmuls reach, timed here and now."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lightning_thd._checks import instance, real_number

_LONGEST_S = 60
# rows, inner, columns; the best of three, since no one shape is best on every device
_GPU_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 4096, 16384))
_CPU_SHAPES = ((512, 512, 512), (1024, 1024, 1024), (2048, 1024, 1024))


def measure_flops(
    device: torch.device | str,
    *,
    dtype: torch.dtype,
    seconds: float = 0.1,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Time matmuls and return the FLOP/s of the fastest, as a peak to hold a training step against.

    Args:
        device: where to measure.
        dtype: of both factors.
        seconds: spent on each of three shapes.
        clock: returns seconds.

    Returns:
        FLOP/s.

    Raises:
        ValueError: when ``seconds`` is not positive, or more than 60.
    """
    if real_number(seconds, "seconds", advice="Give each shape about 0.1.") <= 0:
        raise ValueError(f"seconds={seconds} leaves no time to measure in. Give each shape about 0.1.")
    if seconds > _LONGEST_S:
        raise ValueError(f"seconds={seconds}: wanted at most {_LONGEST_S} a shape. Give each about 0.1.")
    instance(dtype, "dtype", torch.dtype, advice="Pass torch.bfloat16 or the like.")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype}: peaks are of floating products. Pass torch.bfloat16 or the like.")
    instance(device, "device", torch.device, str, advice="Pass 'cuda' or 'cpu'.")
    try:
        device = torch.device(device)
    except RuntimeError as err:
        raise ValueError(f"device={device!r} is none that torch knows. Pass 'cuda' or 'cpu'.") from err
    shapes = _CPU_SHAPES if device.type == "cpu" else _GPU_SHAPES
    return max(_rate(device, dtype, shape, seconds, clock) for shape in shapes)


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has finished its queued work; does nothing on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@torch.no_grad()
def _rate(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    seconds: float,
    clock: Callable[[], float],
) -> float:
    rows, inner, columns = shape
    left = torch.ones(rows, inner, device=device, dtype=dtype)
    right = torch.ones(inner, columns, device=device, dtype=dtype)
    out = left @ right  # loads the kernel
    synchronize(device)
    work, best, batch = 2 * rows * inner * columns, 0.0, 1
    start = before = clock()
    while before - start < seconds:
        for _ in range(batch):
            torch.mm(left, right, out=out)
        synchronize(device)
        now = clock()
        best = max(best, work * batch / max(now - before, 1e-9))  # what else runs here delays some, not all
        before = now
        if device.type != "cpu":
            batch = min(2 * batch, 16)  # so that the wait is not what is measured
    return best
