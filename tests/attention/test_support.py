from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_thd.attention import SUPPORT, support, support_table, varlen_attention
from lightning_thd.attention.spec import make_spec
from lightning_thd.attention.support import Request, choose, why_not
from tests.attention import standins

CPU = Request(device="cpu", dtype=torch.float32, head_size=64, value_size=64, spec=make_spec(64))
CUDA = replace(CPU, device="cuda", dtype=torch.bfloat16, capability=9)
CAPPED = {"spec": make_spec(64, softcap=30.0)}
AHEAD = make_spec(64, causal=False, window=(3, 2))
LARGE = {"head_size": 256, "value_size": 256}
LATENT = {"head_size": 192, "value_size": 128}


def test_auto_takes_the_cpu_kernel_for_everything_on_the_cpu() -> None:
    hard = {"dtype": torch.float64, "head_size": 7, "spec": make_spec(7, softcap=1.0), "sinks": True}
    assert choose("auto", CPU) == choose("auto", replace(CPU, **hard, needs_lse=True)) == "cpu"


@pytest.mark.parametrize(
    ("installed", "backend", "change", "kernel"),
    [
        ("", "auto", {}, "torch"),
        # torch's kernels are flash-attn 2: on Hopper and Blackwell what is newer comes first.
        ("flash2 flash3 flash4 te", "auto", {"capability": 8}, "torch"),
        ("flash2 flash3 flash4 te", "auto", {"sinks": True}, "flash3"),
        ("flash2 flash3 flash4 te", "auto", {"capability": 10}, "flash4"),
        ("flash2 flash3 flash4 te", "auto", {"capability": 12}, "torch"),
        ("flash2 flash3 flash4 te", "flash", {"capability": 8}, "flash2"),
        ("flash2 flash3 flash4 te", "auto", CAPPED, "flash3"),
        ("flash2 flash3 flash4 te", "auto", {**CAPPED, "capability": 12}, "flash2"),
        ("flash2 flash3 flash4 te", "te", {}, "te"),
        ("flash2 flash3 flash4 te", "torch", {}, "torch"),
        # A deterministic backward of large heads goes to a kernel that has it.
        ("flash3", "auto", LARGE, "flash3"),
        ("flash3", "auto", {**LARGE, "deterministic": True}, "torch"),
        ("flash3", "auto", {**LATENT, "deterministic": True}, "flash3"),
        # Gemma 2's capped scores: flash-attn 4's own kernel for heads of 256 has no cap in its backward.
        ("flash2 flash4", "auto", {**LARGE, "capability": 10}, "flash4"),
        ("flash2 flash4", "auto", {**CAPPED, **LARGE}, "flash4"),
        ("flash2 flash4", "auto", {**CAPPED, **LATENT, "capability": 10}, "flash4"),
        ("flash2 flash4", "auto", {**CAPPED, **LARGE, "capability": 10}, "flash2"),
        (
            "flash2 flash4",
            "flash",
            {**CAPPED, "head_size": 160, "value_size": 160, "capability": 11},
            "flash2",
        ),
        # What no flash kernel takes still runs.
        ("", "auto", {"dtype": torch.float32}, "efficient"),
        ("", "auto", {"dtype": torch.float16, "capability": 7}, "efficient"),
        ("", "auto", {"capability": 7}, "portable"),  # bf16 before capability 8
        ("", "auto", {"dtype": torch.float64}, "portable"),
        ("", "auto", CAPPED, "portable"),
        (
            "",
            "auto",
            {"dtype": torch.float32, "spec": make_spec(64, causal=False, window=(3, 2))},
            "portable",
        ),
        ("", "auto", {"device": "mps", "capability": None}, "portable"),
    ],
)
def test_choices(
    on_cuda: pytest.MonkeyPatch, installed: str, backend: support.Backend, change: dict, kernel: str
) -> None:
    said: list[str] = []
    on_cuda.setattr(support, "rank_zero_info", said.append)
    support._notice_once.cache_clear()
    standins.install(on_cuda, *installed.split())
    assert [choose(backend, replace(CUDA, **change)) for _ in range(2)] == [kernel, kernel]

    unverified = [line for line in said if "tested against a mock only" in line]
    wanted = not SUPPORT[kernel].verified
    assert [f"flash-attn {kernel[-1]}" in line for line in unverified] == [True] * wanted  # once

    slow = [line for line in said if line not in unverified]
    assert [f"backend='{kernel}'" in line for line in slow] == [True] * SUPPORT[kernel].slow  # once
    request = replace(CUDA, **change)
    faster = request.device == "cuda" and request.dtype == torch.float32
    assert ["precision=" in line for line in slow] == [faster] * SUPPORT[kernel].slow


def test_a_backend_that_is_not_installed_is_named(on_cuda: pytest.MonkeyPatch) -> None:
    standins.install(on_cuda, "flash2")
    with pytest.raises(ValueError, match="backend='te' cannot run this call: Request") as error:
        choose("te", CUDA)
    for text in (
        "backend='te': would run it, but transformer_engine.pytorch does not import here: pip install",
        "backend='torch': runs it",
        "backend='flash' (flash2): runs it",
        "backend='flash' (flash3): would run it, but flash_attn_interface does not import here: build",
        "backend='cpu': runs on cpu tensors, these are on cuda; move them .to('cpu')",
    ):
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("kernel", "change", "reason"),
    [
        ("torch", {"dtype": torch.float32}, r"takes float16 or bfloat16 .*, not float32"),
        ("torch", {"head_size": 257}, r"does not take head sizes \(257, 64\); takes up to 256"),
        ("torch", CAPPED, "has no softcap"),
        ("flash4", {**CAPPED, **LARGE, "capability": 10}, r"has no softcap for heads of \(256, 256\)"),
        ("te", {"sinks": True}, "has no sinks"),
        ("te", {"needs_lse": True}, "returns no log-sum-exp"),
        ("te", {"head_size": 60}, r"does not take head sizes \(60, 64\); takes multiples of 8 up to 256"),
        ("flash3", {"capability": 8}, "needs compute capability 9, this GPU has 8"),
        ("flash3", {**LARGE, "deterministic": True}, "no deterministic backward for head sizes over 192"),
        ("torch", {"device": "cpu"}, "runs on cuda tensors, these are on cpu"),
    ],
)
def test_reasons(kernel: support.Kernel, change: dict, reason: str) -> None:
    assert re.search(reason, why_not(kernel, replace(CUDA, **change)) or "")


def test_backends_that_cannot_be_asked_for() -> None:
    x = torch.zeros(3, 1, 8)
    cu = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"backend='fast' is not known; choose one of auto, cpu, torch"):
        varlen_attention(x, x, x, cu, cu, 3, 3, backend="fast")
    several: Any = ["cpu", "torch"]
    with pytest.raises(ValueError, match=r"backend=\['cpu', 'torch'\] is not known; choose one of auto"):
        varlen_attention(x, x, x, cu, cu, 3, 3, backend=several)
    with pytest.raises(ValueError, match=r"(?s)backend='flash' cannot run this call.*backend='cpu': runs it"):
        varlen_attention(x, x, x, cu, cu, 3, 3, backend="flash")


def test_the_table_has_a_row_a_kernel_and_says_what_the_rows_say() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in support_table().splitlines()]
    for (kernel, truth), row in zip(SUPPORT.items(), rows[2:], strict=True):
        cells = dict(zip(rows[0], row, strict=True))
        assert (cells["kernel"], cells["backend"]) == (kernel, truth.backend)
        assert (cells["softcap"] == "yes") == truth.softcap
    assert rows[2][-1] == "yes"
