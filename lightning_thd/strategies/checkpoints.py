"""A checkpoint of any layout -> the form this layout loads: folders as whole weights, averages as shards.

Lightning writes weights and optimizer states of a ``ModelParallelStrategy`` as a folder in torch's
distributed format, and everything else as one file in it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.strategies.model_parallel import _is_sharded_checkpoint
from torch import nn
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_thd.strategies.modules.groups import set_state

META = "meta.pt"  # Lightning's name of the file with everything else
CURRENT = "current_model_state"  # Lightning's WeightAveraging keeps the weights in training here
FRESH = "lightning_thd_fresh_optimizers"  # indices of those that had made no step when they were saved
_AVERAGING = "averaging"  # our folder with them, inside the checkpoint's


def is_folder(path: str | Path) -> bool:
    """Return whether a checkpoint is a folder of sharded weights."""
    return bool(_is_sharded_checkpoint(Path(path)))


def read_folder(path: str | Path, *, weights_only: bool | None = None) -> dict[str, Any]:
    """Read a folder of sharded weights whole; no collective.

    Returns:
        What a strategy that holds weights whole writes, but for optimizer states, which name parameters:
        ``by_index`` numbers them.
    """
    state = _read(Path(path))
    found: dict[str, Any] = torch.load(Path(path) / META, weights_only=bool(weights_only))
    optimizers = sorted(
        (name for name in state if name.startswith("optimizer_")), key=lambda name: int(name.split("_")[1])
    )
    found.update(state_dict=state["state_dict"], optimizer_states=[state[name] for name in optimizers])
    if (Path(path) / _AVERAGING).is_dir():
        found[CURRENT] = _read(Path(path) / _AVERAGING)[CURRENT]
    return found


def _read(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = {}
    reader, planner = FileSystemReader(path), _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    return state


def by_index(state: Mapping[str, Any], optimizer: Optimizer, module: nn.Module) -> Mapping[str, Any]:
    """Replace names of parameters in an optimizer state by their numbers.

    Args:
        state: of any optimizer; returned as it is where it numbers parameters as torch does.
        optimizer: that is to load it.
        module: whose ``named_parameters`` the names are.

    Returns:
        The state with parameters numbered as ``optimizer.state_dict()`` does.

    Raises:
        ValueError: for states of parameters that the optimizer does not hold.
    """
    if _is_numbered(state):
        return state
    state = by_name(state, optimizer, module)
    groups = state["param_groups"]
    refuse_unknown(state["state"], optimizer, module)
    names = {id(parameter): _plain(name) for name, parameter in module.named_parameters()}
    settings = {name: group for group in groups for name in group["params"]}
    numbered: dict[str, Any] = {"state": {}, "param_groups": []}
    count = 0
    for group in optimizer.param_groups:
        own = [names[id(parameter)] for parameter in group["params"]]
        for i, name in enumerate(own, start=count):
            if name in state["state"]:
                numbered["state"][i] = state["state"][name]
        options = settings[own[0]] if own else {k: v for k, v in group.items() if k != "params"}
        numbered["param_groups"].append({**options, "params": list(range(count, count + len(own)))})
        count += len(own)
    return numbered


def without_fresh(checkpoint: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a checkpoint's optimizer states, emptied where no step had been made."""
    fresh = set(checkpoint.get(FRESH, ()))
    return [
        {**state, "state": {}} if i in fresh else state
        for i, state in enumerate(checkpoint["optimizer_states"])
    ]


def load_optimizers(
    states: Sequence[Mapping[str, Any]], optimizers: Sequence[Optimizer], model: nn.Module
) -> None:
    """Load whole optimizer states, by name or number, into the optimizers of a sharded model; a collective.

    Raises:
        ValueError: for states of other parameters than the optimizers hold.
    """
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for state, optimizer in zip(states, optimizers, strict=False):
        if not state["state"]:  # saved before the first step: torch would fail on it
            for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
                group.update({name: value for name, value in saved.items() if name != "params"})
            continue
        named = by_name(state, optimizer, model)
        refuse_unknown(named["state"], optimizer, model)
        with trained(parameters_in(optimizer, model, named["state"])):
            set_state(model, optimizer, named, options)


def by_name(state: Mapping[str, Any], optimizer: Optimizer, module: nn.Module) -> Mapping[str, Any]:
    """Replace numbers of parameters in an optimizer state by their names.

    Args:
        state: of any optimizer; returned as it is where it names parameters already. torch numbers them
            group after group; Lightning's ``ModelParallelStrategy`` by their place in the module.
        optimizer: that is to load it: its groups and their order are those of the one that was saved.
        module: whose ``named_parameters`` the names are.

    Raises:
        ValueError: for groups of other sizes.
    """
    if all(isinstance(name, str) for group in state["param_groups"] for name in group["params"]):
        return state
    if _is_numbered(state):
        sizes = [len(group["params"]) for group in state["param_groups"]]
        own = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != own:
            raise ValueError(
                f"The checkpoint's optimizer has groups of {sizes} parameters, but this one of {own}. Make "
                "it as it was made, with the same parameters in the same groups: their states are numbered."
            )
        names = names_in(optimizer, module)
    else:
        names = [_plain(name) for name, _ in module.named_parameters()]
    groups = [
        {**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]
    ]
    kept = {names[number]: value for number, value in state["state"].items()}
    return {**state, "state": kept, "param_groups": groups}


def _is_numbered(state: Mapping[str, Any]) -> bool:
    """Return whether a state numbers its parameters group after group, from 0."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    return numbers == list(range(len(numbers)))


def whole_state(optimizer: Optimizer, model: nn.Module, *, keep: bool) -> Mapping[str, Any]:
    """Gather an optimizer's whole state as torch writes it on one process; a collective.

    Args:
        optimizer: of a sharded model.
        model: whose parameters are the optimizer's.
        keep: whether this rank wants it: the first does.

    Returns:
        Parameters numbered group after group; nothing elsewhere.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    return by_index(state, optimizer, model) if keep else state


def names_in(optimizer: Optimizer, module: nn.Module) -> list[str]:
    """Return the names of an optimizer's parameters, as checkpoints have them, group after group."""
    names = {id(parameter): _plain(name) for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _plain(name: str) -> str:
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def refuse_unknown(saved: Iterable[str], optimizer: Optimizer, module: nn.Module) -> None:
    """Refuse a checkpoint with states of parameters that its optimizer does not hold: they would be lost.

    Args:
        saved: names of the parameters that have a state.
        optimizer: that is to load them.
        module: whose parameters they are.

    Raises:
        ValueError: naming some.
    """
    others = {_plain(name) for name, _ in module.named_parameters()} - set(names_in(optimizer, module))
    lost = sorted(set(saved) & others)
    if lost:
        raise ValueError(
            f"The checkpoint has the optimizer's state of {len(lost)} parameters that this one does not "
            f"hold, {lost[:3]} among them: it would be lost. Give it the parameters it had, those that are "
            "added later in training too: frozen ones are not updated."
        )


def parameters_in(optimizer: Optimizer, module: nn.Module, names: Iterable[str]) -> list[nn.Parameter]:
    """Return an optimizer's parameters of some names."""
    wanted = set(names)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [p for p, name in zip(held, names_in(optimizer, module), strict=True) if name in wanted]


@contextmanager
def trained(parameters: Iterable[nn.Parameter]) -> Generator[None]:
    """Mark parameters as trained inside this context: torch leaves out the states of frozen ones."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def parameters_of_folder(
    path: Path, optimizers: Sequence[Optimizer], module: nn.Module, names: Mapping[str, str] | None = None
) -> list[nn.Parameter]:
    """Return the parameters whose optimizer states a checkpoint folder has.

    Args:
        path: of the folder.
        optimizers: in the order in which they were saved.
        module: whose parameters they hold.
        names: in the folder to those in the module, where they differ.

    Raises:
        ValueError: for states of parameters that the optimizers do not hold.
    """
    keys = FileSystemReader(path).read_metadata().state_dict_metadata.keys() if optimizers else ()
    found = []
    for i, optimizer in enumerate(optimizers):
        start = f"optimizer_{i}.state."
        saved = {key.removeprefix(start).rpartition(".")[0] for key in keys if key.startswith(start)}
        saved = {(names or {}).get(name, name) for name in saved}
        refuse_unknown(saved, optimizer, module)
        found += parameters_in(optimizer, module, saved)
    return found


def drop_unknown_options(optimizers: Iterable[Optimizer], path: str | Path) -> None:
    """Drop optimizer options that a checkpoint folder lacks, on which torch would fail.

    A learning rate finder leaves one: the scheduler of its trial adds ``initial_lr``.
    """
    known = FileSystemReader(path).read_metadata().state_dict_metadata.keys()
    for i, optimizer in enumerate(optimizers):
        for k, group in enumerate(optimizer.param_groups):
            for option in [name for name in group if name != "params"]:
                if f"optimizer_{i}.param_groups.{k}.{option}" not in known:
                    del group[option]


def save_averaging(checkpoint: dict[str, Any], path: Path, *, folder: bool) -> None:
    """Save ``WeightAveraging``'s weights of a sharded checkpoint in a folder, or made whole; a collective."""
    if folder:
        dcp.state_dict_saver.save({CURRENT: checkpoint.pop(CURRENT)}, checkpoint_id=path / _AVERAGING)
        return
    for name in ("state_dict", CURRENT):
        checkpoint[name] = {
            key: (value.full_tensor() if isinstance(value, DTensor) else value).cpu()
            for key, value in checkpoint[name].items()
        }


def load_averaging(checkpoint: dict[str, Any], path: Path, module: nn.Module) -> None:
    """Load average and current weights as shards, where ``WeightAveraging`` looks for them.

    Args:
        checkpoint: as Lightning has read it; changed where the saved one had averages.
        path: of the checkpoint.
        module: sharded, with the average weights already in it.
    """
    in_folder = (path / _AVERAGING).is_dir()
    if not in_folder and CURRENT not in checkpoint:
        return
    average = _clones(module)
    if in_folder:
        current = {CURRENT: _clones(module)}
        dcp.state_dict_loader.load(current, checkpoint_id=path / _AVERAGING)
        checkpoint[CURRENT] = current[CURRENT]
    else:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(module, checkpoint[CURRENT], options=options)
        checkpoint[CURRENT] = _clones(module)
        module.load_state_dict(average)
    checkpoint["state_dict"] = average


def _clones(module: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = get_model_state_dict(module)
    return {name: value.clone() for name, value in state.items()}
