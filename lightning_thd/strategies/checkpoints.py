"""Checkpoints of any layout -> the form this layout loads; folders are written in the background.

Lightning writes weights and optimizer states of a ``ModelParallelStrategy`` as a folder in torch's
distributed format, and everything else as one file in it. Layers have the names of the whole model on every
stage of a pipeline, so the stages write one folder too.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.strategies.model_parallel import _METADATA_FILENAME, _is_sharded_checkpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, load

from lightning_thd.strategies.axes import cuts_weights
from lightning_thd.strategies.optimizer_states import (
    FRESH,
    by_index,
    complete_groups,
    drop_unknown_options,
    load_states_of_folder,
    load_whole_states,
    parameters_of_folder,
    renamed,
    trained,
    without_fresh,
)


class Checkpoints:
    """Saves and loads the checkpoints of a strategy; ``base`` is always the base strategy's own method."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._background: BackgroundSaves | None = None

    def require_known(self) -> None:
        """Refuse background saves of whole weights, and sharded weights saved as one file."""
        strategy, name = self._strategy, type(self._strategy).__name__
        if not cuts_weights(strategy) and strategy.asynchronous_checkpoints:
            raise MisconfigurationException(
                f"asynchronous_checkpoints=True under {name}, which writes one file of whole weights. Use "
                "Trainer(plugins=[AsyncCheckpointIO()]), or THDModelParallelStrategy."
            )
        if cuts_weights(strategy) and not strategy._save_distributed_checkpoint:
            raise MisconfigurationException(
                f"save_distributed_checkpoint=False under {name}, whose checkpoints are folders that every "
                "rank writes its part of. Leave it True; save_pretrained(folder) writes whole weights."
            )

    @property
    def writes_behind(self) -> bool:
        """Return whether folders are to be written in the background."""
        strategy = self._strategy
        asked = strategy.asynchronous_checkpoints or isinstance(strategy.checkpoint_io, AsyncCheckpointIO)
        return cuts_weights(strategy) and asked

    def open(self) -> None:
        """Prepare for saves in the background; a collective."""
        self._background = self._background or BackgroundSaves(is_first=self._strategy.is_global_zero)

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is whole; a collective."""
        if self._background is not None:
            self._background.wait()

    def close(self) -> None:
        """Wait until this rank's part of the last checkpoint is written; no collective."""
        background, self._background = self._background, None
        if background is not None:
            background.close()

    def save(
        self, base: Callable[..., None], checkpoint: dict[str, Any], filepath: Any, options: Any
    ) -> None:
        """Write a checkpoint, in the background if set."""
        strategy, pipeline = self._strategy, self._strategy._pipeline
        fresh = [i for i, optimizer in enumerate(strategy.optimizers) if not optimizer.state]
        if pipeline is not None:  # one stage may train nothing
            found: list[list[int]] = [[]] * pipeline.channel.ranks
            dist.all_gather_object(found, fresh, group=pipeline.channel.down)
            fresh = [i for i in fresh if all(i in other for other in found)]
        if fresh:
            checkpoint[FRESH] = fresh
        if self._background is not None and options is None:
            self._background.save(checkpoint, Path(strategy.broadcast(filepath)))
            return
        base(checkpoint, filepath, storage_options=options)

    def remove(self, base: Callable[[Any], None], filepath: Any) -> None:
        """Remove a checkpoint, after the one that is being written."""
        if self._background is None:
            base(filepath)
        else:
            self._background.remove(partial(base, filepath))

    def optimizer_state(self, base: Callable[[Any], dict[str, Any]], optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state, empty before its first step, with the names of all stages."""
        strategy, pipeline = self._strategy, self._strategy._pipeline
        if not cuts_weights(strategy):
            return base(optimizer)
        inner = getattr(optimizer, "_optimizer", optimizer)
        fresh = not inner.state
        with trained(inner.state):
            state = base(optimizer)
        if fresh:  # torch has made a step with zero gradients, which Adam would count
            inner.state.clear()
        if pipeline is not None:
            state = complete_groups(renamed(state, pipeline.head_name), pipeline.channel.down)
        return state

    def load(
        self, base: Callable[..., dict[str, Any]], given: Any, weights_only: bool | None
    ) -> dict[str, Any]:
        """Read a checkpoint of any layout: one file, or a folder of sharded weights."""
        strategy, pipeline = self._strategy, self._strategy._pipeline
        self.wait()
        path = Path(strategy.broadcast(given))
        if not cuts_weights(strategy):
            if is_folder(path) and not isinstance(strategy, FSDPStrategy):
                return read_folder(path, weights_only=weights_only)
            return base(given, weights_only=weights_only)
        if is_folder(path):
            names = {} if pipeline is None else pipeline.head_name
            checkpoint = self._load_folder(path, names, weights_only)
        elif pipeline is None:
            checkpoint = self._load_file(base, path, weights_only)
        else:
            raise MisconfigurationException(
                f"{path} is no checkpoint folder, and a pipeline loads only folders. Load the file without "
                "pipeline_parallel_size and save it with THDModelParallelStrategy() once."
            )
        if strategy.optimizers:  # Clear the state torch made for optimizers that had made no step when saved.
            for i in checkpoint.get(FRESH, ()):
                strategy.optimizers[i].state.clear()
        return checkpoint

    def _load_file(
        self, base: Callable[..., dict[str, Any]], path: Path, weights_only: bool | None
    ) -> dict[str, Any]:
        strategy = self._strategy
        # Hidden from Lightning, which would number parameters by the module's order.
        optimizers, strategy.optimizers = strategy.optimizers, []
        try:
            loaded = base(path, weights_only=weights_only)
        finally:
            strategy.optimizers = optimizers
        load_whole_states(loaded.get("optimizer_states", ()), optimizers, strategy.model)
        return loaded

    def _load_folder(self, path: Path, names: Mapping[str, str], weights_only: bool | None) -> dict[str, Any]:
        """Load weights and optimizer states; ``names`` maps names here to names in the folder."""
        model, optimizers = self._strategy.model, self._strategy.optimizers
        weights = {"state_dict": get_model_state_dict(model)}
        load(weights, checkpoint_id=path)
        model.load_state_dict(weights["state_dict"], strict=self._strategy.lightning_module.strict_loading)
        drop_unknown_options(optimizers, path)
        with trained(parameters_of_folder(path, optimizers, model, names)):
            load_states_of_folder(path, optimizers, model, names)
        return _rest_of(path, weights_only)

    def load_optimizers(
        self, base: Callable[[Mapping[str, Any]], None], checkpoint: Mapping[str, Any]
    ) -> None:
        """Load the states of the optimizers, sharded ones too."""
        strategy = self._strategy
        if not cuts_weights(strategy) and "optimizer_states" in checkpoint:
            pairs = zip(without_fresh(checkpoint), strategy.optimizers, strict=False)
            numbered = [by_index(state, optimizer, strategy.lightning_module) for state, optimizer in pairs]
            checkpoint = {**checkpoint, "optimizer_states": numbered}
        base(checkpoint)


class BackgroundSaves:
    """Writes one folder at a time in its own thread. All ranks must construct it together.

    A folder is written under another name and renamed when every rank's part is on the disk. Until then the
    checkpoint before it stays, even one that a callback has asked to remove.
    """

    def __init__(self, *, is_first: bool) -> None:
        # Its own group: two threads that share one would receive each other's messages.
        self._group = dist.new_group(backend="gloo")
        self._is_first = is_first  # the first rank renames and removes folders
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    def save(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Begin to write a copy of a checkpoint to a folder, once the one before is written; a collective."""
        self.wait()
        part = path.with_name(f".{path.name}.part")
        if self._is_first:
            shutil.rmtree(part, ignore_errors=True)  # left by a job that was killed
            part.mkdir(parents=True)
        dist.barrier(group=self._group)
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
        if running.exception() is None:  # Otherwise only the older checkpoint exists; keep it.
            removal()

    def wait(self) -> None:
        """Wait until the checkpoint is written, all ranks for the first one; a collective."""
        if self._running is not None:
            self.close()
            dist.barrier(group=self._group)

    def close(self) -> None:
        """Wait until this rank's part is written, and on the first rank the whole; no collective."""
        running, self._running = self._running, None
        if running is not None:
            running.result()
            self._thread.submit(lambda: None).result()  # Waits also for removals queued behind it.


def is_folder(path: str | Path) -> bool:
    """Return whether a checkpoint is a folder of sharded weights."""
    return bool(_is_sharded_checkpoint(Path(path)))


def read_folder(path: Path, *, weights_only: bool | None = None) -> dict[str, Any]:
    """Read a folder into what an unsharded strategy would save, with optimizer states by parameter name."""
    state = _read(path)
    found = _rest_of(path, weights_only)
    optimizers = sorted(
        (name for name in state if name.startswith("optimizer_")), key=lambda name: int(name.split("_")[1])
    )
    found.update(state_dict=state["state_dict"], optimizer_states=[state[name] for name in optimizers])
    return found


def _rest_of(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Read what a checkpoint holds beside sharded weights: the states of loops and callbacks."""
    folder = path.is_dir()
    file = path / _METADATA_FILENAME if folder else path
    found: dict[str, Any] = torch.load(
        file, mmap=not folder, map_location=None if folder else "cpu", weights_only=bool(weights_only)
    )
    return found


def _read(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = {}
    reader, planner = FileSystemReader(path), _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    return state
