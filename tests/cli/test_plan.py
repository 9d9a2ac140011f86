"""``lightning-thd plan``: its figures are those of the plan, and what it cannot read is one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lightning_thd.cli import main

LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 260,
}


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": "x" * (7 + 13 * (i % 9))}) + "\n" for i in range(90)))
    return str(file)


def test_it_says_what_the_plan_holds(texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "packs.png"
    main(["plan", texts, "--capacity", "256", "--dp", "2", "--json", "--plot", str(picture)])
    found = json.loads(capsys.readouterr().out)
    tokens = sum(8 + 13 * (i % 9) for i in range(90))  # one byte a letter, and EOS
    assert found["sequences"] == 90
    assert found["tokens"] == tokens
    assert found["lengths"] == [8, 8 + 13 * 4, 8 + 13 * 8]  # shortest, median, longest
    assert found["packs"] == 2 * found["steps"]
    assert found["fill"] == pytest.approx(tokens / (found["packs"] * 256))
    assert 0 < found["padded_fill"] < found["fill"] <= 1
    assert found["imbalance"] >= 1
    assert found["tokens_per_s"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_shared_prefixes_are_planned_as_distinct_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = [f"{prompt:c}" * 40 + f"{answer}" * 8 for prompt in range(97, 117) for answer in range(5)]
    file, config = tmp_path / "texts.jsonl", tmp_path / "config.json"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config.write_text(json.dumps(LLAMA))
    model = ["--model", str(config), "--device", "H100 SXM"]
    found, printed = {}, ""
    for share in ([], ["--share-prefixes"]):
        plan = ["plan", str(file), "--capacity", "256", *model, *share]
        main([*plan, "--json", "--plot", str(tmp_path / "packs.png")])
        found[bool(share)] = json.loads(capsys.readouterr().out)
        main(plan)
        printed = capsys.readouterr().out
    tokens, distinct = 100 * 49, 20 * 40 + 100 * 9  # an EOS ends each answer
    assert [found[share]["tokens"] for share in (False, True)] == [tokens] * 2
    assert [found[share]["distinct"] for share in (False, True)] == [tokens, distinct]
    assert found[True]["fill"] == pytest.approx(distinct / (256 * found[True]["packs"]))
    assert found[True]["packs"] < found[False]["packs"] / 2
    # Attention adds little to the linear work of these.
    assert found[True]["tokens_per_s"] == pytest.approx(
        found[False]["tokens_per_s"] * tokens / distinct, rel=0.05
    )
    assert re.search(r"distinct tokens, computed +1,700 \(34.7%\)", printed)


def test_the_table_fits_a_terminal(texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    main(
        [
            "plan",
            texts,
            "--capacity",
            "256",
            "--model",
            str(config),
            "--device",
            "NVIDIA H200",
            "--mfu",
            "0.5",
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert any(line.startswith("tokens/s of one device") for line in lines)
    assert any(line.startswith("slots saved by packing") for line in lines)


def test_packs_that_are_emptier_than_padded_batches_save_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("one short document")
    main(["plan", str(tmp_path / "short.txt"), "--capacity", "8192"])
    assert re.search(r"slots saved by packing +none: fuller if padded", capsys.readouterr().out)


def test_what_became_of_longer_sequences(texts: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", texts, "--capacity", "100", "--oversize", "drop"])
    assert "longer sequences, dropped" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", texts, "--capacity", "100", "--oversize", "shorten"])
    assert "own_pack" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "NVIDIA H200"], "--device NVIDIA H200 asks for a speed, .* Pass --model too"),
        (["--device", "Abacus", "--model", "{config}"], "No peak FLOP/s is known for 'Abacus'. .*peaks`"),
    ],
)
def test_a_speed_it_cannot_expect(
    texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    with pytest.raises(SystemExit):
        main(["plan", texts, "--capacity", "64", *(each.format(config=config) for each in arguments)])
    assert re.search(message, capsys.readouterr().err)


def test_a_capacity_that_splits_most_documents_is_warned_of(
    texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", texts, "--capacity", "32", "--json"])
    said = capsys.readouterr()
    assert json.loads(said.out)["lost"]["split"] == 70
    assert "--capacity 32 splits 70 of 90 documents" in said.err
    main(["plan", texts, "--capacity", "256", "--json"])
    assert "Warning" not in capsys.readouterr().err
