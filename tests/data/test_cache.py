"""Caches under many processes, kills, full disks and changed files."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock

from lightning_thd import THDDataModule
from lightning_thd.data.store.cache import CacheError, build_once, content_of
from lightning_thd.data.store.tokens import Rows, TokenStore, cached_store
from tests.data.support import open_source
from tests.trust.caches import cold_starts, kills


def test_of_six_processes_one_builds(tmp_path: Path) -> None:
    assert cold_starts(2, tmp_path)["builds"] == 2


def _die_while_building(folder: Path) -> None:
    build_once(folder, lambda place: os.kill(os.getpid(), signal.SIGKILL))


def test_a_lock_left_behind_is_taken_up(tmp_path: Path) -> None:
    process = get_context("fork").Process(target=_die_while_building, args=(tmp_path / "c",))
    process.start()
    process.join()
    assert (tmp_path / ".c.lock").exists()
    assert build_once(tmp_path / "c", lambda place: None)


def test_waiting_for_a_lock_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_THD_CACHE_TIMEOUT", "0.2")
    with FileLock(tmp_path / ".c.lock"), pytest.raises(TimeoutError, match=r"is held by .*delete the file"):
        build_once(tmp_path / "c", lambda place: None)


def test_a_lock_that_is_held_is_waited_for(tmp_path: Path) -> None:
    fork = get_context("fork")
    barrier, queue = fork.Barrier(2), fork.Queue()

    def slow(place: Path) -> None:
        barrier.wait()
        time.sleep(0.3)
        (place / "a").write_text("x")

    process = fork.Process(target=lambda: queue.put(build_once(tmp_path / "c", slow)))
    process.start()
    barrier.wait()
    assert not build_once(tmp_path / "c", slow)
    assert (tmp_path / "c" / "a").read_text() == "x"
    process.join()
    assert queue.get(timeout=9)


def test_a_failed_build_leaves_nothing_and_the_next_one_works(tmp_path: Path) -> None:
    def fail(place: Path) -> None:
        (place / "a").write_text("half")
        raise ValueError("bad record")

    for resume in (False, True):
        with pytest.raises(ValueError, match="bad record"):
            build_once(tmp_path / "c", fail, resume=resume)
        assert list(tmp_path.iterdir()) == []
    assert build_once(tmp_path / "c", lambda place: None)


def test_a_full_disk_names_the_cache(tmp_path: Path) -> None:
    def full(place: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CacheError, match=r"The cache .*c cannot be written \(.*No space left.*\). Pass"):
        build_once(tmp_path / "c", full)

    def source(place: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file", "/somewhere/else.jsonl")

    with pytest.raises(FileNotFoundError, match="else"):  # of the source: not the cache's fault
        build_once(tmp_path / "c", source)


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


def _same(store: TokenStore, other: TokenStore) -> bool:
    names = ("tokens", "offsets", "labels", "loss_tokens")
    return all(np.array_equal(getattr(store, name), getattr(other, name)) for name in names)


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
        assert _same(store, whole)
        assert [path.name.startswith("tokens-") for path in cache.iterdir()] == [True]


@pytest.mark.slow
def test_two_kills_while_tokenising_lose_nothing(tmp_path: Path) -> None:
    found = kills(2, tmp_path, lines=4_000)
    assert found["killed while it tokenised"] + found["killed before or after"] == 2


def test_contents_are_known_whatever_the_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    (tmp_path / "b").write_bytes(b"x" * 100)
    (tmp_path / "c").write_bytes(b"x" * 99 + b"y")
    assert content_of(tmp_path / "a") == content_of(tmp_path / "b") != content_of(tmp_path / "c")


def test_arrays_of_objects_are_never_unpickled(tmp_path: Path) -> None:
    store = TokenStore.from_rows([[1, 2]])
    store.save(tmp_path / "s")
    np.save(tmp_path / "s" / "tokens.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(ValueError, match="cannot be read"):
        TokenStore.open(tmp_path / "s")
    (tmp_path / "s" / "meta.json").unlink()
    with pytest.raises(ValueError, match="no text files|No text files"):
        open_source(tmp_path / "s")


def test_what_the_cache_holds_does_not_move_the_random_state(tmp_path: Path) -> None:
    # One process a node fills the cache: weights drawn afterwards would differ between ranks, and runs.
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "one"}\n{"text": "another"}\n')
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    packs = [{"input_ids": [1, 2, 3, 4, 5], "lengths": [3, 2]}]
    for source, packed in ((str(file), "off"), (rows, "off"), (packs, "sequences")):
        before = torch.get_rng_state()
        data = THDDataModule(source, capacity=16, packed=packed, cache_dir=tmp_path / "fresh")
        data.prepare_data()
        data.setup("fit")
        assert torch.equal(torch.get_rng_state(), before), source
        assert len(data.train_dataloader()) == 1
