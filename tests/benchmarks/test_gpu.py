"""``python -m benchmarks.gpu``: its plan, and a run of pretended parts that loses its device."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import gpu, gpu_parts
from benchmarks.gpu_parts import in_order

FAKE = "tests.benchmarks.fake_parts"


def test_the_plan_of_nine_minutes_holds_the_most_telling_parts(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--plan"])
    assert "attention_equal      60 s   run: every backend equals fp64" in capsys.readouterr().out
    parts = in_order()
    fates = {x.name: fate for x, fate in gpu.plan(parts, budget_s=540.0, done=set())}
    for name in ("attention_equal", "train_7b", "loss_big_head", "loss_fp8_products", "test_loss"):
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


@pytest.mark.slow
def test_a_lost_device_ends_one_part_and_a_second_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_parts, "PARTS", {})
    monkeypatch.delitem(sys.modules, FAKE, raising=False)
    start = ["--device", "any", "--modules", FAKE, "--out", str(tmp_path)]

    assert gpu.main([*start, "--parts", "good", "device_lost", "after", "large"]) == 1
    table = capsys.readouterr().out
    lost = json.loads((tmp_path / "device_lost.json").read_text())

    assert lost["rows"][0]["value"] == 2.0  # what came before is on disk
    assert "illegal memory access" in lost["problem"]
    assert not lost["finished"]
    assert "| good | a case | 1.25 | x | >= 1 | yes |" in table
    assert "| after | late | 0.5 | x | >= 1 | NO |" in table
    assert "large: left out: takes about 1000000 s" in table
    assert not (tmp_path / "large.json").exists()
    assert gpu.main([*start, "--plan"]) == 0

    planned = capsys.readouterr().out
    assert "good                  1 s   done" in planned
    assert "device_lost           1 s   run" in planned
    assert gpu.finished(tmp_path, {"device": "another"}) == set()
