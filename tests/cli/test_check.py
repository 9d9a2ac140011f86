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


@pytest.mark.parametrize("command", [["check", "nobody/model"], ["flops", "nobody/model", "--lengths", "3"]])
def test_a_hub_that_does_not_answer_is_asked_once(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked: list[str] = []

    def model_info(self: object, name: str, **how: object) -> None:
        asked.append(name)
        raise ConnectionError("no route")

    monkeypatch.setattr(hub.HfApi, "model_info", model_info)
    with pytest.raises(SystemExit):
        main(command)
    assert asked == ["nobody/model"]
    assert (
        "nobody/model is no folder, nor a model in the cache, and the hub does not" in capsys.readouterr().err
    )
