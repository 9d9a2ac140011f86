"""Device name and dtype -> the FLOP/s of dense matmuls: what its vendor promises, or a measurement."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_thd._checks import real_number
from lightning_thd.flops.peak_table import PEAKS, Peak

# The column of the table for each dtype that callers may name.
_COLUMNS: dict[torch.dtype | str, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    **{name: name for name in ("bf16", "fp16", "tf32", "fp32", "fp8", "fp4")},
}
# Words of a device name that say nothing about its peak. Every other word must be in the row.
_NEUTRAL = re.compile(
    r"nvidia|amd|intel|instinct|tesla|geforce|quadro|graphics|gpu|tensor|core|accelerator|generation|google|habana"
    r"|\d+gb?|hbm\d\w*|pcie|sxm\d?|oam|ac|hl\d+\w*|3e|vf|od|ts|blackwell"
)


def peak_flops(device_name: str, dtype: torch.dtype | str) -> float | None:
    """Return the dense peak of a device, or None.

    Args:
        device_name: as ``torch.cuda.get_device_name`` gives it, in any case.
        dtype: of the matmuls; a torch dtype, its name, or "bf16", "fp16", "tf32", "fp32", "fp8", "fp4".

    Returns:
        FLOP/s; None for a device or a dtype that the table does not have, and for a slice of a device.
        ``("NVIDIA H100 80GB HBM3", torch.bfloat16)`` gives 989.4e12.
    """
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)  # "bfloat16"
    if dtype not in _COLUMNS:
        if isinstance(dtype, torch.dtype):
            return None
        raise ValueError(f"dtype={dtype!r} is not a torch dtype or one of bf16, fp16, tf32, fp32, fp8, fp4.")
    row = find_peak(device_name)
    tflops = getattr(row, _COLUMNS[dtype]) if row else None
    return None if tflops is None else float(tflops) * 1e12


def find_peak(device_name: str) -> Peak | None:
    """Return a device's row of the table; all words that tell devices apart must match."""
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    wanted = {word for word in words if not _NEUTRAL.fullmatch(word)}
    sizes = {int(word.rstrip("gb")) for word in words if re.fullmatch(r"\d+gb?", word)}
    matches = [
        row
        for row in PEAKS
        if wanted <= set(row.name.split()) <= set(words) and (not row.memory or sizes <= set(row.memory))
    ]
    return max(matches, key=lambda row: len(row.name.split()), default=None)


def device_name(device: torch.device | str) -> str:
    """Return an accelerator's name in the form of the table of peaks."""
    device = torch.device(device)
    library: Any = getattr(torch, device.type, None)
    if device.type == "cpu" or not hasattr(library, "get_device_name"):
        return device.type
    return str(library.get_device_name(device))


# Rows, inner size, columns. The best of three counts, since no shape is best on every device.
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
    """
    real_number(seconds, "seconds", above=0, advice="Give each shape about 0.1.")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype}: peaks are of floating products. Pass torch.bfloat16 or the like.")
    device = torch.device(device)
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
        best = max(best, work * batch / max(now - before, 1e-9))  # other processes delay some rounds, not all
        before = now
        if device.type != "cpu":
            batch = min(2 * batch, 16)  # else the wait would be measured
    return best
