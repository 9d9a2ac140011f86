"""``lightning-thd check``: a config is enough, and a leak is an exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_thd.cli import main

SIZES = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SIZES))
    return str(file)


def test_a_model_that_keeps_them_apart(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", config, "--layers", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["ok"] is True
