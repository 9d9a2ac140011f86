"""Groups of parameters that a finetuning callback has added -> in the optimizers before their states load.

Lightning restores such callbacks after the checkpoint of a sharded model, whose optimizers load with it. A
stage of a pipeline knows the names of its own parameters alone, and the first writes for all.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning

from lightning_thd.strategies.checkpoints import META, is_folder

_GROUPS = "internal_optimizer_metadata"  # Lightning's name of the groups in a callback's state


def restore_groups(
    trainer: Any, path: Path, *, weights_only: bool | None = None, stage: bool = False
) -> None:
    """Add the groups again that ``BaseFinetuning`` callbacks had added when a checkpoint was written.

    Args:
        trainer: a Lightning Trainer with its optimizers set up.
        path: of the checkpoint, a folder or a file.
        weights_only: as of ``torch.load``.
        stage: this rank holds a part of the parameters.
    """
    callbacks = _finetuning(trainer.callbacks)
    if not callbacks:
        return
    folder = is_folder(path)
    found = torch.load(
        path / META if folder else path, mmap=not folder, map_location="cpu", weights_only=bool(weights_only)
    )
    for callback in callbacks:
        state = found.get("callbacks", {}).get(callback.state_key)
        if state is not None:
            state = copy.deepcopy(state)
            if stage:
                _keep(state, {name for name, _ in trainer.lightning_module.named_parameters()})
            callback.load_state_dict(state)
            callback.on_fit_start(trainer, trainer.lightning_module)


def gather_names(checkpoint: dict[str, Any], callbacks: Iterable[Any], group: dist.ProcessGroup) -> None:
    """Add every stage's names to the groups that callbacks of a checkpoint list; a collective.

    All stages have the same groups: their optimizer states are refused otherwise.
    """
    for callback in _finetuning(callbacks):
        state = checkpoint.get("callbacks", {}).get(callback.state_key)
        if state is None:
            continue
        state = checkpoint["callbacks"][callback.state_key] = copy.deepcopy(state)
        own = {i: [entry["params"] for entry in groups] for i, groups in state[_GROUPS].items()}
        found: list[Any] = [None] * group.size()
        dist.all_gather_object(found, own, group=group)
        for i, groups in state[_GROUPS].items():
            for k, entry in enumerate(groups):
                entry["params"] = list(dict.fromkeys(name for stage in found for name in stage[i][k]))


def keep_own_names(checkpoint: dict[str, Any], callbacks: Iterable[Any], names: Iterable[str]) -> None:
    """Drop from the groups that callbacks of a checkpoint list what other stages hold, in place."""
    for callback in _finetuning(callbacks):
        if (state := checkpoint.get("callbacks", {}).get(callback.state_key)) is not None:
            _keep(state, set(names))


def _keep(state: dict[str, Any], names: set[str]) -> None:
    for groups in state[_GROUPS].values():
        for entry in groups:
            entry["params"] = [name for name in entry["params"] if name in names]


def _finetuning(callbacks: Iterable[Any]) -> list[BaseFinetuning]:
    return [callback for callback in callbacks if isinstance(callback, BaseFinetuning)]
