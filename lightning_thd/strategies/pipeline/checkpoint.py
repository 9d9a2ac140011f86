"""States of the stages of a pipeline <-> one checkpoint folder that any layout writes and reads.

Layers have the names of the whole model on every stage, so torch's distributed checkpoint puts them together.
Optimizers need two things more: the list of their parameters, which torch keeps from one rank, and for a head
that is tied to the embedding the embedding's name, which it has elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from lightning_thd.strategies.modules.groups import set_state


def rename_optimizer(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return an optimizer's state with some parameters renamed, in its parameter groups too."""
    groups = [
        {**group, "params": [names.get(name, name) for name in group["params"]]}
        for group in state["param_groups"]
    ]
    kept = {names.get(name, name): value for name, value in state["state"].items()}
    return {"state": kept, "param_groups": groups}


def complete_groups(state: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """Add every stage's parameter names to an optimizer state's groups; a collective.

    Raises:
        ValueError: when stages have different numbers of groups.
    """
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, [entry["params"] for entry in state["param_groups"]], group=group)
    if len({len(groups) for groups in found}) > 1:
        raise ValueError(
            f"The optimizer has {[len(groups) for groups in found]} parameter groups on the stages of the "
            "pipeline. Make the same groups on every rank, empty ones included."
        )
    for i, entry in enumerate(state["param_groups"]):
        entry["params"] = list(dict.fromkeys(name for groups in found for name in groups[i]))
    return state


def load_folder(
    path: Path,
    model: nn.Module,
    optimizers: list[Optimizer],
    names: Mapping[str, str],
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Load this stage's part of a folder and return the rest, ``names`` by tied weight; a collective.

    Raises:
        MisconfigurationException: for a file.
    """
    if not (path / _METADATA_FILENAME).is_file():
        raise MisconfigurationException(
            f"{path} is no checkpoint folder, and a pipeline loads folders alone. Load the file without "
            "pipeline_parallel_size and save it with THDModelParallelStrategy() once."
        )
    back = {value: name for name, value in names.items()}
    weights = {"state_dict": get_model_state_dict(model)}
    load(weights, checkpoint_id=path)
    model.load_state_dict(weights["state_dict"])
    for i, optimizer in enumerate(optimizers):
        own: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
        held = [set(entry["params"]) for entry in own["param_groups"]]
        wanted = {f"optimizer_{i}": rename_optimizer(own, names)}
        load(wanted, checkpoint_id=path)
        loaded = rename_optimizer(wanted[f"optimizer_{i}"], back)
        for entry, mine in zip(loaded["param_groups"], held, strict=True):
            entry["params"] = [name for name in entry["params"] if name in mine]
        set_state(model, optimizer, loaded, StateDictOptions(cpu_offload=True))
    metadata: dict[str, Any] = torch.load(path / _METADATA_FILENAME, weights_only=weights_only)
    return metadata


def gather_states(state: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Gather the whole weights of a pipeline's stages on the first, others keep theirs; a collective."""
    first = group.rank() == 0
    parts: list[Any] | None = [None] * group.size() if first else None
    dist.gather_object(dict(state), parts, dst=dist.get_global_rank(group, 0), group=group)
    return {name: value for part in parts or [state] for name, value in part.items()}
