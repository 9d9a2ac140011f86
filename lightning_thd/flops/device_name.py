"""A torch device -> the name of the accelerator, as its own library tells it."""

from __future__ import annotations

import os
import platform
import subprocess
from typing import Any

import torch


def device_name(device: torch.device | str) -> str:
    """Return an accelerator's name in the form of the table of peaks.

    Args:
        device: of any type: cuda (ROCm too), xpu, hpu, mps, xla (TPU, Trainium), cpu.

    Returns:
        ``"NVIDIA H100 80GB HBM3"``, ``"Apple M2 Max"``, ``"TPU v5p"``; the device type where it has none.
    """
    device = torch.device(device)
    if device.type == "mps":
        return _apple()
    if device.type == "xla":
        return _xla(dict(os.environ))
    library: Any = getattr(torch, device.type, None)
    if device.type == "cpu" or not hasattr(library, "get_device_name"):
        return device.type
    return str(library.get_device_name(device))


def _apple() -> str:
    try:
        brand = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or "mps"
    return brand.stdout.strip() or "mps"


def _xla(environment: dict[str, str]) -> str:
    """Return the chip's name from environment variables of TPU and Neuron machines."""
    kind = environment.get("TPU_ACCELERATOR_TYPE", "").lower()
    if kind:  # "v5litepod-16", "v5p-8", "v6e-4"
        chip = kind.partition("-")[0]
        chip = {"v5litepod": "v5e", "v5lite": "v5e"}.get(chip, chip)
        return f"TPU {chip}" if chip.startswith("v") else chip
    target = environment.get("NEURON_PLATFORM_TARGET_OVERRIDE", "").lower()  # "trn1", "trn2"
    names = {"trn1": "Trainium1 NeuronCore", "trn2": "Trainium2 NeuronCore"}
    return names.get(target, "xla")
