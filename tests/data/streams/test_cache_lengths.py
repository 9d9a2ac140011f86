"""Epochs planned from lengths that a pass found: every sequence once, as the map-style planner plans them."""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from lightning_thd import Packs, Sequences, THDDataModule
from lightning_thd.data.streams import Stream
from lightning_thd.packing import PackPlanner
from tests.data.streams.jobs import check_content, counted, describe, module, read_shards, run, write_shards
from tests.ranks import run_ranks

SIZES = [40, 3, 25, 0, 17]


def cached(folder: Any, **kwargs: Any) -> Any:
    return run(f"{folder}/*.jsonl", cache_lengths=True, cache_dir=f"{folder}/cache", **kwargs)


@pytest.mark.parametrize("packs", [False, True])
def test_the_second_epoch_is_that_of_the_map_style_planner(tmp_path: Path, packs: bool) -> None:
    write_shards(tmp_path, SIZES, labels=True)
    wanted, n = read_shards(tmp_path), 4 if packs else 12
    seen, state, _ = cached(tmp_path, packs=packs, n=n, epochs=3)
    assert counted([(seen, None)]) == dict.fromkeys(wanted, 3)
    check_content([(seen, None, 0)], wanted, capacity=64)
    ids = sorted(wanted)
    planner = PackPlanner(
        [len(wanted[i]["input_ids"]) for i in ids], 64, global_batch=Packs(n) if packs else Sequences(n)
    )
    steps = planner.num_steps(1)
    planned = [step["ids"] for step in seen[-steps - planner.num_steps(2) : -planner.num_steps(2)]]
    for k in range(steps):
        plan = planner.step(1, k, 1).indices_by_rank()[0]
        assert planned[k] == [tuple(ids[i] for i in pack) for pack in plan]
    assert (state["epoch"], state["step"]) == (3, 0)
    again, *_ = cached(tmp_path, packs=packs, n=n)  # a later run plans its first epoch too
    assert [step["ids"] for step in again] == [
        [tuple(ids[i] for i in pack) for pack in planner.step(0, k, 1).indices_by_rank()[0]]
        for k in range(planner.num_steps(0))
    ]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:.*forking the process")
def test_a_planned_epoch_goes_on_where_it_stood(tmp_path: Path, workers: int) -> None:
    write_shards(tmp_path, SIZES)
    kwargs: dict[str, Any] = {"n": 12, "num_workers": workers}
    whole, *_ = cached(tmp_path, epochs=3, **kwargs)
    (tmp_path / "cache").rename(tmp_path / "aside")
    for cut in (3, 8, 11, 16, 20):
        first, state, _ = cached(tmp_path, steps=cut, epochs=3, **kwargs)
        rest, *_ = cached(tmp_path, state=state, epochs=3 - state["epoch"], **kwargs)
        assert first + rest == whole, cut
        if cut < 8:  # the second process began inside the first epoch: the log goes on where it was
            assert not list((tmp_path / "cache").glob("*.log"))
        for path in sorted((tmp_path / "cache").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    first, state, _ = cached(tmp_path, steps=11, epochs=3, **kwargs)
    for path in sorted((tmp_path / "cache").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(ValueError, match="stands in an epoch that was planned from a length index"):
        cached(tmp_path, state=state, **kwargs)


def test_a_log_that_lost_its_beginning_or_its_end(tmp_path: Path, caplog: Any) -> None:
    write_shards(tmp_path, SIZES)
    _, state, _ = cached(tmp_path, steps=3, n=12)
    (log,) = (tmp_path / "cache").glob("*.log")
    whole = log.read_bytes()
    log.write_bytes(whole[:-5])  # torn by a kill
    seen, *_ = cached(tmp_path, state=state, epochs=2, n=12)
    assert counted([(seen, None)])
    log.unlink(missing_ok=True)
    for path in sorted((tmp_path / "cache").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with caplog.at_level("INFO"):
        seen, *_ = cached(tmp_path, state=state, epochs=3, n=12)
    assert "length index of the stream is not whole" in caplog.text
    assert set(counted([(seen, None)]).values()) <= {2, 3}
    assert list((tmp_path / "cache").glob("stream-*/meta.json"))  # the second pass completed it


def job(folder: str, state: Any, steps: int | None, epochs: int) -> Any:
    return cached(folder, n=12, state=state, steps=steps, epochs=epochs)


def test_other_numbers_of_ranks_go_on_in_a_planned_epoch(tmp_path: Path) -> None:
    write_shards(tmp_path, SIZES, labels=True)
    wanted = read_shards(tmp_path)
    first = run_ranks(job, 2, str(tmp_path), None, 11, 2, timeout_s=100)
    second = run_ranks(job, 1, str(tmp_path), first[0][1], None, 1, timeout_s=100)
    assert counted([*first, *second]) == dict.fromkeys(wanted, 2)
    for ranks in (first, second):
        check_content(ranks, wanted, capacity=64)
    assert first[0][1] == first[1][1]


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl"])
def test_formats_that_are_read_by_number(tmp_path: Path, suffix: str) -> None:
    rows = [[(i * 7 + j) % 50 for j in range(i % 9 + 1)] for i in range(40)]
    path, table = tmp_path / f"x.{suffix}", pa.table({"input_ids": rows})
    if suffix == "parquet":
        parquet.write_table(table, path, row_group_size=7)
    elif suffix == "arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    else:
        path.write_text("\n\n".join(json.dumps({"input_ids": row}) for row in rows))
    seen, *_ = run(str(path), cache_lengths=True, cache_dir=f"{tmp_path}/cache", n=10, epochs=2)
    for epoch in (seen[:4], seen[4:]):
        found = sorted(row for step in epoch for batch in step["tokens"] for row in batch)
        assert found == sorted(rows)


def test_policies_hold_in_planned_epochs(tmp_path: Path) -> None:
    lines = [{"input_ids": list(range(n))} for n in (5, 30, 7, 0, 12)] + [{"input_ids": [-1]}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for oversize, lengths in (("truncate", [5, 7, 8, 8]), ("drop", [5, 7]), ("own_pack", [5, 7, 12, 30])):
        seen, *_ = run(
            str(tmp_path / "x.jsonl"),
            capacity=8,
            n=10,
            epochs=2,
            cache_lengths=True,
            cache_dir=f"{tmp_path}/cache",
            oversize=oversize,
            empty="drop",
            on_error="skip",
        )
        for step in seen:
            assert sorted(len(row) for batch in step["tokens"] for row in batch) == lengths
        assert len(seen) == 2


def test_weights_count_in_planned_epochs(tmp_path: Path) -> None:
    lines = [{"input_ids": [1, 2, 3], "weights": w} for w in (0.5, 2.0, 0.25)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    stream = Stream(str(tmp_path / "x.jsonl"), cache_lengths=True)
    data = THDDataModule(stream, capacity=16, global_batch=Sequences(3), cache_dir=tmp_path / "cache")
    loader = data.train_steps()
    scales = [step.microbatches[0].loss_scale for _ in range(2) for step in loader]
    assert scales == pytest.approx([1 / 5.5, 1 / 5.5])


def test_shards_that_changed_are_counted_anew_or_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, [30])
    cached(tmp_path, n=10)
    file = tmp_path / "000.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[::-1]))
    seen, *_ = cached(tmp_path, n=10)  # other content, another key: streamed again
    assert [i for step in seen for batch in step["ids"] for i in sorted(batch)][:1] == [0] or seen
    loader = module(
        f"{tmp_path}/*.jsonl", n=10, cache_lengths=True, cache_dir=f"{tmp_path}/cache"
    ).train_steps()
    file.write_text("\n".join([*lines[5:], *lines[:5]]))
    with pytest.raises(ValueError, match="is not what it was when its length .* was written down"):
        [describe(step) for step in loader]


def test_what_cannot_be_read_by_number_says_so_by_name(tmp_path: Path) -> None:
    def make(source: Any, **kwargs: Any) -> Stream:
        return Stream(source, cache_lengths=True, **kwargs)

    for name, why in (("x.jsonl.gz", "gzip"), ("x.jsonl.zst", "zstd"), ("x.tar", "a tar has no table")):
        with pytest.raises(ValueError, match=f"by number from the second epoch on, which .*{name} .*{why}"):
            make(f"shards/{name}")
    with pytest.raises(ValueError, match="which a function does not allow: it gives its records one after"):
        make(lambda: iter([]))
    with pytest.raises(ValueError, match="steps_per_epoch=3 cuts them"):
        make("x.jsonl", steps_per_epoch=3)
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "a.jsonl.gz").write_bytes(gzip.compress(b'{"input_ids": [1]}'))
    with pytest.raises(ValueError, match="a.jsonl.gz does not allow: gzip is unpacked from its beginning"):
        run(str(tmp_path / "shards"), cache_lengths=True)
    table = pa.table({"input_ids": [[1, 2]]})
    with pa.OSFile(str(tmp_path / "s.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
    with pytest.raises(ValueError, match="it is an Arrow stream; an Arrow file has a table of contents"):
        run(str(tmp_path / "s.arrow"), cache_lengths=True)
    with tarfile.open(tmp_path / "x.tar", "w"):
        pass
    write_shards(tmp_path, [3])
    with pytest.raises(ValueError, match="the tokenizer is a function that does not say when it changed"):
        run(f"{tmp_path}/*.jsonl", cache_lengths=True, tokenizer=lambda text: [1])
    with pytest.raises(ValueError, match="cache_lengths=True plans epochs of one stream"):
        THDDataModule({"a": (make("x.jsonl"), 1)}, capacity=8)
