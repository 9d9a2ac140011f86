"""A device name and a dtype -> the FLOP/s of dense matmuls: the vendor's figure, or a measurement.

Training uses neither 2:4 sparsity nor 16-bit accumulation. So sparse figures are halved here, and consumer
cards have figures for 32-bit accumulation. ``Peak.printed`` says whether the vendor's tensor figures were
dense or sparse. If torch sees the two dies of a package as two devices, a row is one die.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from lightning_thd._checks import real_number

# The column of the table for each dtype that callers may name.
_COLUMNS: dict[torch.dtype | str, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    **{name: name for name in ("bf16", "fp16", "tf32", "fp32", "fp8", "fp4")},
}
# Words of a device name to ignore when looking for its row; the row's name must contain all others.
_NEUTRAL = re.compile(
    r"nvidia|amd|intel|instinct|tesla|geforce|quadro|graphics|gpu|tensor|core|accelerator|generation|google|habana"
    r"|\d+gb?|hbm\d\w*|pcie|sxm\d?|oam|ac|hl\d+\w*|3e|vf|od|ts|blackwell"
)


def peak_flops(device_name: str, dtype: torch.dtype | str) -> float | None:
    """Return the dense peak of a device, or None.

    Args:
        device_name: the name from ``torch.cuda.get_device_name``, in upper or lower case.
        dtype: a torch dtype, its name, or "bf16", "fp16", "tf32", "fp32", "fp8", "fp4".

    Returns:
        FLOP/s; None for a device or a dtype that the table does not have, and for a MIG slice of a GPU.
        ``("NVIDIA H100 80GB HBM3", torch.bfloat16)`` gives 989.4e12.
    """
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)  # "bfloat16"
    if dtype not in _COLUMNS:
        if isinstance(dtype, torch.dtype):
            return None
        raise ValueError(f"dtype={dtype!r} is not a torch dtype or one of bf16, fp16, tf32, fp32, fp8, fp4.")
    row = find_peak(device_name)
    if row is None:
        return None
    tflops = getattr(row, _COLUMNS[dtype])
    return None if tflops is None else float(tflops) * 1e12


def find_peak(device_name: str) -> Peak | None:
    """Return the row of a device; all words of its name that distinguish devices must match."""
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    distinguishing = {word for word in words if not _NEUTRAL.fullmatch(word)}
    sizes = {int(word.rstrip("gb")) for word in words if re.fullmatch(r"\d+gb?", word)}  # memory in GB

    matches = []
    for row in PEAKS:
        names_match = distinguishing <= set(row.name.split()) <= set(words)
        memory_matches = not row.memory or sizes <= set(row.memory)
        if names_match and memory_matches:
            matches.append(row)
    return max(matches, key=lambda row: len(row.name.split()), default=None)


def device_name(device: torch.device | str) -> str:
    """Return a device's name as ``find_peak`` takes it; its type if it has no other name."""
    device = torch.device(device)
    library: Any = getattr(torch, device.type, None)
    if device.type == "cpu" or not hasattr(library, "get_device_name"):
        return device.type
    return str(library.get_device_name(device))


# (rows, inner size, columns). The fastest shape counts, because no shape is the fastest on every device.
_GPU_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 4096, 16384))
_CPU_SHAPES = ((512, 512, 512), (1024, 1024, 1024), (2048, 1024, 1024))


def measure_flops(
    device: torch.device | str,
    *,
    dtype: torch.dtype,
    seconds: float = 0.1,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Time matmuls and return the FLOP/s of the fastest, as a peak to compare a training step with.

    Args:
        device: the device to measure.
        dtype: the dtype of both matrices.
        seconds: the time for each of three shapes, at most an hour.
        clock: a function that returns seconds.
    """
    advice = "Give each shape about 0.1."
    if real_number(seconds, "seconds", above=0, advice=advice) > 3600:
        raise ValueError(f"seconds={seconds}; wanted at most 3600. {advice}")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype} is not a floating-point dtype. Pass one, such as torch.bfloat16.")
    try:
        device = torch.device(device)
        torch.ones((), device=device).item()
    except (RuntimeError, AssertionError) as err:  # torch raises either, by device and build
        raise ValueError(f"device={device} cannot be measured here ({err}). Pass another device.") from err
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
    """Return the FLOP/s of the fastest of some rounds of matmuls of one shape (rows, inner size, columns)."""
    rows, inner, columns = shape
    left = torch.ones(rows, inner, device=device, dtype=dtype)
    right = torch.ones(inner, columns, device=device, dtype=dtype)
    out = left @ right  # loads the kernel
    synchronize(device)

    flops = 2 * rows * inner * columns
    best = 0.0
    matmuls = 1  # in a round
    start = before = clock()
    while before - start < seconds:
        for _ in range(matmuls):
            torch.mm(left, right, out=out)
        synchronize(device)
        now = clock()
        rate = flops * matmuls / max(now - before, 1e-9)
        best = max(best, rate)  # other processes delay some rounds, not all
        before = now
        if device.type != "cpu":
            matmuls = min(2 * matmuls, 16)  # a short round would mostly measure the synchronization
    return best


Printed: TypeAlias = Literal["dense", "sparse"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """One row: dense TFLOP/s by dtype, None if the device lacks the unit or the vendor prints no figure."""

    name: str  # the words of the device name that distinguish it, in lower case
    bf16: float | None = None  # with 32-bit accumulation
    fp16: float | None = None  # with 32-bit accumulation
    tf32: float | None = None  # float32 through tensor cores
    fp32: float | None = None
    fp8: float | None = None
    fp4: float | None = None
    source: str  # where the figures are printed
    printed: Printed = "dense"  # whether the vendor's tensor figures are dense, or sparse and halved here
    # Memory sizes in GB of the row's boards; empty means any. Set if boards of this name with other sizes
    # have another chip. A device name without a size always matches.
    memory: tuple[int, ...] = ()


_H100 = "NVIDIA H100 Tensor Core GPU datasheet"
_GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper, FP32 accumulate"
_ADA = "NVIDIA Ada GPU architecture whitepaper, FP32 accumulate"
_RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper, FP32 accumulate"
_TURING = "NVIDIA Turing GPU architecture whitepaper, FP32 accumulate, reference boards"
_RTX_PRO = "NVIDIA RTX Blackwell PRO GPU architecture whitepaper, FP32 accumulate"
_GB10 = "NVIDIA DGX Spark datasheet: 1 PFLOP/s sparse FP4; other dtypes by the ratios of Blackwell"
_TPU = "Google Cloud TPU documentation, system architecture, per chip"
_NEURON = "AWS Neuron documentation, per NeuronCore: the chip's figure divided by its cores"
_GAUDI = "Intel Gaudi product brief"
_APPLE = "Apple press release, the full GPU of this name; no tensor units"
_V100 = "NVIDIA V100 datasheet"
_CDNA2 = "AMD Instinct MI200 series datasheet, one of two dies"
_CDNA3 = "AMD Instinct MI300 series datasheets"
_CDNA4 = "AMD Instinct MI350 series product pages, rounded as printed"


def _row(
    name: str,
    source: str,
    half: float,
    tf32: float | None,
    fp32: float | None,
    fp8: float | None = None,
    fp4: float | None = None,
    printed: Printed = "sparse",
    memory: tuple[int, ...] = (),
) -> Peak:
    """Return a row of a device with one figure for both half precisions."""
    figures = {"bf16": half, "fp16": half, "tf32": tf32, "fp32": fp32, "fp8": fp8, "fp4": fp4}
    return Peak(name=name, source=source, printed=printed, memory=memory, **figures)


PEAKS: tuple[Peak, ...] = (
    # the fp4 of B300 and GB300 is printed as dense, above half of the sparse figure
    _row("b200", "NVIDIA HGX B200 datasheet / 8 GPUs", 2250, 1125, 75, 4500, 9000),
    _row("gb200", "NVIDIA GB200 NVL72 page / 72 GPUs", 2500, 1250, 80, 5000, 10000),
    _row("b300", "NVIDIA HGX B300 datasheet / 8 GPUs", 2250, 1125, 75, 4500, 14000),
    _row("gb300", "NVIDIA GB300 NVL72 page / 72 GPUs", 2500, 1250, 80, 5000, 15000),
    _row("h100", _H100, 989.4, 494.7, 66.9, 1979, memory=(80, 96)),
    _row("h100 pcie", _H100, 756, 378, 51.2, 1513),
    _row("h100 hbm2e", _H100 + " (PCIe board under another name)", 756, 378, 51.2, 1513, memory=(80,)),
    _row("h100 nvl", _H100, 835.5, 417.5, 60, 1671),
    _row("h200", "NVIDIA H200 Tensor Core GPU datasheet", 989.4, 494.7, 66.9, 1979),
    _row("h200 nvl", "NVIDIA H200 Tensor Core GPU datasheet", 835.5, 417.5, 60, 1671),
    _row("gh200", "NVIDIA GH200 Grace Hopper Superchip datasheet", 989.4, 494.7, 66.9, 1979),
    _row("h800", "NVIDIA H800 datasheet: H100's arithmetic, slower links", 989.4, 494.7, 66.9, 1979),
    _row("h800 pcie", "NVIDIA H800 datasheet: H100's arithmetic, slower links", 756, 378, 51.2, 1513),
    _row("h20", "NVIDIA H20 datasheet", 148, 74, 44, 296),
    _row("a100", "NVIDIA A100 Tensor Core GPU datasheet", 312, 156, 19.5, memory=(40, 80)),
    _row("a800", "NVIDIA A800 datasheet: A100's arithmetic, slower links", 312, 156, 19.5),
    _row("a30", "NVIDIA A30 datasheet", 165, 82, 10.3),
    _row("a40", "NVIDIA A40 datasheet", 149.7, 74.8, 37.4),
    _row("a10", "NVIDIA A10 datasheet", 125, 62.5, 31.2),
    _row("a10g", "NVIDIA A10G datasheet", 70, 35, 35),
    _row("l4", "NVIDIA L4 datasheet", 121, 60, 30.3, 242.5),
    _row("l20", "NVIDIA L20 datasheet", 119.5, 59.8, 59.8, 239),
    _row("l40", "NVIDIA L40 datasheet", 181, 90.5, 90.5, 362),
    _row("l40s", "NVIDIA L40S datasheet", 362, 183, 91.6, 733),
    _row("rtx pro 6000 blackwell workstation edition", _RTX_PRO, 503.8, 251.9, 126, 1007.6, 2015.2),
    _row("rtx pro 6000 blackwell max q workstation edition", _RTX_PRO, 438.9, 219.4, 109.7, 877.9, 1755.7),
    _row("gb10", _GB10, 125, 62.5, 31, 250, 500),
    _row("rtx a6000", "NVIDIA RTX A6000 datasheet", 154.8, 77.4, 38.7),
    _row("rtx a5000", "NVIDIA RTX A5000 datasheet", 111.1, 55.6, 27.8),
    _row("rtx 6000 ada", "NVIDIA RTX 6000 Ada Generation datasheet", 364.2, 182.1, 91.1, 728.5),
    _row("rtx 5090", _RTX_BLACKWELL, 209.5, 104.8, 104.8, 419, 1676),
    _row("rtx 5070 ti", _RTX_BLACKWELL, 87.9, 43.9, 43.9, 175.8, 703),
    _row("rtx 5070", _RTX_BLACKWELL, 61.7, 30.9, 30.9, 123.5, 494),
    _row("rtx 5080", _RTX_BLACKWELL, 112.6, 56.3, 56.3, 225.1, 900.4),
    _row("rtx 4090", _ADA, 165.2, 82.6, 82.6, 330.3),
    _row("rtx 4080", _ADA, 97.5, 48.7, 48.7, 194.9),
    _row("rtx 4080 super", _ADA, 104.4, 52.2, 52.2, 208.8),
    _row("rtx 4070 ti super", _ADA, 88.2, 44.1, 44.1, 176.4),
    _row("rtx 4070 ti", _ADA, 80.2, 40.1, 40.1, 160.4),
    _row("rtx 4070 super", _ADA, 71, 35.5, 35.5, 142),
    _row("rtx 4070", _ADA, 58.3, 29.1, 29.1, 116.6),
    _row("rtx 4060 ti", _ADA, 44.1, 22.1, 22.1, 88.3),
    _row("rtx 4060", _ADA, 30.2, 15.1, 15.1, 60.5),
    _row("rtx 3090", _GA102, 71, 35.6, 35.6),
    _row("rtx 3090 ti", _GA102, 80, 40, 40),
    _row("rtx 3080", _GA102, 59.5, 29.8, 29.8, memory=(10,)),
    _row("rtx 3080 ti", _GA102, 68.2, 34.1, 34.1),
    _row("rtx 3070 ti", _GA102, 43.5, 21.7, 21.7),
    _row("rtx 3070", _GA102, 40.6, 20.3, 20.3),
    _row("rtx 3060 ti", _GA102, 32.4, 16.2, 16.2),
    _row("rtx 3060", _GA102, 25.5, 12.7, 12.7),
    # no bfloat16 before Ampere
    Peak(name="titan rtx", fp16=130.5, fp32=16.3, source=_TURING),
    Peak(name="rtx 2080 ti", fp16=53.8, fp32=13.4, source=_TURING),
    Peak(name="rtx 2080", fp16=40.3, fp32=10.1, source=_TURING),
    Peak(name="rtx 2080 super", fp16=44.6, fp32=11.2, source=_TURING),
    Peak(name="quadro rtx 5000", fp16=89.2, fp32=11.2, source="NVIDIA Quadro RTX 5000 datasheet"),
    Peak(name="t4", fp16=65, fp32=8.1, source="NVIDIA T4 datasheet"),
    Peak(name="v100 sxm2", fp16=125, fp32=15.7, source=_V100),
    Peak(name="v100 sxm3", fp16=125, fp32=15.7, source=_V100),
    Peak(name="v100 pcie", fp16=112, fp32=14, source=_V100),
    Peak(name="v100s pcie", fp16=130, fp32=16.4, source=_V100),
    _row("mi210", "AMD Instinct MI210 datasheet", 181, None, 45.3, printed="dense"),
    _row("mi250", _CDNA2, 181, None, 45.3, printed="dense"),
    _row("mi250x", _CDNA2, 191.5, None, 47.9, printed="dense"),
    _row("mi300a", _CDNA3, 980.6, 490.3, 122.6, 1961.2, printed="dense"),
    _row("mi300x", _CDNA3, 1307, 653.7, 163.4, 2615, printed="dense"),
    _row("mi325x", _CDNA3, 1307, 653.7, 163.4, 2615, printed="dense"),
    _row("mi350x", _CDNA4, 2300, None, None, 4600, 9200, printed="dense"),
    _row("mi355x", _CDNA4, 2500, None, None, 5000, 10000, printed="dense"),
    Peak(name="tpu v4", bf16=275, source=_TPU),
    Peak(name="tpu v5e", bf16=197, source=_TPU),
    Peak(name="tpu v5p", bf16=459, source=_TPU),
    Peak(name="tpu v6e", bf16=918, source=_TPU),
    Peak(name="tpu7x", bf16=2307, fp8=4614, source=_TPU),
    Peak(name="trainium1 neuroncore", bf16=95, fp16=95, source=_NEURON),
    Peak(name="trainium2 neuroncore", bf16=83.4, fp16=83.4, fp8=162.4, source=_NEURON),
    Peak(name="gaudi2", bf16=432, fp8=865, source=_GAUDI),
    Peak(name="gaudi3", bf16=1835, fp8=1835, source=_GAUDI),
    Peak(name="apple m1", fp32=2.6, source=_APPLE),
    Peak(name="apple m1 pro", fp32=5.2, source=_APPLE),
    Peak(name="apple m1 max", fp32=10.4, source=_APPLE),
    Peak(name="apple m1 ultra", fp32=21, source=_APPLE),
    Peak(name="apple m2", fp32=3.6, source=_APPLE),
    Peak(name="apple m2 pro", fp32=6.8, source=_APPLE),
    Peak(name="apple m2 max", fp32=13.6, source=_APPLE),
    Peak(name="apple m2 ultra", fp32=27.2, source=_APPLE),
)
