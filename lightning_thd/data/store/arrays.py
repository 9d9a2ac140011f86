"""Named arrays <-> a folder of .npy files: written atomically, checked when opened, mapped into memory."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from numpy.typing import NDArray

from lightning_thd.data.store.lock import CacheError, build_once

Arrays = dict[str, NDArray[Any]]

_HEADER_BYTES = 128  # of an .npy file of one axis; numpy writes as many
_EDGE_BYTES = 1 << 20  # hashed at both ends of a file: a torn header or tail is found without reading it all
_BLOCK = 1 << 22  # values converted at a time: 32 MiB


class ArrayWriter:
    """Writes a one-dimensional .npy file piece by piece, in the smallest unsigned type that fits.

    Args:
        path: the file; overwritten unless ``keep`` says otherwise.
        dtype: type to begin with; an unsigned one is widened when a value asks for it.
        keep: values at the beginning of the file that stay, for going on after a kill.
    """

    def __init__(self, path: Path, dtype: type[np.integer[Any]] = np.uint16, *, keep: int = 0) -> None:
        self._path, self._dtype, self._count = path, np.dtype(dtype), keep
        narrow = path.with_suffix(".narrow")
        if narrow.exists():  # killed while it was widened
            os.replace(narrow, path)
        if not keep:
            self._file = _begin(path, self._dtype)
            return
        self._file = path.open("r+b")
        np.lib.format.read_magic(self._file)
        self._dtype = np.lib.format.read_array_header_1_0(self._file)[2]
        self._file.truncate(_HEADER_BYTES + keep * self._dtype.itemsize)
        self._file.seek(0, os.SEEK_END)

    def append(self, values: NDArray[np.integer]) -> None:
        """Append integers ``[K]`` to the file."""
        if self._dtype.kind == "u" and values.size and int(values.max()) > np.iinfo(self._dtype).max:
            self._widen(np.dtype(np.uint32 if int(values.max()) < 2**32 else np.uint64))
        bounds = np.iinfo(self._dtype)
        if values.size and (int(values.max()) > bounds.max or int(values.min()) < bounds.min):
            raise ValueError(
                f"{int(values.max() if values.max() > bounds.max else values.min())} does not fit "
                f"{self._dtype}, in which {self._path.stem} are kept."
            )
        self._file.write(np.ascontiguousarray(values, self._dtype).data)
        self._count += len(values)

    def truncate(self, count: int) -> None:
        """Keep the first ``count`` values alone."""
        self._file.flush()
        self._file.truncate(_HEADER_BYTES + count * self._dtype.itemsize)
        self._file.seek(0, os.SEEK_END)
        self._count = count

    def flush(self) -> int:
        """Flush everything written, and return the number of values so far."""
        self._file.flush()
        return self._count

    def __enter__(self) -> ArrayWriter:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        """Complete the header with the final size; a second call changes nothing."""
        if self._file.closed:
            return
        self._file.seek(0)
        self._file.write(_header(self._dtype, self._count))
        self._file.close()

    def _widen(self, dtype: np.dtype[Any]) -> None:
        self.close()
        narrow = self._path.with_suffix(".narrow")
        os.replace(self._path, narrow)
        self._file, self._dtype = _begin(self._path, dtype), dtype
        values = load_array(narrow)
        for start in range(0, len(values), _BLOCK):
            self._file.write(values[start : start + _BLOCK].astype(dtype).data)
        narrow.unlink()


def _begin(path: Path, dtype: np.dtype[Any]) -> BinaryIO:
    file = path.open("wb")
    file.write(_header(dtype, 0))
    return file


def _header(dtype: np.dtype[Any], count: int) -> bytes:
    # Format version 1.0 of numpy.lib.format: magic, version, size of the rest, a dict padded with blanks.
    described = repr(
        {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    )
    size = _HEADER_BYTES - 10
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", size) + described.ljust(size - 1).encode() + b"\n"


def load_array(path: Path) -> NDArray[Any]:
    """Map an .npy file into memory; read an empty one, which cannot be mapped."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except ValueError:
        if path.stat().st_size <= _HEADER_BYTES:
            return np.load(path, allow_pickle=False)  # type: ignore[no-any-return]
        raise


@contextmanager
def new_folder(folder: str | Path, *, version: int) -> Iterator[Path]:
    """Create a temporary folder for .npy files, renamed to ``folder``, which it replaces, on success.

    ``folder`` is either there and whole, or not there; of two writers the later one wins. Caches, which many
    processes want at once, are built by ``build_once`` instead.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        yield partial
        seal(partial, version=version)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    except OSError:
        if not (folder / "meta.json").is_file():  # else another process was first, with the same content
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def seal(folder: Path, *, version: int) -> None:
    """Write sizes and hashes of a folder's .npy files, by which ``open_arrays`` detects damage."""
    files = {path.stem: _mark(path) for path in sorted(folder.glob("*.npy"))}
    (folder / "meta.json").write_text(json.dumps({"version": version, "files": files}))


def save_arrays(folder: str | Path, arrays: Mapping[str, NDArray[Any]], *, version: int) -> None:
    """Write arrays into a folder in the form that ``open_arrays`` reads."""
    with new_folder(folder, version=version) as partial:
        for name, values in arrays.items():
            np.save(partial / f"{name}.npy", values)


def open_arrays(folder: str | Path, *, version: int) -> Arrays:
    """Map the arrays of a folder into memory, after checking their sizes and hashes.

    Raises:
        ValueError: when a file is missing, has another size than was written, or other bytes in its first or
            last MiB.
    """
    folder = Path(folder)
    try:
        meta = json.loads((folder / "meta.json").read_text())
        if meta["version"] != version:
            raise ValueError(f"version {meta['version']} was found, {version} wanted")
        for name, mark in meta["files"].items():
            if _mark(folder / f"{name}.npy") != mark:
                raise ValueError(f"{name}.npy is not what was written")
        return {name: load_array(folder / f"{name}.npy") for name in meta["files"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise ValueError(f"The folder {folder} cannot be read ({err}). Delete it; it is built anew.") from err


def _mark(path: Path) -> list[int | str]:
    """Return the size of a file and a hash of its beginning and end."""
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        digest.update(file.read(_EDGE_BYTES))
        if size > _EDGE_BYTES:
            file.seek(max(_EDGE_BYTES, size - _EDGE_BYTES))
            digest.update(file.read())
    return [size, digest.hexdigest()]


def cached_arrays(
    kind: str,
    key: Mapping[str, Any] | None,
    build: Callable[[], Mapping[str, NDArray[Any]]],
    *,
    version: int,
    cache_dir: str | Path | None = None,
) -> Arrays:
    """Open the arrays that were built from the same key before, or build, save and open them.

    Args:
        kind: first word of the folder's name.
        key: everything the result depends on, JSON-serialisable; None builds without a cache.
        build: makes the arrays; called when nothing, or something unreadable, is cached.
        version: of the content.
        cache_dir: where caches are kept; ``$XDG_CACHE_HOME/lightning_thd`` by default.
    """
    if key is None:
        return dict(build())
    folder = cached_folder(kind, key, cache_dir)
    found = reopen(folder, version=version)
    if found is not None:
        return found
    built: Arrays = {}

    def write(place: Path) -> None:
        built.update(build())
        for name, values in built.items():
            np.save(place / f"{name}.npy", values)
        seal(place, version=version)

    try:
        build_once(folder, write)
    except CacheError as err:  # a read-only home costs time at the next start and nothing else
        rank_zero_warn(f"{err} The next run builds it again.")
        return built or dict(build())
    return open_arrays(folder, version=version)


def reopen(folder: Path, *, version: int) -> Arrays | None:
    """Open a cached folder; None where it is missing or, with a warning, where it cannot be read."""
    if not folder.exists():
        return None
    try:
        return open_arrays(folder, version=version)
    except ValueError as err:
        rank_zero_warn(f"{err} It is built anew now.")
        away = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        with suppress(OSError):
            os.replace(folder, away)
        shutil.rmtree(away, ignore_errors=True)
        return None


def cached_folder(kind: str, key: Mapping[str, Any], cache_dir: str | Path | None) -> Path:
    """Return the cache folder of a kind and a key; another key gives another folder."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return cache_folder(cache_dir) / f"{kind}-{digest}"


def cache_folder(cache_dir: str | Path | None) -> Path:
    """Return ``cache_dir``, or the user's cache folder for this package."""
    if cache_dir is not None:
        return Path(cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_thd"
