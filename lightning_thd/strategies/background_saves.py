"""A checkpoint of sharded weights -> a folder that is written while training goes on.

A folder is written under another name and renamed when every rank's part is on the disk; until then the
checkpoint before it stays, even one that a callback has asked to remove.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.strategies.model_parallel import _METADATA_FILENAME
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd.strategies.checkpoints import CURRENT, save_averaging


class BackgroundSaves:
    """Writes one checkpoint at a time in a thread of its own; a collective of all ranks to make.

    Args:
        is_first: whether this rank renames and removes folders.
    """

    def __init__(self, *, is_first: bool) -> None:
        # A group of its own: two threads that share one would receive each other's messages.
        self._group = dist.new_group(backend="gloo")
        self._is_first = is_first
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    def save(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Begin to write a copy of a checkpoint to a folder, once the one before is written; a collective.

        Raises:
            OSError: when the checkpoint before this one could not be written; also other errors of torch.
        """
        self.wait()
        part = path.with_name(f".{path.name}.part")
        if self._is_first:
            shutil.rmtree(part, ignore_errors=True)  # of a job that was killed
            part.mkdir(parents=True)
        dist.barrier(group=self._group)
        if CURRENT in checkpoint:
            save_averaging(checkpoint, part, folder=True)
        sharded = {"state_dict": checkpoint.pop("state_dict")}
        for i, state in enumerate(checkpoint.pop("optimizer_states", [])):
            sharded[f"optimizer_{i}"] = state
        meta = io.BytesIO()
        torch.save(checkpoint, meta)
        written: Any = dcp.state_dict_saver.async_save(sharded, checkpoint_id=part, process_group=self._group)
        self._running = self._thread.submit(self._finish, written, part, path, meta.getvalue())

    def _finish(self, written: Future[Any], part: Path, path: Path, meta: bytes) -> None:
        written.result()  # on the first rank: every rank's part is written
        if not self._is_first:
            return
        with (part / _METADATA_FILENAME).open("wb") as file:
            file.write(meta)
            file.flush()
            os.fsync(file.fileno())
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            path.rename(old)
        part.replace(path)
        shutil.rmtree(old, ignore_errors=True)

    def remove(self, removal: Callable[[], None]) -> None:
        """Run ``removal`` of a checkpoint on the first rank, after the one that is being written is whole."""
        if not self._is_first:
            return
        if self._running is None:
            removal()
        else:
            self._thread.submit(self._after, self._running, removal)

    def _after(self, running: Future[None], removal: Callable[[], None]) -> None:
        if running.exception() is None:  # else the older one is all there is
            removal()

    def wait(self) -> None:
        """Wait until the checkpoint is written, all ranks for the first one; a collective.

        Raises:
            OSError: when it could not be written; also other errors of torch.
        """
        if self._running is None:
            return
        self.close()
        dist.barrier(group=self._group)

    def close(self) -> None:
        """Wait until this rank's part is written, and on the first rank the whole; no collective."""
        running, self._running = self._running, None
        if running is not None:
            running.result()
            self._thread.submit(lambda: None).result()  # what was to be removed behind it is


def refuse_links(callbacks: Iterable[L.Callback]) -> None:
    """Refuse callbacks that link to a checkpoint before it is whole: a killed job would break the link.

    Raises:
        MisconfigurationException: naming the option.
    """
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.save_last == "link":
            raise MisconfigurationException(
                "ModelCheckpoint(save_last='link') with checkpoints that are written in the background: a "
                "job killed meanwhile would leave last.ckpt pointing nowhere. Use save_last=True."
            )
