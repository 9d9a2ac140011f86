"""Steps, every loss and every family of the support table on an imagined GPU, in processes of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import step_launches
from lightning_thd._imports import installed
from tests.imagined.support import needs_imagination, our_reads
from tests.models.families import FAMILIES
from tests.scripts import run_python

NAMES = list(FAMILIES)
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "64-true")


def _run(script: str, *arguments: str, folder: Path) -> str:
    return run_python("-m", f"tests.imagined.{script}", *arguments, cwd=folder, timeout_s=1800)


@needs_imagination
def test_a_batch_takes_one_upload_and_a_step_reads_nothing(tmp_path: Path) -> None:
    _run("sample", "sample", "9.0", folder=tmp_path)


def test_only_reads_of_a_library_are_allowed_below_our_frames() -> None:
    loop = "nonzero parallel/tensor.py:320 experts_forward > qwen3_moe/modeling_qwen3_moe.py:224 forward"
    ours = "nonzero parallel/tensor.py:320 experts_forward"
    elsewhere = "item loss/causal_lm.py:90 causal_lm_loss > qwen3_moe/modeling_qwen3_moe.py:224 forward"
    reads = {loop: 3.0, ours: 1.0, elsewhere: 1.0, "item qwen3_moe/modeling_qwen3_moe.py:224 forward": 1.0}
    assert set(our_reads({"reads": reads})) == {ours, elsewhere}


@needs_imagination
@pytest.mark.imagined
@pytest.mark.parametrize("capability", ["9.0", "7.5"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_losses_of_every_precision_are_those_of_the_cpu(
    precision: str, capability: str, tmp_path: Path
) -> None:
    if capability == "7.5" and precision.startswith("bf16"):
        pytest.skip("a GPU of capability 7.5 has no bf16")
    _run("sample", precision, capability, folder=tmp_path)


# A capability for each part of the table: they differ in the kernels that are preferred, not in families.
@needs_imagination
@pytest.mark.imagined
@pytest.mark.parametrize(("part", "capability"), [*enumerate(["7.5", "8.0", "9.0", "10.0"])])
def test_families_equal_stock_eager_attention(part: int, capability: str, tmp_path: Path) -> None:
    said = _run("losses", capability, *NAMES[part::4], folder=tmp_path)
    assert said.count(": equal") == len(NAMES[part::4])


@needs_imagination
@pytest.mark.imagined
@pytest.mark.parametrize("capability", ["9.0", "7.5"])
def test_losses_equal_the_cpu_and_read_nothing(capability: str, tmp_path: Path) -> None:
    assert _run("losses", capability, folder=tmp_path).count(": equal") > 40


@needs_imagination
@pytest.mark.imagined
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_are_compiled_once_and_captured_compiled(dtype: str, tmp_path: Path) -> None:
    assert _run("compiled", dtype, folder=tmp_path).count(": equal") == 1


@needs_imagination
@pytest.mark.imagined
def test_updates_from_graphs_equal_eager_ones(tmp_path: Path) -> None:
    """Of every optimizer that counts its steps on the device, in every precision."""
    assert _run("optimizer", folder=tmp_path).count("bit for bit") == 16


@needs_imagination
def test_updates_from_graphs_equal_eager_ones_under_a_gradient_scaler(tmp_path: Path) -> None:
    printed = _run("optimizer", "fp16, sums", folder=tmp_path)
    assert printed.count("bit for bit") == 1
    assert "fp16, fused: refused" in printed


@needs_imagination
@pytest.mark.imagined
def test_a_step_of_125m_launches_few_kernels(tmp_path: Path) -> None:
    """Those of compiled layers are counted where triton is installed."""
    printed = run_python("-m", "benchmarks.step_launches", cwd=tmp_path, timeout_s=900)
    launches = dict(re.findall(r"^(eager|compiled): (\d+) launches", printed, re.MULTILINE))
    assert 0 < int(launches["eager"]) <= step_launches.GOAL_EAGER, printed
    assert "compiled" in launches or not installed("triton")
    assert int(launches.get("compiled", 0)) <= step_launches.GOAL, printed


@needs_imagination
def test_layer_inputs_in_cpu_memory_free_the_device(tmp_path: Path) -> None:
    assert "with offload: equal" in _run("offload", folder=tmp_path)


@pytest.mark.slow
@needs_imagination
def test_the_largest_capacity_is_found_on_a_device(tmp_path: Path) -> None:
    assert "within a tenth" in _run("capacity", folder=tmp_path)
