"""Groups of parameters that a finetuning callback has added -> in the optimizers before their states load.

Lightning restores such callbacks after the checkpoint of a sharded model, whose optimizers load with it.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning

from lightning_thd.strategies.checkpoints import META, is_folder


def restore_groups(trainer: Any, path: Path, *, weights_only: bool | None = None) -> None:
    """Add the groups again that ``BaseFinetuning`` callbacks had added when a checkpoint was written.

    Args:
        trainer: a Lightning Trainer with its optimizers set up.
        path: of the checkpoint, a folder or a file.
        weights_only: as of ``torch.load``.
    """
    callbacks = [callback for callback in trainer.callbacks if isinstance(callback, BaseFinetuning)]
    if not callbacks:
        return
    folder = is_folder(path)
    found = torch.load(
        path / META if folder else path, mmap=not folder, map_location="cpu", weights_only=bool(weights_only)
    )
    for callback in callbacks:
        state = found.get("callbacks", {}).get(callback.state_key)
        if state is not None:
            callback.load_state_dict(copy.deepcopy(state))
            callback.on_fit_start(trainer, trainer.lightning_module)
