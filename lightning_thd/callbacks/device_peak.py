"""A precision and a module -> the dtype the matmuls run in, and the peak of the device in that dtype."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_thd.flops.peaks import device_name, measure_flops, peak_flops
from lightning_thd.flops.terms import FlopsBreakdown
from lightning_thd.precision.convert import recipe_of
from lightning_thd.precision.report import fp8_share

_BY_PRECISION = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}


def compute_dtype(precision: str, module: torch.nn.Module) -> torch.dtype | str:
    """Return the dtype of the training matmuls: torch's, "tf32", "fp8" or "fp4"."""
    if precision.startswith("fp8-") or "transformer-engine" in precision:
        return "fp4" if precision.endswith("nvfp4") else "fp8"
    dtype = _BY_PRECISION.get(precision.partition("-")[0])
    if dtype is None:
        sizes: Counter[torch.dtype] = Counter()
        for parameter in module.parameters():
            sizes[parameter.dtype] += parameter.numel()
        dtype = max(sizes, key=lambda kind: sizes[kind], default=torch.float32)
    if dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class LowPrecision:
    """The share of the linear FLOPs in FP8 or FP4, and the ratio of its peak to the bf16 peak."""

    share: float
    ratio: float

    def peak(self, peak: float, flops: FlopsBreakdown) -> float:
        """Return the peak of mixed precision: all FLOPs over the least time of both parts."""
        low = self.share * flops.linear
        return peak * flops.model / (low / self.ratio + flops.model - low) if flops.model else peak


def low_precision(module: torch.nn.Module, device: torch.device, peak: str | float) -> LowPrecision | None:
    """Return which share of a model's FLOPs runs in low precision; None if none does."""
    recipe = recipe_of(module)
    if recipe is None or recipe.emulate or not isinstance(peak, str):
        return None
    name = device_name(device)
    low, high = peak_flops(name, recipe.dtype), peak_flops(name, "bf16")
    return None if low is None or high is None else LowPrecision(share=fp8_share(module), ratio=low / high)


def resolve_peak(peak: str | float, device: torch.device, dtype: torch.dtype | str) -> float | None:
    """Return a device's dense FLOP/s: given, looked up or measured; None, with a warning, if unknown."""
    if not isinstance(peak, str):
        return float(peak)
    name = device_name(device)
    if peak == "measure":
        kind, measured_as = dtype, dtype
        if isinstance(kind, str):  # torch.mm multiplies no float8, and tf32 is a mode of float32
            kind = torch.bfloat16 if kind == "fp8" else torch.float32
            measured_as = f"{dtype}, timed as {kind}" if dtype == "fp8" else dtype
        found = measure_flops(device, dtype=kind)
        rank_zero_info(f"Measured a peak of {found / 1e12:.3f} TFLOP/s on {name!r} in {measured_as}.")
        return found
    # Devices before Ampere have no tf32 unit, even if torch is allowed to use one.
    old = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8
    looked_up = peak_flops(name, torch.float32 if dtype == "tf32" and old else dtype)
    if looked_up is None:
        rank_zero_warn(
            f"No peak FLOP/s is known for {name!r} in {dtype}, so device/mfu and device/hfu are not logged. "
            "Set THDThroughputMonitor(peak='measure') to time matmuls once, or peak=<dense FLOP/s>. "
            "See docs/reference/messages.md#peaks."
        )
    return looked_up
