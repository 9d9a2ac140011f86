"""``pack`` into a folder: shards and a manifest, taken up where a killed run stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_thd.data import pack as pack_module
from lightning_thd.data.pack import main, pack_file
from lightning_thd.data.read.sources import open_source
from tests.tiny import sequences

ROWS = sequences(200, labels=True)


def pack(out: Path, **options: Any) -> dict[str, int]:
    return pack_file(ROWS, out, capacity=48, window=32, shard_packs=10, **options)


def test_shards_hold_what_one_file_holds(tmp_path: Path) -> None:
    counts = pack(tmp_path / "shards")
    assert counts == pack(tmp_path / "one.parquet")
    manifest = json.loads((tmp_path / "shards" / "manifest.json").read_text())
    assert manifest["packs"] == sum(shard["packs"] for shard in manifest["shards"]) == counts["packs"]
    assert [shard["file"] for shard in manifest["shards"]] == [
        f"shard-{k:05d}.parquet" for k in range(-(-counts["packs"] // 10))
    ]
    one, many = open_source(tmp_path / "one.parquet"), open_source(tmp_path / "shards")
    assert len(one) == len(many) == 200
    for i in range(200):
        assert {k: v.tolist() for k, v in one[i].items()} == {k: v.tolist() for k, v in many[i].items()}


def test_a_run_that_stopped_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = pack_module.Packer.write, []

    def fails(self: Any, out: Path, first: int, last: int, **options: Any) -> dict[str, int]:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(out.name)
        return write(self, out, first, last, **options)

    monkeypatch.setattr(pack_module.Packer, "write", fails)
    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path / "o")
    assert not (tmp_path / "o" / "manifest.json").exists()
    before = written[:]
    written.clear()
    written.append("allowed")
    monkeypatch.setattr(
        pack_module.Packer,
        "write",
        lambda self, out, *a, **k: written.append(out.name) or write(self, out, *a, **k),
    )
    counts = pack(tmp_path / "o")
    assert not set(before) & set(written)
    assert counts == pack(tmp_path / "whole")
    for file in (tmp_path / "whole").glob("*.parquet"):
        assert (tmp_path / "o" / file.name).read_bytes() == file.read_bytes()
    with pytest.raises(ValueError, match=r"holds packs of other data or settings \(plan changed\)"):
        pack(tmp_path / "o", seed=1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match="no packs of ours"):
        pack(tmp_path / "other")


def test_the_command_takes_several_sources_and_skips(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{\n')
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n')
    sources = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    main([*sources, str(tmp_path / "o"), "--capacity", "16", "--on-error", "skip"])
    assert "2 sequences, 8 tokens in 1 packs of 16 slots, 50.0% full, skipped 1" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*sources, str(tmp_path / "p"), "--capacity", "16"])
    assert "a.jsonl, line 2: not JSON" in capsys.readouterr().err
