"""``python -m benchmarks.gpu``: its plan, and a run of pretended parts that loses its device."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_attention, gpu_parts
from benchmarks.gpu_parts import in_order
from lightning_thd.attention.kernels.cpu import varlen_attention_cpu
from lightning_thd.attention.spec import make_spec

FAKE = "tests.benchmarks.fake_parts"


def test_the_plan_of_nine_minutes_holds_the_most_telling_parts(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--plan"])
    assert "attention_equal      60 s   run: every backend equals brute" in capsys.readouterr().out
    parts = in_order()
    fates = {x.name: fate for x, fate in gpu.plan(parts, budget_s=540.0, done=set())}
    for name in ("attention_equal", "lightning_1b", "loss_big_head", "train_7b", "loss_fp8_products"):
        assert fates[name] == "run"
    assert sum(x.seconds for x in parts if fates[x.name] == "run") <= 540.0
    every = {x.name: fate for x, fate in gpu.plan(parts, budget_s=1800.0, done={"cuda_graph"})}
    assert every.pop("cuda_graph") == "done"
    assert set(every.values()) == {"run"}


def test_the_commands_of_the_page_are_there() -> None:
    """The modules and parts that ``GPU.md`` names for the first half hour; ``tests/imagined`` runs them."""
    for module in gpu_parts.MODULES:
        importlib.import_module(module)
    text = (Path(gpu.__file__).parent / "GPU.md").read_text()
    (block,) = re.findall(r"The first half hour.*?```bash\n(.*?)```", text, re.DOTALL)
    commands = [line.partition("#")[0].split() for line in block.splitlines()]
    assert len(commands) >= 7
    for words in commands:
        module = words[words.index("-m") + 1]
        assert importlib.util.find_spec(module) is not None, module
        if module == "benchmarks.gpu":
            arguments = gpu._arguments(words[words.index(module) + 1 :])
            assert set(arguments.parts) <= gpu_parts.PARTS.keys(), words
            seconds = sum(gpu_parts.PARTS[name].seconds for name in arguments.parts)
            assert seconds <= 60 * arguments.budget, words


@pytest.mark.parametrize("case", list(gpu_attention.CASES))
def test_brute_force_is_attention_of_each_sequence(case: str) -> None:
    """Compare the oracle of GPUs with the CPU's kernel, in fp64, with gradients."""
    options, with_sinks = gpu_attention.CASES[case]
    lengths = [1, 2, 33, 0, 140]
    window = (5, 3) if "two-sided" in case else options.get("window")
    spec = make_spec(8, **{**options, "window": window})
    torch.manual_seed(0)
    shapes = ((4, 8), (2, 8), (2, 6))
    leaves = [torch.randn(sum(lengths), *shape, dtype=torch.float64) for shape in shapes]
    if with_sinks:
        leaves.append(torch.randn(4, dtype=torch.float64))
    leaves = [leaf.requires_grad_() for leaf in leaves]
    actual = gpu_attention.brute_force(*leaves, lengths=lengths, spec=spec)

    cu_seqlens = gpu_attention.offsets(lengths)
    sink = leaves[3] if with_sinks else None
    longest = max(lengths)
    expected, _ = varlen_attention_cpu(
        *leaves[:3], cu_seqlens, cu_seqlens, sink, longest, longest, spec.left, spec.right, spec.scale,
        spec.softcap,
    )  # fmt: skip
    upstream = torch.randn_like(actual)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad(actual, leaves, upstream)
    theirs = torch.autograd.grad(expected, leaves, upstream)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
def test_a_lost_device_ends_one_part_and_a_second_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_parts, "PARTS", {})
    monkeypatch.delitem(sys.modules, FAKE, raising=False)
    start = ["--device", "any", "--modules", FAKE, "--out", str(tmp_path)]

    parts = ("good", "beside", "wrong", "device_lost", "after", "large")
    assert gpu.main([*start, "--parts", *parts]) == 1
    table = capsys.readouterr().out
    found = gpu.saved(tmp_path)
    lost = found["device_lost"]

    assert lost["rows"][0]["value"] == 2.0  # what came before is on disk
    assert "illegal memory access" in lost["problem"]
    assert not lost["finished"]
    assert "| good | a case | 1.25 | x | >= 1 | yes |" in table
    assert "| after | late | 0.5 | x | >= 1 | NO |" in table
    assert "large: left out: takes about 1000000 s" in table
    assert not (tmp_path / "large.json").exists()

    assert "ValueError: this part is wrong" in found["wrong"]["problem"]
    assert found["wrong"]["finished"]

    def process(part: str) -> float:
        (pid,) = [row["value"] for row in found[part]["rows"] if row["case"] == "process"]
        return float(pid)

    assert process("good") == process("beside") == process("wrong")
    assert process("wrong") != process("after")

    assert gpu.main([*start, "--plan"]) == 0

    planned = capsys.readouterr().out
    assert "good                  1 s   done" in planned
    assert "device_lost           1 s   run" in planned
    assert gpu.finished(tmp_path, {"device": "another"}) == set()
