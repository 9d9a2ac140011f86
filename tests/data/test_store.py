"""Token stores, caches and counts: built once, whole after a kill, and equal to a loop over the samples."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_thd import THDDataModule
from lightning_thd.data.store.cache import CacheError, build_once
from lightning_thd.data.store.index import build_index
from lightning_thd.data.store.tokens import Rows, TokenStore, cached_store
from lightning_thd.packing import PackPlanner, Packs
from lightning_thd.packing.entries import Oversize
from tests.data.support import open_source, read_piece
from tests.tiny import sequences
from tests.trust.caches import cold_starts


@given(rows=st.lists(st.lists(st.integers(0, 70_000), max_size=9), max_size=12))
def test_store_gives_every_row_back(rows: list[list[int]]) -> None:
    store = TokenStore.from_rows(rows)
    assert [store[i]["input_ids"].tolist() for i in range(len(store))] == rows
    assert store.lengths.tolist() == [len(row) for row in rows]
    assert store.loss_tokens.tolist() == [max(0, len(row) - 1) for row in rows]
    assert store.tokens.dtype in (np.uint16, np.uint32)


@given(rows=st.lists(st.lists(st.sampled_from([-100, 5]), min_size=1, max_size=9), min_size=1, max_size=9))
def test_store_counts_labels_from_the_second_token_on(rows: list[list[int]]) -> None:
    flat = np.array([label for row in rows for label in row])
    offsets = np.array([0, *np.cumsum([len(row) for row in rows])])
    store = TokenStore(np.zeros(len(flat), np.uint16), offsets, flat)
    assert store.loss_tokens.tolist() == [sum(label != -100 for label in row[1:]) for row in rows]
    assert store[0]["labels"].tolist() == rows[0]


def test_corrupt_store_names_the_folder_and_a_cache_is_built_anew(tmp_path: Path) -> None:
    built = []

    def build(first: int) -> list[Rows]:
        built.append(1)
        return [Rows(np.array([1, 2, 3]), np.array([2, 1]))]

    for _ in range(2):
        cached_store({"a": 1}, build, cache_dir=tmp_path)
    assert len(built) == 1
    [folder] = tmp_path.glob("tokens-*")
    (folder / "tokens.npy").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"folder .* cannot be read: .*Delete it to build it again"):
        TokenStore.open(folder)
    with pytest.warns(UserWarning, match="built again"):
        assert cached_store({"a": 1}, build, cache_dir=tmp_path)[0]["input_ids"].tolist() == [1, 2]
    assert len(built) == 2


def test_a_cache_that_outgrows_its_disk_is_named(tmp_path: Path) -> None:
    def write(place: Path) -> None:
        if "large" in place.name:
            raise OSError(errno.EFBIG, "File too large")
        with Path("/dev/full").open("wb") as disk:
            np.zeros(9_999).tofile(disk)  # raises an error without errno

    for name, why in (("large", "File too large"), ("full", "9999 requested and")):
        with pytest.raises(CacheError, match=f"cache .*{name} cannot be written .*{why}.*Pass cache_dir="):
            build_once(tmp_path / name, write)


TOKENS = np.array([5, 6, 7], np.uint16)
OFFSETS = np.array([0, 1, 3])
WITH = Rows(TOKENS, np.array([1, 2]), np.array([-100, 6, 7]))
WITHOUT = Rows(TOKENS, np.array([1, 2]))
LABELLED = WITHOUT._replace(label=np.array([0, 1]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TokenStore(TOKENS, OFFSETS, loss_tokens=np.array([1])), "loss_tokens of shape .* wanted 2"),
        (lambda: TokenStore(TOKENS, OFFSETS, label=np.array([1])), r"label of shape \(1,\); wanted 2"),
        (lambda: TokenStore(TOKENS, OFFSETS, np.zeros(2, int)), "labels of shape"),
        (lambda: TokenStore(TOKENS, np.array([0, 2, 1, 3])), "offsets must run from 0 to 3 and never fall"),
        (lambda: TokenStore(TOKENS, np.array([0, 2])), "offsets must run from 0 to 3"),
        (lambda: TokenStore(TOKENS, OFFSETS, np.array([5, -1, 7])).save("x"), "The store has the label -1"),
        (lambda: TokenStore.from_rows([[-1]]), "Token ids start at 0, got -1"),
        (lambda: TokenStore.from_rows([[2**31]]), "Ids run to 2147483647"),
    ],
)
def test_a_store_of_arrays(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
    with pytest.raises(IndexError, match="Sequence 5 of a TokenStore of 1 sequences does not exist"):
        TokenStore.from_rows([[1]])[5]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([WITHOUT, WITH], "later records have 'labels', but the first"),
        ([WITH, WITHOUT], "first records have 'labels', but the later"),
        ([LABELLED, WITHOUT], "first records have 'label', but the later"),
    ],
)
def test_pieces_that_do_not_belong_together(tmp_path: Path, parts: list[Rows], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cached_store(None, lambda first: parts, cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())
    nothing = Rows(np.arange(0), np.arange(0))
    pieces = [LABELLED, nothing, LABELLED._replace(label=np.array([0.5, 2]))]
    store = cached_store(None, lambda first: pieces, cache_dir=tmp_path)
    assert [row["label"] for row in store] == [0.0, 1.0, 0.5, 2.0]


def test_of_six_processes_one_builds(tmp_path: Path) -> None:
    assert cold_starts(2, tmp_path)["builds"] == 2


def rows_from(first: int, *, last: int = 40, kill_at: int | None = None) -> Iterator[Rows]:
    rng = np.random.default_rng(7)
    for k in range(last):
        lengths = rng.integers(0, 9, 5)
        tokens = rng.integers(0, 2**20 if k > 20 else 2**10, int(lengths.sum()))
        labels = np.where(rng.random(len(tokens)) < 0.5, -100, tokens)
        if k >= first:
            if k == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield Rows(tokens, lengths, labels)


def _build_until(cache: Path, kill_at: int) -> None:
    cached_store({"a": 1}, lambda first: rows_from(first, kill_at=kill_at), cache_dir=cache)


def test_a_killed_build_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole = cached_store({"a": 1}, rows_from, cache_dir=tmp_path / "whole")
    fork = get_context("fork")
    for round_, places in enumerate(([0, 3, 21, 22], [39], [20, 21, 30])):
        cache = tmp_path / str(round_)
        firsts: list[int] = []

        def parts(first: int, seen: list[int] = firsts) -> Iterator[Rows]:
            seen.append(first)
            return rows_from(first)

        for kill_at in places:
            process = fork.Process(target=_build_until, args=(cache, kill_at))
            process.start()
            process.join()
            assert process.exitcode == -signal.SIGKILL
            [left] = cache.glob(".tokens-*.unfinished")
            (left / "unfinished.npz").write_text("torn")
        store = cached_store({"a": 1}, parts, cache_dir=cache)
        assert firsts == [max(places)]
        for name in ("tokens", "offsets", "labels", "loss_tokens"):
            assert np.array_equal(getattr(store, name), getattr(whole, name))
        assert [path.name.startswith("tokens-") for path in cache.iterdir()] == [True]


def test_arrays_of_objects_are_never_unpickled(tmp_path: Path) -> None:
    store = TokenStore.from_rows([[1, 2]])
    (tmp_path / "s").mkdir()
    mode = (tmp_path / "s").stat().st_mode
    store.save(tmp_path / "s")
    assert (tmp_path / "s").stat().st_mode == mode  # others may read it too
    with pytest.raises(ValueError, match="holds other files, which would be deleted. Name a new folder"):
        store.save(tmp_path)
    np.save(tmp_path / "s" / "tokens.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(ValueError, match="cannot be read"):
        TokenStore.open(tmp_path / "s")
    (tmp_path / "s" / "meta.json").unlink()
    with pytest.raises(ValueError, match="has no data files"):
        open_source(tmp_path / "s")


def test_a_fingerprint_is_of_the_whole_content(tmp_path: Path) -> None:
    lengths = np.full((2, 600_000), 4)
    lengths[[0, 1], [299_000, 301_000]] = 3
    for name, row in zip("01", lengths, strict=True):
        TokenStore(np.zeros(row.sum(), np.uint16), np.append(0, row.cumsum())).save(tmp_path / name)
    assert len({TokenStore.open(tmp_path / name).fingerprint for name in "01"}) == 2


class Named(list[dict[str, Any]]):
    fingerprint = "x"


@pytest.mark.filterwarnings("ignore:1 bad rows are left out")
def test_counts_that_skip_rows_of_two_sequences_are_not_those_of_packed_off(tmp_path: Path) -> None:
    rows = Named([{"input_ids": [1, 2]}, {"input_ids": [3, 4], "position_ids": [0, 0]}])
    for packed, expected in (("auto", [2, 0]), ("off", [2, 2])):
        data = THDDataModule(rows, capacity=4, packed=packed, on_error="skip", cache_dir=tmp_path)
        data.setup("fit")
        assert data._sets["train"].index.lengths.tolist() == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_reading_does_not_move_the_random_state(workers: int, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "one"}\n{"text": "another"}\n')
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    packs = [{"input_ids": [1, 2, 3, 4, 5], "lengths": [3, 2]}]
    for source, packed in ((str(file), "off"), (rows, "off"), (packs, "sequences"), (lambda: rows, "off")):
        before = torch.get_rng_state()
        data = THDDataModule(source, capacity=16, packed=packed, cache_dir=tmp_path, num_workers=workers)
        data.prepare_data()
        data.setup("fit")
        assert len(list(data.train_dataloader())) == 1
        assert torch.equal(torch.get_rng_state(), before), source


class WithLengths(list[dict[str, Any]]):
    lengths: Any = None
    loss_tokens: Any = None


def counted(samples: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    labels = [sample.get("labels", sample["input_ids"]) for sample in samples]
    return [len(s["input_ids"]) for s in samples], [int((np.asarray(x)[1:] != -100).sum()) for x in labels]


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_are_counted(labels: bool, num_workers: int) -> None:
    samples = WithLengths(sequences(300, labels=labels))
    expected = counted(samples)
    for samples.lengths, samples.loss_tokens in ((None, None), (expected[0], None), expected):
        index = build_index(samples, num_workers=num_workers)
        assert (index.lengths.tolist(), index.loss_tokens.tolist()) == expected


@given(
    limit=st.integers(2, 9),
    oversize=st.sampled_from(["split", "truncate", "drop", "own_pack"]),
    labels=st.booleans(),
    seed=st.integers(0, 50),
)
def test_pieces_are_read_and_counted_with_their_targets(
    limit: int, oversize: Oversize, labels: bool, seed: int
) -> None:
    samples = sequences(12, labels=labels, seed=seed)
    index = build_index(samples)
    assume(oversize != "drop" or index.lengths.min() <= limit)
    planner = PackPlanner(index.lengths, limit, global_batch=Packs(1), oversize=oversize)
    targets: dict[int, dict[int, int]] = {}

    for k in range(len(planner)):
        for spans in planner.step(0, k, 1).microbatches(0):
            total = 0
            pieces = zip(spans.index, spans.start, spans.stop, index.samples(samples, spans), strict=True)
            for i, start, stop, sample in pieces:
                assert np.array_equal(sample["input_ids"], samples[i]["input_ids"][start:stop])
                source = sample.get("labels", sample["input_ids"])
                piece_targets = [*source[1:], sample.get("next_label", -100)]
                if oversize == "split":  # no target is lost, and none comes twice
                    for place, target in enumerate(piece_targets, start=int(start)):
                        assert place not in targets.setdefault(int(i), {})
                        targets[int(i)][place] = int(target)
                total += sum(int(target) != -100 for target in piece_targets)
            assert index.loss_weights(samples, spans)[0].sum() == total

    for i, found_targets in targets.items():
        source = samples[i].get("labels", samples[i]["input_ids"])
        assert [found_targets[place] for place in range(len(source))] == [*source[1:].tolist(), -100]


def test_lengths_that_do_not_match_are_refused() -> None:
    samples = WithLengths(sequences(3))
    samples.lengths = [1, 2]
    with pytest.raises(ValueError, match="3 sequences but 2 `lengths`"):
        build_index(samples)
    samples.lengths = [999, 1, 1]
    with pytest.raises(ValueError, match=r"Sequence 0 has \d+ tokens, but 999 were counted"):
        read_piece(build_index(samples), samples, 0, 0, 999)
