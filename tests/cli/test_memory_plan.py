"""``lightning-thd plan --memory``: its figures are the memory model's, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_thd.cli import main
from lightning_thd.cli.memory_plan import room_of
from lightning_thd.memory import MemoryModel, Training
from tests.test_memory import LLAMA_8B

Said = pytest.CaptureFixture[str]


@pytest.fixture
def config(tmp_path: Path) -> str:
    """The path of the config.json of an 8B model."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return str(path)


def test_json_is_the_memory_model(config: str, capsys: Said) -> None:
    main(
        f"plan --memory --model {config} --capacity 131072 --checkpointing --mlp-tile 4096 "
        "--fsdp --dp 4 --cp 2 --card 80 --json".split()
    )
    printed = json.loads(capsys.readouterr().out)
    model = MemoryModel.from_config(LLAMA_8B)
    training = Training(checkpointing=True, mlp_tile=4096, sharded=True, data=4, context=2)

    assert printed["peak_bytes"] == model.peak(131_072, training) == sum(printed["parts"].values())
    assert printed["devices"] == 8
    assert printed["moment"] in printed["moments"]

    option = printed["options"][0]
    assert option["option"] == "as given"

    (card,) = option["cards"]
    assert card["largest_capacity"] == model.largest_capacity(room_of(80), training)
    assert card["fits"] == (printed["peak_bytes"] <= room_of(80))


def test_the_table_says_which_option_fits_a_card(config: str, capsys: Said) -> None:
    main(f"plan --memory --model {config} --capacity 131072".split())
    shown = capsys.readouterr().out
    assert "8,030,261,248 weights, 1 devices" in shown
    assert "MLPs and experts" in shown
    rows = {line.split("  ")[0]: line for line in shown.splitlines()}
    model = MemoryModel.from_config(LLAMA_8B)
    tiled = Training(checkpointing=True, mlp_tile=2048)
    below, _, _, _ = (model.largest_capacity(room_of(card), Training()) for card in (141, 80, 48, 24))
    assert f"({below:,})" in rows["as given"], "a card that holds less than was asked for is in brackets"
    assert f" {model.largest_capacity(room_of(141), tiled):,}" in rows["--checkpointing --mlp-tile 2048"]
    assert "in brackets if it is below 131,072" in shown


def test_what_is_missing_is_named(config: str, capsys: Said) -> None:
    for line, expected in {
        "plan --memory --capacity 8": "--model",
        f"plan --memory --model {config} --capacity 8 --mlp-tile 0": "0; wanted at least 1",
        f"plan --memory --model {config} --capacity 8 --offlode": "did you mean --offload",
    }.items():
        with pytest.raises(SystemExit):
            main(line.split())
        assert expected in capsys.readouterr().err
