"""An optimizer's state of any layout -> the form that this layout loads: by name or number, whole or sharded.

torch numbers parameters group after group, Lightning's ``ModelParallelStrategy`` by their place in the
module, and torch's distributed checkpoints name them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

FRESH = "lightning_thd_fresh_optimizers"  # a checkpoint's key: indices of optimizers that had made no step


def by_index(state: Mapping[str, Any], optimizer: Optimizer, module: nn.Module) -> Mapping[str, Any]:
    """Replace names of parameters in a state by their numbers, as ``optimizer.state_dict()`` has them."""
    if _is_numbered(state):
        return state
    state = by_name(state, optimizer, module)
    refuse_unknown(state["state"], optimizer, module)
    names = {id(parameter): _plain(name) for name, parameter in module.named_parameters()}
    settings = {name: group for group in state["param_groups"] for name in group["params"]}
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


def by_name(state: Mapping[str, Any], optimizer: Optimizer, module: nn.Module) -> Mapping[str, Any]:
    """Replace numbers of parameters in a state by their names, and refuse groups of other sizes."""
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


def names_in(optimizer: Optimizer, module: nn.Module) -> list[str]:
    """Return the names of an optimizer's parameters, as checkpoints have them, group after group."""
    names = {id(parameter): _plain(name) for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _plain(name: str) -> str:
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def refuse_unknown(saved: Iterable[str], optimizer: Optimizer, module: nn.Module) -> None:
    """Refuse a checkpoint with states of parameters that its optimizer does not hold: they would be lost."""
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


def without_fresh(checkpoint: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a checkpoint's optimizer states, emptied if no step had been made."""
    fresh = set(checkpoint.get(FRESH, ()))
    return [
        {**state, "state": {}} if i in fresh else state
        for i, state in enumerate(checkpoint["optimizer_states"])
    ]


def load_whole_states(
    states: Sequence[Mapping[str, Any]], optimizers: Sequence[Optimizer], model: nn.Module
) -> None:
    """Load whole states, by name or number, into the optimizers of a sharded model; a collective."""
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


def set_state(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], options: StateDictOptions
) -> None:
    """Load an optimizer's state by name, and the options of its empty groups; a collective.

    torch loads the options of one empty group at most, and only if it is the last one.
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


def load_states_of_folder(
    path: Path, optimizers: Iterable[Optimizer], model: nn.Module, names: Mapping[str, str]
) -> None:
    """Load the states of optimizers one by one from a checkpoint folder; a collective.

    ``names`` maps names here to names in the folder if they differ, as for a tied head of a pipeline.
    """
    back = {value: name for name, value in names.items()}
    for i, optimizer in enumerate(optimizers):
        own: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
        held = [set(entry["params"]) for entry in own["param_groups"]]
        wanted = {f"optimizer_{i}": renamed(own, names)}
        load(wanted, checkpoint_id=path)
        loaded = renamed(wanted[f"optimizer_{i}"], back)
        for entry, mine in zip(loaded["param_groups"], held, strict=True):
            entry["params"] = [name for name in entry["params"] if name in mine]
        set_state(model, optimizer, loaded, StateDictOptions(cpu_offload=True))


def renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return an optimizer's state with some parameters renamed, in its parameter groups too."""
    groups = [
        {**group, "params": [names.get(name, name) for name in group["params"]]}
        for group in state["param_groups"]
    ]
    kept = {names.get(name, name): value for name, value in state["state"].items()}
    return {"state": kept, "param_groups": groups}


def complete_groups(state: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """Add every pipeline stage's parameter names to an optimizer state's groups; a collective."""
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


def parameters_of_folder(
    path: Path, optimizers: Sequence[Optimizer], module: nn.Module, names: Mapping[str, str]
) -> list[nn.Parameter]:
    """Return the parameters whose optimizer states a checkpoint folder has; ``names`` as above."""
    back = {value: name for name, value in names.items()}
    keys = FileSystemReader(path).read_metadata().state_dict_metadata.keys() if optimizers else ()
    found = []
    for i, optimizer in enumerate(optimizers):
        start = f"optimizer_{i}.state."
        saved = {key.removeprefix(start).rpartition(".")[0] for key in keys if key.startswith(start)}
        saved = {back.get(name, name) for name in saved}
        refuse_unknown(saved, optimizer, module)
        found += parameters_in(optimizer, module, saved)
    return found


def drop_unknown_options(optimizers: Iterable[Optimizer], path: str | Path) -> None:
    """Drop optimizer options that a checkpoint folder lacks, such as a rate finder's ``initial_lr``."""
    known = FileSystemReader(path).read_metadata().state_dict_metadata.keys()
    for i, optimizer in enumerate(optimizers):
        for k, group in enumerate(optimizer.param_groups):
            for option in [name for name in group if name != "params"]:
                if f"optimizer_{i}.param_groups.{k}.{option}" not in known:
                    del group[option]
