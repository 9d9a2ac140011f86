from __future__ import annotations

import pytest
import torch

from lightning_thd.flops import peak_flops
from lightning_thd.flops.peaks import PEAKS, find_peak

# names as torch.cuda.get_device_name gives them -> dense bf16 TFLOP/s
NAMES = {
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA GH200 144G HBM3e": 989.4,
    "NVIDIA H800": 989.4,
    "NVIDIA H20": 148,
    "NVIDIA H20-3e": 148,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA B300 SXM6 AC": 2250,
    "NVIDIA GB300": 2500,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A800-SXM4-80GB": 312,
    "NVIDIA A40": 149.7,
    "NVIDIA A10": 125,
    "NVIDIA A10G": 70,
    "NVIDIA L4": 121,
    "NVIDIA L40": 181,
    "NVIDIA L40S": 362,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "NVIDIA GeForce RTX 5090": 209.5,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 4080 SUPER": 104.4,
    "AMD Instinct MI300X": 1307,
    "AMD Instinct MI325X": 1307,
    "AMD Instinct MI350X": 2300,
    "AMD Instinct MI355X": 2500,
}


@pytest.mark.parametrize("name", NAMES)
def test_device_names_find_their_row(name: str) -> None:
    assert peak_flops(name, torch.bfloat16) == NAMES[name] * 1e12
    assert peak_flops(name.lower(), "bf16") == NAMES[name] * 1e12


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.float8_e4m3fn, 1979),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7),
        ("NVIDIA H100 80GB HBM3", torch.float32, 66.9),
        ("NVIDIA B200", "fp4", 9000),
        ("NVIDIA GB300", "fp4", 15000),
        ("Tesla V100-SXM2-16GB", torch.float16, 125),
        ("Tesla T4", torch.float16, 65),
    ],
)
def test_columns(name: str, dtype: torch.dtype | str, tflops: float) -> None:
    assert peak_flops(name, dtype) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("cpu", "bf16"),
        ("", "bf16"),
        ("NVIDIA Z9000", "bf16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"),  # a seventh of the device
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),  # another chip under the same number
        ("Tesla V100-SXM2-16GB", "bf16"),  # no such unit
        ("NVIDIA A100-SXM4-80GB", "fp8"),
        ("NVIDIA H100 80GB HBM3", torch.int8),
    ],
)
def test_what_is_not_known_is_none(name: str, dtype: torch.dtype | str) -> None:
    assert peak_flops(name, dtype) is None


def test_an_unknown_dtype_name_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype='half' is not a torch dtype or one of bf16"):
        peak_flops("NVIDIA H100", "half")


def test_every_row_has_a_source_and_its_figures_are_dense_and_ordered() -> None:
    assert len({row.name for row in PEAKS}) == len(PEAKS) >= 40
    for row in PEAKS:
        assert row.source
        assert find_peak(row.name) is row
        figures = [row.fp32, row.tf32, row.bf16 or row.fp16, row.fp8, row.fp4]
        known = [figure for figure in figures if figure is not None]
        assert known == sorted(known)
        if row.bf16 is not None and row.fp8 is not None:
            assert row.fp8 == pytest.approx(2 * row.bf16, rel=0.02)


def test_lightnings_own_table_has_no_h200_and_a_sparse_h100_nvl() -> None:
    from lightning.fabric.utilities.throughput import _CUDA_FLOPS

    assert not any(chip.startswith("b200") for chip in _CUDA_FLOPS)
    assert _CUDA_FLOPS["h100 nvl"][torch.bfloat16] > 2 * 835.5e12
    assert _CUDA_FLOPS["rtx 4090"][torch.bfloat16] == 82.6e12
