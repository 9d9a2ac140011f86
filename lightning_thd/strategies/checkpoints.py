"""A checkpoint of any parallel layout -> the form that this layout loads.

Lightning writes weights and optimizer states of a ``ModelParallelStrategy`` as a folder in torch's
distributed format, with one more file for everything else. Layers have the names of the whole model on every
stage of a pipeline, so the stages write one folder too. In optimizer states, torch numbers the parameters in
the order of the groups, Lightning in the order of the module, and torch's distributed checkpoints use names.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_thd._private import private
from lightning_thd.strategies.axes import cuts_weights

# The file of a folder that holds everything but weights and optimizer states, as Lightning names it.
METADATA = "meta.pt"


class Checkpoints:
    """Saves and loads a strategy's checkpoints; ``base`` is the base strategy's method for the same task."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._background: BackgroundSaves | None = None
        self._savers: list[ModelCheckpoint] = []

    def refuse_unsupported(self) -> None:
        """Refuse background saves of whole weights, and sharded weights saved as one file."""
        strategy, name = self._strategy, type(self._strategy).__name__
        if not cuts_weights(strategy) and strategy.asynchronous_checkpoints:
            raise MisconfigurationException(
                f"asynchronous_checkpoints=True under {name}, which writes one file of whole weights. Use "
                "Trainer(plugins=[AsyncCheckpointIO()]), or THDModelParallelStrategy."
            )
        if cuts_weights(strategy) and not strategy._save_distributed_checkpoint:
            raise MisconfigurationException(
                f"save_distributed_checkpoint=False under {name}, whose checkpoints are folders with a part "
                "from every rank. Leave it True; save_pretrained(folder) writes whole weights."
            )

    def open(self) -> None:
        """Prepare for background saves, if the user wants them; a collective."""
        strategy = self._strategy
        wanted = strategy.asynchronous_checkpoints or isinstance(strategy.checkpoint_io, AsyncCheckpointIO)
        if wanted and self._background is None:
            self._background = BackgroundSaves(is_first=strategy.is_global_zero)
            self._savers = [x for x in strategy._trainer.callbacks if isinstance(x, ModelCheckpoint)]
            for saver in self._savers:
                saver.file_exists = partial(self._exists, saver)  # type: ignore[method-assign]

    def _exists(self, saver: ModelCheckpoint, *args: Any) -> bool:
        """Return whether a file exists, once the checkpoint before is complete under its final name."""
        self.wait()
        return type(saver).file_exists(saver, *args)

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete; a collective."""
        if self._background is not None:
            self._background.wait()

    def close(self) -> None:
        """Wait until this rank's part of the last checkpoint is written; no collective."""
        background, self._background = self._background, None
        while self._savers:
            vars(self._savers.pop()).pop("file_exists", None)
        if background is not None:
            background.close()

    def save(
        self, base: Callable[..., None], checkpoint: dict[str, Any], filepath: Any, options: Any
    ) -> None:
        """Write a checkpoint, in the background if ``open`` prepared for it and ``options`` is None."""
        for name in checkpoint.keys() - {"state_dict", "optimizer_states"}:
            distributed: list[DTensor] = []
            apply_to_collection(checkpoint[name], DTensor, distributed.append, allow_frozen=True)
            if any(tensor.device_mesh.size() > 1 for tensor in distributed):
                raise ValueError(
                    f"checkpoint[{name!r}] holds a DTensor, of which only the first rank's part would be "
                    "saved. Call full_tensor() on it in state_dict() or on_save_checkpoint()."
                )
        if self._background is not None and options is None:
            self._background.save(checkpoint, Path(self._strategy.broadcast(filepath)))
            return
        base(checkpoint, filepath, storage_options=options)

    def remove(self, base: Callable[[Any], None], filepath: Any) -> None:
        """Remove a checkpoint, when the checkpoint that is being written is complete."""
        if self._background is None:
            base(filepath)
        else:
            self._background.remove(partial(base, filepath))

    def optimizer_state(self, base: Callable[[Any], dict[str, Any]], optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state, and leave the optimizer without one if it has made no step."""
        strategy, pipeline = self._strategy, self._strategy._pipeline
        if not cuts_weights(strategy):
            return base(optimizer)
        inner = getattr(optimizer, "_optimizer", optimizer)
        fresh = not inner.state
        with trained(inner.state):
            state = base(optimizer)
        if fresh:  # to learn the state's form, torch made a step with zero gradients; Adam must not count it
            inner.state.clear()
            state["state"].clear()
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
        is_folder = _is_sharded(path)
        if not cuts_weights(strategy):
            if is_folder and not isinstance(strategy, FSDPStrategy):
                found = read_folder(path, weights_only=weights_only)
                found["state_dict"] = as_named_in(strategy.lightning_module, found["state_dict"])
                return found
            return base(given, weights_only=weights_only)
        if is_folder:
            names = {} if pipeline is None else pipeline.head_name
            return self._load_folder(path, names, weights_only)
        if pipeline is not None:
            raise MisconfigurationException(
                f"{path} is not a checkpoint folder, and a pipeline loads only folders. Load the file "
                "without pipeline_parallel_size and save it with THDModelParallelStrategy() once."
            )
        # Hide the optimizers from Lightning, which would number parameters in the order of the module.
        optimizers, strategy.optimizers = strategy.optimizers, []
        try:
            loaded = base(path, weights_only=weights_only)
        finally:
            strategy.optimizers = optimizers
        load_whole_states(loaded.get("optimizer_states", ()), self._optimizers(), strategy.model)
        return loaded

    def _optimizers(self) -> list[Optimizer]:
        """Return the optimizers of a running fit; after a fit, the strategy keeps them."""
        fits = self._strategy._trainer.state.fn == "fit"
        return [*self._strategy.optimizers] if fits else []

    def _load_folder(self, path: Path, names: Mapping[str, str], weights_only: bool | None) -> dict[str, Any]:
        """Load weights and optimizer states; ``names`` maps the model's names to the folder's."""
        model, strict = self._strategy.model, self._strategy.lightning_module.strict_loading
        weights = {"state_dict": get_model_state_dict(model)}
        keys = FileSystemReader(path).read_metadata().state_dict_metadata.keys()
        if strict:
            self._refuse_unknown(path, weights["state_dict"], keys)
        load(weights, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=not strict))
        model.load_state_dict(as_named_in(model, weights["state_dict"]), strict=strict)
        if not any(key.startswith("optimizer_") for key in keys):
            return _rest_of(path, weights_only)  # no optimizer states: Lightning refuses to resume
        for i, optimizer in enumerate(self._optimizers()):
            drop_unknown_options(f"optimizer_{i}", optimizer, keys)
            load_state_of_folder(path, f"optimizer_{i}", optimizer, model, names, keys)
        return _rest_of(path, weights_only)

    def _refuse_unknown(self, path: Path, own: Mapping[str, Any], keys: Iterable[str]) -> None:
        """Refuse a folder with weights that the model lacks on all stages; a collective."""
        stages, pipeline = [[*own]], self._strategy._pipeline
        if pipeline is not None:
            stages *= pipeline.channel.ranks
            dist.all_gather_object(stages, [*own], group=pipeline.channel.down)
        known = {f"state_dict.{name}" for names in stages for name in names}
        saved = (key for key in keys if key.startswith("state_dict.") and "_extra_state" not in key)
        if unknown := sorted({*saved} - known):
            raise ValueError(
                f"{path} has weights that the model lacks, {unknown[:3]} among them. Build the saved model, "
                "or set strict_loading=False on the LightningModule."
            )

    def load_optimizers(
        self, base: Callable[[Mapping[str, Any]], None], checkpoint: Mapping[str, Any]
    ) -> None:
        """Load states into unsharded optimizers, by number; ``load`` has loaded those of sharded ones."""
        strategy = self._strategy
        shards = cuts_weights(strategy) or isinstance(strategy, FSDPStrategy)
        if not shards and "optimizer_states" in checkpoint:
            pairs = zip(checkpoint["optimizer_states"], strategy.optimizers, strict=False)
            numbered = [by_index(state, optimizer, strategy.lightning_module) for state, optimizer in pairs]
            checkpoint = {**checkpoint, "optimizer_states": numbered}
        base(checkpoint)


class BackgroundSaves:
    """Writes one folder at a time, under a temporary name until it is complete; all ranks construct it."""

    def __init__(self, *, is_first: bool) -> None:
        # The thread needs a separate group: two threads on one group would receive each other's messages.
        self._group = dist.new_group(backend="gloo")
        self._is_first = is_first  # the first rank renames and removes folders
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    def save(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Wait for the checkpoint before, then begin to write a copy of this one; a collective."""
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
        written.result()  # on the first rank this waits for every rank's part
        if not self._is_first:
            return
        with (part / METADATA).open("wb") as file:
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
        """Run ``removal`` on the first rank, when the checkpoint that is being written is complete."""
        if not self._is_first:
            return
        if self._running is None:
            removal()
        else:
            self._thread.submit(self._remove_after, self._running, removal)

    def _remove_after(self, save: Future[None], removal: Callable[[], None]) -> None:
        if save.exception() is None:  # after a failed save, keep the older checkpoint, the only one
            removal()

    def wait(self) -> None:
        """Wait until the first rank has completed the checkpoint; a collective."""
        if self._running is not None:
            self.close()
            dist.barrier(group=self._group)

    def close(self) -> None:
        """Wait until this rank's part is written, and on the first rank all parts; no collective."""
        running, self._running = self._running, None
        if running is not None:
            running.result()
            self._thread.submit(lambda: None).result()  # this also waits for removals in the queue


def _is_sharded(path: Path) -> bool:
    return path.is_dir() and (path / METADATA).is_file()


def read_folder(path: Path, *, weights_only: bool | None = None) -> dict[str, Any]:
    """Read a folder in the form that an unsharded strategy saves, with optimizer states by parameter name."""
    state: dict[str, Any] = {}
    planner = private("torch.distributed.checkpoint.default_planner._EmptyStateDictLoadPlanner")()
    load_state_dict = private("torch.distributed.checkpoint.state_dict_loader._load_state_dict")
    load_state_dict(state, storage_reader=FileSystemReader(path), planner=planner, no_dist=True)
    found = _rest_of(path, weights_only)
    optimizers = sorted(
        (name for name in state if name.startswith("optimizer_")), key=lambda name: int(name.split("_")[1])
    )
    states = [{"state": {}, **state[name]} for name in optimizers]  # torch writes no empty dicts
    found.update(state_dict=state["state_dict"], optimizer_states=states)
    return found


def _rest_of(folder: Path, weights_only: bool | None) -> dict[str, Any]:
    """Read the file of a folder for all that is not sharded, such as the states of loops and callbacks."""
    found: dict[str, Any] = torch.load(folder / METADATA, weights_only=bool(weights_only))
    return found


def by_index(state: Mapping[str, Any], optimizer: Optimizer, module: nn.Module) -> Mapping[str, Any]:
    """Replace the names of parameters in a state by the numbers that ``optimizer.state_dict()`` uses."""
    if _is_numbered(state):
        return state
    state = by_name(state, optimizer, module)
    refuse_others(state["state"], state["param_groups"], optimizer, module)
    names = {id(parameter): plain_name(name) for name, parameter in module.named_parameters()}
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
                f"The checkpoint's optimizer has groups of {sizes} parameters, but this optimizer has groups "
                f"of {own}. Make it with the same groups, because the saved states are numbered."
            )
        names = names_in(optimizer, module)
    else:  # Lightning's numbers follow the order of the module
        names = [plain_name(name) for name, _ in module.named_parameters()]
    groups = [{**group, "params": [names[n] for n in group["params"]]} for group in state["param_groups"]]
    kept = {names[number]: value for number, value in state["state"].items()}
    return {**state, "state": kept, "param_groups": groups}


def _is_numbered(state: Mapping[str, Any]) -> bool:
    """Return whether a state numbers its parameters group after group, from 0."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    return numbers == list(range(len(numbers)))


def names_in(optimizer: Optimizer, module: nn.Module) -> list[str]:
    """Return the names of an optimizer's parameters in checkpoints, group after group."""
    names = {id(parameter): plain_name(name) for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def as_named_in(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the weights of a checkpoint to a module's own names, which ``torch.compile`` changes."""
    names = {plain_name(name): name for name in module.state_dict()}
    return {names.get(name, name): value for name, value in state.items()}


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that ``torch.compile`` and activation checkpoints add."""
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def refuse_others(
    saved: Iterable[str], groups: Iterable[Mapping[str, Any]], optimizer: Optimizer, module: nn.Module
) -> None:
    """Refuse ``saved`` states that the optimizer would lose, and parameters that no saved group has."""
    held = set(names_in(optimizer, module))
    lost = sorted(set(saved) & {plain_name(name) for name, _ in module.named_parameters()} - held)
    if lost:
        raise ValueError(
            f"The checkpoint has states of {len(lost)} parameters that the optimizer does not hold, "
            f"{lost[:3]} among them. Give the optimizer these parameters too; it does not update frozen ones."
        )
    if new := sorted(held.difference(*(group["params"] for group in groups))):
        raise ValueError(
            f"The optimizer holds {len(new)} parameters that the checkpoint's optimizer did not, {new[:3]} "
            "among them. Make it with the same parameters, or load only the weights."
        )


def parameters_in(optimizer: Optimizer, module: nn.Module, names: Iterable[str]) -> list[nn.Parameter]:
    """Return an optimizer's parameters with the given names."""
    wanted = set(names)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [p for p, name in zip(held, names_in(optimizer, module), strict=True) if name in wanted]


@contextmanager
def trained(parameters: Iterable[nn.Parameter]) -> Generator[None]:
    """Mark parameters as trained inside this context, because torch leaves out states of frozen ones."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def load_whole_states(
    states: Sequence[Mapping[str, Any]], optimizers: Sequence[Optimizer], model: nn.Module
) -> None:
    """Load unsharded states, by name or number, into the optimizers of a sharded model; a collective."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    for state, optimizer in zip(states, optimizers, strict=False):
        if not state["state"]:  # saved before the first step; torch would fail on an empty state
            for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
                group.update({name: value for name, value in saved.items() if name != "params"})
            continue
        named = by_name(state, optimizer, model)
        refuse_others(named["state"], named["param_groups"], optimizer, model)
        with trained(parameters_in(optimizer, model, named["state"])):
            set_state(model, optimizer, named, options)


def set_state(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], options: StateDictOptions
) -> None:
    """Load an optimizer's state; set groups without parameters here, because torch can load one at most."""
    groups, saved = optimizer.param_groups, state["param_groups"]
    empty = {i: group for i, group in enumerate(groups) if not group["params"]}
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
    kept = set(parameters_in(optimizer, model, state["state"]))
    for parameter in optimizer.state.keys() - kept:  # had no step yet, such as a tower without images
        del optimizer.state[parameter]


def load_state_of_folder(
    path: Path, i: str, optimizer: Optimizer, model: nn.Module, names: Mapping[str, str], keys: Iterable[str]
) -> None:
    """Load the state under the name ``i`` in a folder with these ``keys``; a collective."""
    back, start = {value: name for name, value in names.items()}, f"{i}.state."
    found = {key.removeprefix(start).rpartition(".")[0] for key in keys if key.startswith(start)}
    saved = {back.get(name, name) for name in found}
    with trained(parameters_in(optimizer, model, saved)):
        own: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
        own["state"] = {name: state for name, state in own["state"].items() if name in saved}
        held = [set(entry["params"]) for entry in own["param_groups"]]
        wanted = {i: renamed(own, names)}
        load(wanted, checkpoint_id=path)
        loaded = renamed(wanted[i], back)
        refuse_others(saved, loaded["param_groups"], optimizer, model)
        for entry, mine in zip(loaded["param_groups"], held, strict=True):
            entry["params"] = [name for name in entry["params"] if name in mine]
        set_state(model, optimizer, loaded, StateDictOptions(cpu_offload=True, strict=False))


def renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return an optimizer's state with some parameters renamed, in its parameter groups too."""
    groups = state["param_groups"]
    groups = [{**group, "params": [names.get(name, name) for name in group["params"]]} for group in groups]
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


def drop_unknown_options(i: str, optimizer: Optimizer, keys: Collection[str]) -> None:
    """Drop groups' options without a key in the folder, such as a learning-rate finder's ``initial_lr``."""
    for k, group in enumerate(optimizer.param_groups):
        start = f"{i}.param_groups.{k}."
        if not any(key.startswith(start) for key in keys):
            raise ValueError(f"The checkpoint has no {start[:-1]}. Make the optimizers with the same groups.")
        for option in group.keys() - {"params"}:
            if start + option not in keys:
                del group[option]
