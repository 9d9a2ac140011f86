"""A file -> a hash of its content, whatever its name, computed again only when the file was changed."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from lightning_thd.data.store.arrays import cache_folder

_WHOLE_BYTES = 1 << 30  # larger files are known by samples of their content and by when they were touched
_REMEMBER_BYTES = 1 << 26  # smaller files are hashed in less than 0.1 s
_BLOCK_BYTES = 1 << 20
_SAMPLES = 64


def content_of(path: Path, cache_dir: str | Path | None = None) -> str:
    """Hash a file in hex: all of it up to 1 GiB, of a larger one 64 MiB spread over it and its change time.

    The hash of a file of more than 64 MiB is remembered with the file's inode, size, and times. The change
    time (ctime) is among them, which, other than the time of modification, no program can set back: a file
    that was replaced by one of the same size and time is read again.
    """
    status = path.stat()
    if status.st_size <= _REMEMBER_BYTES:
        return _hash(path, status.st_size, status.st_ctime_ns)
    stamp = [status.st_ino, status.st_dev, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    memory = cache_folder(cache_dir) / "hashes" / f"{name}.json"
    try:
        known = json.loads(memory.read_text())
        if known["stamp"] == stamp:
            return str(known["content"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # never hashed, or the memory is damaged
    content = _hash(path, status.st_size, status.st_ctime_ns)
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        partial = memory.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"stamp": stamp, "content": content}))
        os.replace(partial, memory)
    except OSError:
        pass  # it is hashed again the next time
    return content


def _hash(path: Path, size: int, changed_ns: int) -> str:
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
            return digest.hexdigest()
        for k in range(_SAMPLES):
            file.seek((size - _BLOCK_BYTES) * k // (_SAMPLES - 1))
            digest.update(file.read(_BLOCK_BYTES))
    digest.update(str(changed_ns).encode())
    return digest.hexdigest()
