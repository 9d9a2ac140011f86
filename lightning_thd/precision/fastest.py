"""A device -> the precision in which it multiplies fastest."""

from __future__ import annotations

from typing import Literal

import torch

from lightning_thd.batch.thd_batch import checked_device

# Volta is the first with tensor cores for fp16, Ampere the first with those for bf16 (NVIDIA's white papers).
_FP16_CORES = (7, 0)


def fastest_precision(
    device: torch.device | str | None = None,
) -> Literal["bf16-mixed", "16-mixed", "32-true"]:
    """Return the ``precision`` for a Trainer or Fabric in which a device, or its name, multiplies fastest.

    By default the device is the GPU if torch finds one, else the CPU.

    Returns:
        ``"bf16-mixed"`` if a GPU multiplies bf16 itself, ``"16-mixed"`` on other GPUs with tensor cores, else
        ``"32-true"``. An H100 gives ``"bf16-mixed"``, a T4 ``"16-mixed"``.
    """
    at = checked_device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    if at.type != "cuda" or not torch.cuda.is_available():
        return "32-true"
    with torch.cuda.device(at):
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16-mixed"
        return "16-mixed" if torch.cuda.get_device_capability() >= _FP16_CORES else "32-true"
