from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_thd.cli.flops import flops as main
from lightning_thd.flops import FlopsModel, SeqStats
from tests.flops.test_model import LLAMA2_7B


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA2_7B))
    return file


def test_prints_every_part_and_what_the_squared_pack_would_say(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(config), "--lengths", "512", "1024", "2048", "--recompute", "full", "--device", "NVIDIA H100"])
    text = capsys.readouterr().out
    flops = FlopsModel.from_config(LLAMA2_7B, recompute="full").training_flops(
        SeqStats.from_lengths([512, 1024, 2048])
    )
    for part in (flops.linear, flops.attention, flops.logits, flops.recompute, flops.model, flops.hardware):
        assert f"{part:,}" in text
    assert "3 sequences, 3,584 tokens" in text
    assert "Counted as one sequence: 1.039 x the model's FLOPs." in text
    assert f"At 989.4 TFLOP/s: {flops.hardware / 989.4e12 * 1e3:.3f} ms at the least." in text


def test_a_folder_will_do_and_a_device_may_be_unknown(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(config.parent), "--lengths", "8", "--device", "Z80"])
    assert "No peak is known for 'Z80' in bf16." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: .* A config.json is wanted"),
        ("{}", "has no model_type. Pass the config.json of a transformers model"),
        ('{"model_type": "nope"}', "No FLOP count is known for model_type='nope'"),
    ],
)
def test_a_bad_file_is_an_error_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(SystemExit):
        main([str(file), "--lengths", "8"])
    error = " ".join(capsys.readouterr().err.split())
    import re

    assert re.search(message, error)
