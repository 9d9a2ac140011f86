"""Parameter groups that are empty on a rank -> kept when optimizer states load.

A group of the embedding alone, say, is empty on every pipeline stage but the first. torch loads the options
of one empty group at most, and only where it is the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer


def any_empty(optimizers: Iterable[Optimizer]) -> bool:
    """Return whether some group of some optimizer has no parameters."""
    return any(not group["params"] for optimizer in optimizers for group in optimizer.param_groups)


def set_state(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], options: StateDictOptions | None = None
) -> None:
    """Load an optimizer's state by name, and the options of its empty groups; a collective.

    Args:
        model: whose parameters the names are.
        optimizer: that is to load it, with its groups in the order of the state's.
        state: as ``get_optimizer_state_dict`` gives it.
        options: of torch's ``set_optimizer_state_dict``.
    """
    groups, saved = optimizer.param_groups, state["param_groups"]
    empty = {i: group for i, group in enumerate(groups) if not group["params"]}
    if not empty:
        set_optimizer_state_dict(model, optimizer, optim_state_dict=dict(state), options=options)
        return
    for i, group in empty.items():
        given = saved[i] if i < len(saved) else {}
        group.update({name: value for name, value in given.items() if name != "params"})
    optimizer.param_groups = [group for i, group in enumerate(groups) if i not in empty]
    try:
        if optimizer.param_groups:
            filled = [group for i, group in enumerate(saved) if i not in empty]
            whole = {**state, "param_groups": filled}
            set_optimizer_state_dict(model, optimizer, optim_state_dict=whole, options=options)
    finally:
        for i, group in empty.items():
            optimizer.param_groups.insert(i, group)


def load_groups_of_folder(path: Path, optimizers: Iterable[Optimizer], model: nn.Module) -> None:
    """Load the states of optimizers with empty groups from a checkpoint folder; a collective.

    Args:
        path: of the folder.
        optimizers: in the order in which they were saved.
        model: sharded, whose parameters they hold.
    """
    for i, optimizer in enumerate(optimizers):
        name = f"optimizer_{i}"
        found = {name: get_optimizer_state_dict(model, optimizer)}
        load(found, checkpoint_id=path)
        set_state(model, optimizer, found[name])
