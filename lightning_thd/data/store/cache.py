"""Named arrays <-> folders of .npy files in the cache. One process builds a folder, and all map it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from lightning_thd.warnings import DataWarning, warn

Arrays = dict[str, NDArray[Any]]

_EDGE_BYTES = 1 << 20  # hashed at both ends of an .npy file, which finds a torn header or tail
_WHOLE_BYTES = 1 << 26  # larger source files are identified by samples of their content and their change time
_BLOCK_BYTES = 1 << 20  # read at once
_HEADER_BYTES = 128  # size of an .npy file of an empty array with one axis
_SAMPLES = 64  # blocks that are hashed of a source file above _WHOLE_BYTES
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, a full quota, a file above the size limit
_NUMPY_FULL = ("requested and", "Not enough free space")  # numpy's errors of these, which have no errno


class CacheError(OSError):
    """Raised when a cache folder cannot be written; the message names the folder and the remedy."""


def cache_folder(cache_dir: str | Path | None) -> Path:
    """Return ``cache_dir``, or the user's cache folder for this package."""
    if cache_dir is not None:
        return Path(cache_dir)

    # The XDG specification says that an empty variable counts as unset.
    users_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(users_cache) / "lightning_thd"


def cached_folder(kind: str, key: Mapping[str, Any], cache_dir: str | Path | None) -> Path:
    """Return the cache folder of a kind and a key; every key has its own folder."""
    text = json.dumps(key, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    return cache_folder(cache_dir) / f"{kind}-{digest}"


def build_once(folder: Path, build: Callable[[Path], None], *, resume: bool = False) -> bool:
    """Build a folder unless it exists, while other processes wait; return whether this process built it.

    Args:
        folder: the folder, which appears only once it is complete.
        build: writes the files into another folder, which then gets the name ``folder``.
        resume: whether ``build`` gets the files that it wrote before it was killed or failed.

    Raises:
        CacheError: the folder cannot be written.
    """
    with cache_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if folder.is_dir():
                return False
            return _build(folder, build, resume=resume)


def _build(folder: Path, build: Callable[[Path], None], *, resume: bool) -> bool:
    """Build a folder beside its final place and move it there; False if it appeared there meanwhile."""
    if resume:
        unfinished = folder.parent / f".{folder.name}.unfinished"
        unfinished.mkdir(exist_ok=True)
    else:
        unfinished = _new_folder_beside(folder)

    try:
        build(unfinished)
        os.rename(unfinished, folder)
    except BaseException as err:
        # On file systems without working locks, another process may have built the same content.
        built_elsewhere = isinstance(err, OSError) and folder.is_dir()
        # Nothing is kept after a ValueError or TypeError, because a retry would fail in the same way.
        if not resume or built_elsewhere or isinstance(err, ValueError | TypeError):
            shutil.rmtree(unfinished, ignore_errors=True)
        if built_elsewhere:
            return False
        raise
    return True


def _new_folder_beside(folder: Path) -> Path:
    """Make an empty folder on the file system of ``folder``, from where a move is atomic."""
    # Not with mkdtemp(), which makes folders that only this user can open.
    beside = folder.parent / f".{folder.name}.{uuid4().hex}"
    beside.mkdir()
    return beside


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; the operating system frees the lock of a process that dies."""
    path = folder.parent / f".{folder.name}.lock"
    with FileLock(path):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # filelock retries if the file was removed while it waited


@contextmanager
def cache_errors(folder: Path) -> Iterator[None]:
    """Convert a full disk, or a file-system error in the cache, to a ``CacheError``."""
    try:
        yield
    except CacheError:
        raise
    except OSError as err:
        is_full = err.errno in _FULL or any(text in str(err) for text in _NUMPY_FULL)
        if not is_full and not _is_about(err, folder):
            raise
        raise CacheError(
            err.errno or errno.ENOSPC,
            f"The cache {folder} cannot be written ({err}). Pass cache_dir=, a writable folder with space.",
        ) from err


def _is_about(err: OSError, folder: Path) -> bool:
    """Return whether an error names a file beside or in ``folder``, or a folder above it."""
    path = str(err.filename or "")
    return bool(path) and (path.startswith(str(folder.parent)) or str(folder).startswith(path))


def seal(folder: Path, *, version: int) -> None:
    """Write the size and hashed ends of each .npy file, by which ``open_arrays`` detects most damage."""
    paths = sorted(folder.glob("*.npy"))
    meta = {
        "version": version,
        "files": {path.stem: _size_and_ends(path) for path in paths},
        # Not compared when arrays are opened: it makes a hash of meta.json identify the content.
        "content": [content_of(path) for path in paths],
    }
    (folder / "meta.json").write_text(json.dumps(meta))


def save_arrays(folder: str | Path, arrays: Mapping[str, NDArray[Any]], *, version: int) -> None:
    """Write arrays to a new folder, and replace ``folder`` with it when all are written.

    Raises:
        ValueError: ``folder`` holds files that this function has not written.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / "meta.json").is_file():
        raise ValueError(f"{folder} holds other files, which would be deleted. Name a new folder.")

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = _new_folder_beside(folder)
    try:
        _write(partial, arrays, version)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(folder: Path, arrays: Mapping[str, NDArray[Any]], version: int) -> None:
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
    seal(folder, version=version)


def open_arrays(folder: str | Path, *, version: int) -> Arrays:
    """Map the arrays of a folder into memory, after checking the size and the ends of each file.

    Raises:
        ValueError: a file is missing or was changed, or the folder has another version.
    """
    folder = Path(folder)
    try:
        meta = json.loads((folder / "meta.json").read_text())
        if meta["version"] != version:
            raise ValueError(f"it has version {meta['version']}, wanted {version}")
        for name, mark in meta["files"].items():
            if _size_and_ends(folder / f"{name}.npy") != mark:
                raise ValueError(f"{name}.npy was damaged or changed")
        return {name: _mapped(folder / f"{name}.npy") for name in meta["files"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise ValueError(f"The folder {folder} cannot be read: {err}. Delete it to build it again.") from err


def _mapped(path: Path) -> NDArray[Any]:
    """Map an .npy file into memory; an empty array, which cannot be mapped, is read."""
    is_empty = path.stat().st_size <= _HEADER_BYTES
    array: NDArray[Any] = np.load(path, mmap_mode=None if is_empty else "r")
    return array


def _size_and_ends(path: Path) -> list[int | str]:
    """Return a file's size in bytes, and a hash of its first and last MiB."""
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        digest.update(file.read(_EDGE_BYTES))
        if size > _EDGE_BYTES:
            file.seek(max(_EDGE_BYTES, size - _EDGE_BYTES))
            digest.update(file.read())
    return [size, digest.hexdigest()]


def reopen(folder: Path, *, version: int) -> Arrays | None:
    """Open a cached folder; None if it is missing. If it cannot be read, warn, delete it and return None."""
    if not folder.exists():
        return None
    try:
        return open_arrays(folder, version=version)
    except ValueError as err:
        warn(f"{str(err).rpartition(' Delete')[0]} It is built again now.", DataWarning)
        shutil.rmtree(folder, ignore_errors=True)
        return None


def cached_arrays(
    kind: str,
    key: Mapping[str, Any] | None,
    build: Callable[[], Mapping[str, NDArray[Any]]],
    *,
    version: int,
    cache_dir: str | Path | None = None,
) -> Arrays:
    """Open the arrays saved under the same key, or build and save them; without a key, only build them."""
    if key is None:
        return dict(build())
    folder = cached_folder(kind, key, cache_dir)
    arrays = reopen(folder, version=version)
    if arrays is not None:
        return arrays

    built: Arrays = {}

    def write(new_folder: Path) -> None:
        built.update(build())
        _write(new_folder, built, version)

    try:
        build_once(folder, write)
    except CacheError as err:  # go on without a cache; only the next start takes longer
        warn(f"{err} The next run builds it again.", DataWarning)
        return built or dict(build())
    return open_arrays(folder, version=version)


def content_of(path: Path) -> str:
    """Return a hexadecimal hash of a file; above 64 MiB, of 64 samples of 1 MiB and of its change time."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
            return digest.hexdigest()

        for k in range(_SAMPLES):
            file.seek((size - _BLOCK_BYTES) * k // (_SAMPLES - 1))
            digest.update(file.read(_BLOCK_BYTES))
    # A change between the samples is seen by its time. Programs cannot set ctime, as they can mtime.
    digest.update(str(path.stat().st_ctime_ns).encode())
    return digest.hexdigest()
