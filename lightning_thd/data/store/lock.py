"""A folder and a function that builds it -> the folder, built by one of all processes, also over a network.

The lock is a file made with O_EXCL, which shared file systems keep exclusive too. Its owner touches it every
few seconds; one that was not touched for a minute, by the file system's own clock, or whose process is gone
from this machine, was left by a job that died.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

_BEAT_S = 5.0
_STALE_S = 60.0
_POLL_S = 0.05
_TELL_AFTER_S = 10.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_WAIT_ENV = "LIGHTNING_THD_CACHE_TIMEOUT"  # seconds


class CacheError(OSError):
    """Raised when a cache folder cannot be written; the message names it and the remedy."""


def build_once(folder: Path, build: Callable[[Path], None], *, resume: bool = False) -> bool:
    """Build a folder unless it exists, while other processes wait; return whether this one built it.

    Args:
        folder: is either there and whole, or not there.
        build: fills a folder that is given to it; with ``resume`` perhaps one that a killed job left.
        resume: keep what a killed build has done for the next one.

    Raises:
        CacheError: when the folder cannot be written.
        TimeoutError: when another process builds longer than LIGHTNING_THD_CACHE_TIMEOUT seconds (6 h).
    """
    with told(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder) as owner:
            if owner is None:
                return False
            place = _partial(folder, owner, resume)
            try:
                build(place)
                owner.check()
                _publish(place, folder)
            except BaseException as err:
                if not resume or isinstance(err, ValueError | TypeError):  # the same would come again
                    shutil.rmtree(place, ignore_errors=True)
                raise
            return True


@contextmanager
def told(folder: Path) -> Iterator[None]:
    """Convert a file-system error at a cache to a ``CacheError`` that names the cache and the remedy."""
    try:
        yield
    except (TimeoutError, CacheError):
        raise
    except OSError as err:
        place = str(err.filename or "")
        at_cache = bool(place) and (place.startswith(str(folder.parent)) or str(folder).startswith(place))
        if err.errno not in _FULL and not at_cache:
            raise  # of the source, which says so itself
        what = "the disk is full" if err.errno in _FULL else str(err)
        raise CacheError(
            err.errno,
            f"The cache {folder} cannot be written ({what}). Pass cache_dir= (or set XDG_CACHE_HOME), a "
            "folder with room that you may write to.",
        ) from err


def _partial(folder: Path, owner: _Owner, resume: bool) -> Path:
    if not resume:
        return Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    place = folder.parent / f".{folder.name}.unfinished"
    if place.is_dir() and not owner.may_resume:
        # Its writer was on another machine and may still live: leave its files to it and work on a copy.
        copy = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        shutil.copytree(place, copy, dirs_exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        with suppress(OSError):
            os.replace(copy, place)
            return place
        return copy
    place.mkdir(exist_ok=True)
    return place


def _publish(place: Path, folder: Path) -> None:
    try:
        os.rename(place, folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(place, ignore_errors=True)  # another was first, with the same content


class _Owner:
    """Holds a lock file and keeps its modification time fresh from a thread."""

    def __init__(self, path: Path, token: str, *, may_resume: bool) -> None:
        self._path, self._token, self.may_resume = path, token, may_resume
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._over.wait(_BEAT_S):
            with suppress(OSError):
                os.utime(self._path)

    def check(self) -> None:
        """Raise if another process has taken the lock over, so that this one publishes nothing."""
        if _read(self._path).get("token") != self._token:
            raise TimeoutError(
                f"{self._path} was taken over by another process, because this one did not touch it for "
                f"{_STALE_S:.0f} s. Start again: what is built by then is used."
            )

    def release(self) -> None:
        self._over.set()
        self._thread.join()
        if _read(self._path).get("token") == self._token:
            with suppress(OSError):
                self._path.unlink()


@contextmanager
def _locked(folder: Path) -> Iterator[_Owner | None]:
    """Hold the lock of a folder that is still to be built; yield None when the folder exists already."""
    path = folder.parent / f".{folder.name}.lock"
    owner = _acquire(folder, path)
    try:
        yield owner
    finally:
        if owner is not None:
            owner.release()


def _acquire(folder: Path, path: Path) -> _Owner | None:
    began, told_who, may_resume = time.monotonic(), False, True
    limit = float(os.environ.get(_WAIT_ENV, 6 * 3600))
    while True:
        if folder.is_dir():
            return None
        token = uuid.uuid4().hex
        if _make(path, token):
            if not folder.is_dir():
                return _Owner(path, token, may_resume=may_resume)
            with suppress(OSError):
                path.unlink()
            return None
        left = _left_behind(path)
        if left is not None:
            _take_away(path, left)
            may_resume = may_resume and left.get("host") == socket.gethostname()
            continue
        waited = time.monotonic() - began
        if waited > limit:
            raise TimeoutError(
                f"{path} is held by {_read(path)} for more than {limit:.0f} s. Wait for that job; if there "
                f"is none, delete the file. {_WAIT_ENV} sets how long to wait, cache_dir= another place."
            )
        if waited > _TELL_AFTER_S and not told_who:
            rank_zero_info(f"Waiting for {folder}, which another process prepares: {_read(path)}")
            told_who = True
        time.sleep(_POLL_S)


def _make(path: Path, token: str) -> bool:
    """Create the lock file atomically, with all its content."""
    draft = path.with_name(f"{path.name}.{token}")
    draft.write_text(json.dumps({"token": token, "host": socket.gethostname(), "pid": os.getpid()}))
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        try:
            with path.open("x") as file:
                file.write(draft.read_text())
        except FileExistsError:
            return False
    finally:
        with suppress(OSError):
            draft.unlink()
    return True


def _read(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _left_behind(path: Path) -> dict[str, object] | None:
    """Return the content of a lock whose owner is gone, or None while its owner lives."""
    held = _read(path)
    here = held.get("host") == socket.gethostname() and isinstance(held.get("pid"), int)
    if here and not _lives(int(str(held["pid"]))):
        return held
    try:
        touched = path.stat().st_mtime
        if time.time() - touched < _STALE_S / 2:  # a first look; clocks of machines may differ
            return None
        probe = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        probe.touch()  # the file system's clock, not ours
        now = probe.stat().st_mtime
        probe.unlink()
    except OSError:
        return None
    return held if now - touched > _STALE_S else None


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _take_away(path: Path, left: dict[str, object]) -> None:
    """Remove a lock that its owner left behind, unless another process has taken it over meanwhile."""
    away = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    if _read(path) != left:
        return
    with suppress(OSError):
        os.rename(path, away)
        if _read(away) != left:  # it was a new one: put it back
            with suppress(OSError):
                os.link(away, path)
        else:
            rank_zero_warn(f"{path} was left by a process that is gone, {left}; its work is taken up.")
        away.unlink()
