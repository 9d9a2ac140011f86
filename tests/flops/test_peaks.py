from __future__ import annotations

import itertools

import pytest
import torch

from lightning_thd.flops import measure_flops, peak_flops
from lightning_thd.flops.peaks import PEAKS, find_peak

# names as torch.cuda.get_device_name gives them -> dense bf16 TFLOP/s
NAMES = {
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H200": 989.4,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA H800": 989.4,
    "NVIDIA H20": 148,
    "NVIDIA B200": 2250,
    "NVIDIA B300 SXM6 AC": 2250,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A10G": 70,
    "NVIDIA L40S": 362,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "NVIDIA GeForce RTX 4090": 165.2,
    "AMD Instinct MI300X": 1307,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 503.8,
    "NVIDIA GeForce RTX 4070": 58.3,
    "AMD Instinct MI300X VF": 1307,
    "TPU v5p": 459,
    "GAUDI3": 1835,
    "Trainium2 NeuronCore": 83.4,
    # the same rows under other names of theirs
    "NVIDIA A100-PCIE-40GB": 312,
    "A100-SXM4-40GB": 312,
    "NVIDIA A800 80GB PCIe": 312,
    "NVIDIA H100 80GB HBM2e": 756,
    "NVIDIA H100 SXM5 96GB": 989.4,
    "NVIDIA B300": 2250,
    "NVIDIA GeForce RTX 3080": 59.5,
    "NVIDIA GeForce RTX 3080 10GB": 59.5,
    "NVIDIA GeForce RTX 4070 Ti": 80.2,
}

# names that drivers give to siblings, slices and boards without a row: no peak may be theirs
STRANGERS = """
NVIDIA A100-SXM-64GB, NVIDIA A100X, NVIDIA A30X, NVIDIA A10M, NVIDIA A16, NVIDIA A2, NVIDIA A40-48Q, NVIDIA
A10-24C, NVIDIA A100-SXM4-40GB MIG 3g.20gb, NVIDIA H100 80GB HBM3 MIG 1g.10gb, GRID A100D-20C, NVIDIA A800
40GB Active, NVIDIA H100 64GB HBM2, NVIDIA H100 64GB HBM2e, NVIDIA H20Z, NVIDIA H800 NVL, NVIDIA B100,
NVIDIA GB100, NVIDIA L2, NVIDIA L40G, NVIDIA L20Y, NVIDIA L400, NVIDIA T4G, NVIDIA CMP 170HX, NVIDIA
PG506-230, NVIDIA Graphics Device, NVIDIA RTX PRO 6000 Blackwell DC-4-24Q, NVIDIA RTX PRO 6000 Blackwell
Workstation Edition MIG 1g.24gb, NVIDIA RTX PRO 4500 Blackwell, NVIDIA RTX 5880 Ada Generation, NVIDIA RTX
4000 Ada Generation, Quadro RTX 6000, NVIDIA RTX A5500, NVIDIA RTX A4000, NVIDIA RTX A5000 Laptop GPU,
Quadro RTX 5000 with Max-Q Design, Quadro GV100, NVIDIA GeForce RTX 3080 12GB, NVIDIA GeForce RTX 3080
Laptop GPU, NVIDIA GeForce RTX 3080 Ti Laptop GPU, NVIDIA GeForce RTX 4070 Laptop GPU, NVIDIA GeForce RTX
5070 Ti Laptop GPU, NVIDIA GeForce RTX 4090 Mobile, NVIDIA GeForce RTX 2080 Super with Max-Q Design, NVIDIA
GeForce RTX 5060 Ti, NVIDIA GeForce RTX 3050, NVIDIA GeForce RTX 2070, NVIDIA GeForce GTX 1080 Ti, NVIDIA
TITAN V, Tesla V100-DGXS-32GB, Tesla V100-FHHL-16GB, Tesla V100-SXM3-32GB-H, Tesla V100-SXM2-32GB-LS, Tesla
P100-SXM2-16GB, Tesla P40, NVIDIA Jetson AGX Orin, NVIDIA Thor, AMD Instinct MI100, AMD Instinct MI250X /
MI250, AMD Instinct MI300X HF, AMD Radeon RX 7900 XTX, TPU v4i, GAUDI, Apple M3, NVIDIA A100-SXM4-40GB MIG
1g.5gb, NVIDIA GeForce RTX 4090 Laptop GPU, NVIDIA GeForce RTX 4090 D, NVIDIA GeForce RTX 5090 D v2, NVIDIA
GeForce RTX 4070 Ti Foo, NVIDIA RTX PRO 6000 Blackwell Server Edition, NVIDIA RTX PRO 5000 Blackwell, NVIDIA
GRID A100-10C, NVIDIA A100-SXM4-80GB vGPU, NVIDIA RTX 5000 Ada Generation, NVIDIA L4 Super, AMD Instinct
MI308X
"""


def test_no_stranger_gets_a_siblings_peak() -> None:
    names = [name.strip() for name in STRANGERS.replace("\n", " ").split(",")]
    assert len(names) >= 60
    assert {name: row.name for name in names if (row := find_peak(name)) is not None} == {}


def test_device_names_find_their_row() -> None:
    for name, tflops in NAMES.items():
        assert peak_flops(name, torch.bfloat16) == peak_flops(name.lower(), "bf16") == tflops * 1e12, name


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.float8_e4m3fn, 1979),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7),
        ("NVIDIA H100 80GB HBM3", "float32", 66.9),
        ("NVIDIA B200", "fp4", 9000),
        ("NVIDIA GB300", "fp4", 15000),
        ("Tesla V100-SXM2-16GB", torch.float16, 125),
        ("Apple M2 Max", torch.float32, 13.6),
        ("TPU7x", "fp8", 4614),
    ],
)
def test_columns(name: str, dtype: torch.dtype | str, tflops: float) -> None:
    assert peak_flops(name, dtype) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("cpu", "bf16"),
        ("Tesla V100-SXM2-16GB", "bf16"),  # no such unit
        ("NVIDIA A100-SXM4-80GB", "fp8"),
        ("NVIDIA H100 80GB HBM3", torch.int8),
        ("Apple M3 Max", "fp32"),
    ],
)
def test_what_is_not_known_is_none(name: str, dtype: torch.dtype | str) -> None:
    assert peak_flops(name, dtype) is None


def test_every_row_has_a_source_and_its_figures_are_dense_and_ordered() -> None:
    assert len({row.name for row in PEAKS}) == len(PEAKS) >= 40
    for row in PEAKS:
        assert row.source
        assert find_peak(row.name) is row
        figures = [row.fp32, row.tf32, row.bf16 or row.fp16, row.fp8, row.fp4]
        present = [figure for figure in figures if figure is not None]
        assert present == sorted(present)
        if row.bf16 is not None and row.fp8 is not None and row.name != "gaudi3":  # its units are one
            assert row.fp8 == pytest.approx(2 * row.bf16, rel=0.03)


def test_a_measured_peak_is_the_best_of_some_shapes_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_thd.flops.peaks._CPU_SHAPES", ((2, 3, 4), (8, 8, 8), (4, 4, 4)))
    ticks = itertools.count()
    rate = measure_flops("cpu", dtype=torch.float32, seconds=2, clock=lambda: float(next(ticks)))

    assert rate == 2 * 8 * 8 * 8
    monkeypatch.setattr("lightning_thd.flops.peaks._CPU_SHAPES", ((8, 8, 8),))
    seconds = itertools.accumulate([0.0, 10.0, 2.0, 5.0, 9.0])  # what delays some runs is left out
    rate = measure_flops("cpu", dtype=torch.float32, seconds=20, clock=lambda: next(seconds))

    assert rate == 2 * 8 * 8 * 8 / 2
    refused = {"device=": ("meta", "nodevice", "mps:7", 2**31), "at most 3600": ("cpu",)}
    for said, devices in refused.items():
        for device in devices:
            with pytest.raises(ValueError, match=said):
                measure_flops(device, dtype=torch.float32, seconds=2**31 if device == "cpu" else 0.1)

    monkeypatch.undo()
    assert 1e8 < measure_flops("cpu", dtype=torch.bfloat16, seconds=0.01) < 1e15
