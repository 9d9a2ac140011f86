"""Device name and dtype -> the FLOP/s its vendor promises for dense matmuls, or None."""

from __future__ import annotations

import re

import torch

from lightning_thd._checks import instance
from lightning_thd.flops.peak_table import PEAKS, Peak

# what callers may say -> column of the table
_COLUMNS: dict[torch.dtype | str, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    **{name: name for name in ("bf16", "fp16", "tf32", "fp32", "fp8", "fp4")},
}
# words of a device name that do not tell one peak from another; any other word has to stand in the row
_NEUTRAL = re.compile(
    r"nvidia|amd|intel|instinct|tesla|geforce|quadro|graphics|gpu|tensor|core|accelerator|generation|google|habana"
    r"|\d+gb?|hbm\d\w*|pcie|sxm\d?|oam|ac|hl\d+\w*|3e|vf|od|ts|blackwell"
)


def peak_flops(device_name: str, dtype: torch.dtype | str) -> float | None:
    """Return the dense peak of a device, or None.

    Args:
        device_name: as ``torch.cuda.get_device_name`` gives it, in any case.
        dtype: of the matmuls; a torch dtype or "bf16", "fp16", "tf32", "fp32", "fp8", "fp4".

    Returns:
        FLOP/s; None for a device or a dtype that the table does not have, and for a slice of a device.
        ``("NVIDIA H100 80GB HBM3", torch.bfloat16)`` gives 989.4e12.

    Raises:
        ValueError: for a dtype that no row could have.
    """
    instance(device_name, "device_name", str, advice="Pass torch.cuda.get_device_name().")
    instance(dtype, "dtype", str, torch.dtype, advice="Pass torch.bfloat16, or 'fp8'.")
    if dtype not in _COLUMNS:
        if isinstance(dtype, torch.dtype):
            return None
        raise ValueError(f"dtype={dtype!r} is not a torch dtype or one of bf16, fp16, tf32, fp32, fp8, fp4.")
    row = find_peak(device_name)
    tflops = getattr(row, _COLUMNS[dtype]) if row else None
    return None if tflops is None else float(tflops) * 1e12


def find_peak(device_name: str) -> Peak | None:
    """Return a device's row of the table; all words that tell devices apart must match.

    Returns:
        The row whose words are all in the name, while no other word of the name means another device: "RTX
        3070 Ti", "RTX 4090 D", a laptop's or a MIG slice of a device, and an A100 of 64 GB, which has more
        units than others, find no sibling's row. None otherwise.
    """
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    telling = {word for word in words if not _NEUTRAL.fullmatch(word)}
    sizes = {int(word.rstrip("gb")) for word in words if re.fullmatch(r"\d+gb?", word)}
    matches = [
        row
        for row in PEAKS
        if telling <= set(row.name.split()) <= set(words) and (not row.memory or sizes <= set(row.memory))
    ]
    return max(matches, key=lambda row: len(row.name.split()), default=None)
