from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from lightning_thd.attention import SUPPORT, support, support_table, varlen_attention
from lightning_thd.attention.spec import make_spec
from lightning_thd.attention.support import Request, choose, why_not
from tests.attention import standins

CPU = Request(device="cpu", dtype=torch.float32, head_size=64, value_size=64, spec=make_spec(64))
CUDA = replace(CPU, device="cuda", dtype=torch.bfloat16, capability=9)


def test_auto_takes_the_cpu_kernel_for_everything_on_the_cpu() -> None:
    assert choose("auto", CPU) == "cpu"
    hard = replace(
        CPU, dtype=torch.float64, head_size=7, spec=make_spec(7, softcap=1.0), sinks=True, needs_lse=True
    )
    assert choose("auto", hard) == "cpu"


def test_auto_takes_the_fastest_for_the_device(on_cuda: pytest.MonkeyPatch) -> None:
    """torch's kernels are flash-attn 2: on Hopper and Blackwell what is newer comes first."""
    assert choose("auto", CUDA) == "torch"  # nothing else is installed
    standins.install(on_cuda, "flash2", "flash3", "flash4", "te")
    for capability, kernel in ((8, "torch"), (9, "flash3"), (10, "flash4"), (11, "flash4"), (12, "torch")):
        assert choose("auto", replace(CUDA, capability=capability)) == kernel
        assert choose("auto", replace(CUDA, capability=capability, sinks=True)) == kernel
    assert choose("flash", CUDA) == "flash3"
    assert choose("flash", replace(CUDA, capability=10)) == "flash4"
    assert choose("flash", replace(CUDA, capability=8)) == "flash2"
    capped = replace(CUDA, spec=make_spec(64, softcap=30.0))
    assert choose("auto", capped) == "flash3"
    assert choose("auto", replace(capped, capability=12)) == "flash2"
    assert choose("te", CUDA) == "te"
    assert choose("torch", CUDA) == "torch"


def test_a_deterministic_backward_of_large_heads_goes_to_a_kernel_that_has_it(
    on_cuda: pytest.MonkeyPatch,
) -> None:
    standins.install(on_cuda, "flash3")
    large = replace(CUDA, head_size=256, value_size=256)
    assert choose("auto", large) == "flash3"
    assert choose("auto", replace(large, deterministic=True)) == "torch"
    assert choose("auto", replace(large, deterministic=True, head_size=192, value_size=128)) == "flash3"
    with pytest.raises(ValueError, match="no deterministic backward for head sizes over 192"):
        choose("flash", replace(large, deterministic=True))


def test_capped_scores_of_large_heads_on_blackwell_go_to_a_kernel_with_a_backward(
    on_cuda: pytest.MonkeyPatch,
) -> None:
    """Gemma 2's heads of 256: flash-attn 4 runs its own kernel for them there, whose backward has no cap."""
    standins.install(on_cuda, "flash2", "flash4")
    capped = replace(CUDA, head_size=256, value_size=256, spec=make_spec(256, softcap=50.0), capability=10)
    assert choose("auto", replace(capped, spec=make_spec(256))) == "flash4"
    assert choose("auto", replace(capped, capability=9)) == "flash4"  # where the general kernel runs
    assert choose("auto", replace(capped, head_size=192, value_size=128)) == "flash4"
    for sizes in ((256, 256), (160, 160), (192, 192)):  # those between are padded
        for capability in (10, 11):
            larger = replace(capped, head_size=sizes[0], value_size=sizes[1], capability=capability)
            assert choose("auto", larger) == choose("flash", larger) == "flash2"
    reason = why_not("flash4", capped) or ""
    assert re.search(r"has no softcap for heads of \(256, 256\) on this GPU", reason)


def test_a_backend_that_is_not_installed_is_skipped_or_named(on_cuda: pytest.MonkeyPatch) -> None:
    standins.install(on_cuda, "flash2")
    assert choose("flash", CUDA) == "flash2"
    with pytest.raises(
        ValueError, match=r"backend='te' cannot run this call: Request\(device='cuda', dtype=torch.bfloat16"
    ) as error:
        choose("te", CUDA)
    text = str(error.value)
    assert (
        "backend='te': would run it, but transformer_engine.pytorch does not import here: pip install" in text
    )
    assert "backend='torch': runs it" in text
    assert "backend='flash' (flash2): runs it" in text
    assert (
        "backend='flash' (flash3): would run it, but flash_attn_interface does not import here: build" in text
    )
    assert "backend='cpu': runs on cpu tensors, these are on cuda; move them with .to('cpu')" in text


@pytest.mark.parametrize(
    ("kernel", "change", "reason"),
    [
        (
            "torch",
            {"dtype": torch.float32},
            r"takes float16 or bfloat16 \(precision='bf16-mixed'\), not float32",
        ),
        ("torch", {"head_size": 257}, r"has head sizes up to 256.*, not \(257, 64\)"),
        ("torch", {"spec": make_spec(64, softcap=5.0)}, "has no softcap"),
        ("te", {"spec": make_spec(64, softcap=5.0)}, "has no softcap"),
        ("te", {"sinks": True}, "has no sinks"),
        ("te", {"needs_lse": True}, "returns no log-sum-exp"),
        ("te", {"head_size": 60}, r"has head sizes multiples of 8 up to 256, not \(60, 64\)"),
        ("flash3", {"capability": 8}, "needs compute capability 9, this GPU has 8"),
        ("cpu", {}, "runs on cpu tensors, these are on cuda"),
        ("torch", {"device": "cpu"}, "runs on cuda tensors, these are on cpu"),
    ],
)
def test_reasons(kernel: str, change: dict, reason: str) -> None:
    assert re.search(reason, why_not(kernel, replace(CUDA, **change)) or "")


def test_unknown_backend() -> None:
    with pytest.raises(
        ValueError, match=r"backend='fast' is not known; choose one of auto, cpu, torch, flash, te"
    ):
        choose("fast", CPU)


def test_asking_for_a_gpu_backend_with_cpu_tensors() -> None:
    x = torch.zeros(3, 1, 8)
    cu = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match="backend='flash' cannot run this call") as error:
        varlen_attention(x, x, x, cu, cu, 3, 3, backend="flash")
    assert "backend='cpu': runs it" in str(error.value)


def test_the_table_has_a_row_a_kernel_and_says_what_the_rows_say() -> None:
    lines = support_table().splitlines()
    head = [cell.strip() for cell in lines[0].strip("|").split("|")]
    rows = [
        dict(zip(head, (c.strip() for c in line.strip("|").split("|")), strict=True)) for line in lines[2:]
    ]
    assert [row["kernel"] for row in rows] == list(SUPPORT)
    for row in rows:
        truth = SUPPORT[row["kernel"]]
        assert row["backend"] == truth.backend
        assert (row["softcap"] == "yes") == truth.softcap
    assert rows[0]["here"] == "yes"


@pytest.mark.parametrize(
    ("change", "kernel"),
    [
        ({"dtype": torch.float32}, "efficient"),
        ({"dtype": torch.float16, "capability": 7}, "efficient"),
        ({"capability": 7}, "portable"),  # bf16 before capability 8
        ({"dtype": torch.float64}, "portable"),
        ({"spec": make_spec(64, softcap=30.0)}, "portable"),
        ({"dtype": torch.float32, "spec": make_spec(64, causal=False, window=(3, 2))}, "portable"),
        ({"device": "mps", "capability": None}, "portable"),
    ],
)
def test_what_no_flash_kernel_takes_still_runs_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, on_cuda: pytest.MonkeyPatch, change: dict, kernel: str
) -> None:
    said: list[str] = []
    monkeypatch.setattr(support, "rank_zero_info", said.append)
    monkeypatch.setattr(support, "_SAID", set())
    request = replace(CUDA, **change)
    assert [choose("auto", request) for _ in range(2)] == [kernel, kernel]
    assert len(said) == 1
    assert f"Attention runs on backend='{kernel}'" in said[0]
    assert ("precision=" in said[0]) == (request.device == "cuda" and request.dtype == torch.float32)
