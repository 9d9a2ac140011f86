"""Folders of arrays: whole or not there, checked when opened, built anew when torn."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_thd.data.store.arrays import (
    ArrayWriter,
    cached_arrays,
    load_array,
    new_folder,
    open_arrays,
    save_arrays,
)


@given(parts=st.lists(st.lists(st.integers(0, 2**33), max_size=5), max_size=6))
def test_a_grown_file_is_what_numpy_would_have_saved(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[int]]
) -> None:
    file = tmp_path_factory.mktemp("a") / "x.npy"
    with ArrayWriter(file) as writer:
        for part in parts:
            writer.append(np.array(part, np.int64))
    flat = [x for part in parts for x in part]
    found = load_array(file)
    assert found.tolist() == flat
    largest = max(flat, default=0)
    assert found.dtype == (np.uint16 if largest < 2**16 else np.uint32 if largest < 2**32 else np.uint64)


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail() -> None:
        with new_folder(tmp_path / "f", version=1) as partial:
            np.save(partial / "x.npy", np.arange(3))
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        fail()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "meta", "version"])
def test_damage_is_found_named_and_built_anew(tmp_path: Path, damage: str) -> None:
    built: list[int] = []

    def build() -> dict[str, np.ndarray]:
        built.append(1)
        return {"x": np.arange(1000)}

    for _ in range(2):
        found = cached_arrays("k", {"a": 1}, build, version=1, cache_dir=tmp_path)
    assert isinstance(found["x"], np.memmap)
    assert len(built) == 1
    [folder] = tmp_path.iterdir()
    data = (folder / "x.npy").read_bytes()
    if damage == "truncate":
        (folder / "x.npy").write_bytes(data[:-8])
    elif damage == "flip":
        (folder / "x.npy").write_bytes(data[:-1] + b"\x7f")
    elif damage == "remove":
        (folder / "x.npy").unlink()
    elif damage == "meta":
        (folder / "meta.json").write_text("[")
    version = 2 if damage == "version" else 1
    with pytest.raises(ValueError, match=r"The folder .* cannot be read \(.*\). Delete it; it is built anew"):
        open_arrays(folder, version=version)
    with pytest.warns(UserWarning, match="It is built anew now"):
        again = cached_arrays("k", {"a": 1}, build, version=version, cache_dir=tmp_path)
    assert again["x"].tolist() == list(range(1000))
    assert len(built) == 2


def test_without_a_key_nothing_is_kept(tmp_path: Path) -> None:
    cached_arrays("k", None, lambda: {"x": np.arange(3)}, version=1, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.warns(UserWarning, match="cannot be written .*Pass cache_dir="):
        found = cached_arrays("k", {}, lambda: {"x": np.arange(3)}, version=1, cache_dir=tmp_path / "file")
    assert found["x"].tolist() == [0, 1, 2]


def test_the_second_of_two_writers_wins(tmp_path: Path) -> None:
    for value in (1, 2):
        save_arrays(tmp_path / "f", {"x": np.full(2, value)}, version=1)
    assert open_arrays(tmp_path / "f", version=1)["x"].tolist() == [2, 2]
    assert os.listdir(tmp_path) == ["f"]
