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
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

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
        strategy = self._strategy
        name = type(strategy).__name__
        if not cuts_weights(strategy):
            if strategy.asynchronous_checkpoints:
                raise MisconfigurationException(
                    f"asynchronous_checkpoints=True under {name}, which writes one file of whole weights. "
                    "Use Trainer(plugins=[AsyncCheckpointIO()]), or THDModelParallelStrategy."
                )
            return
        if not strategy.base_arguments.get("save_distributed_checkpoint", True):
            raise MisconfigurationException(
                f"save_distributed_checkpoint=False under {name}, whose checkpoints are folders with a part "
                "from every rank. Leave it True; save_pretrained(folder) writes whole weights."
            )

    def open(self) -> None:
        """Prepare for background saves, if the user wants them; a collective."""
        strategy = self._strategy
        # Lightning's AsyncCheckpointIO writes single files; who passes it wants the same of folders.
        wanted = strategy.asynchronous_checkpoints or isinstance(strategy.checkpoint_io, AsyncCheckpointIO)
        if not wanted or self._background is not None:
            return
        self._background = BackgroundSaves(is_first=strategy.is_global_zero)
        self._savers = [
            callback for callback in strategy._trainer.callbacks if isinstance(callback, ModelCheckpoint)
        ]
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
        background = self._background
        self._background = None
        for saver in self._savers:
            vars(saver).pop("file_exists", None)  # the callback may outlive the job
        self._savers = []
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
        if not cuts_weights(self._strategy):
            return base(optimizer)

        inner: Any = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        is_fresh = not inner.state
        with trained(inner.state):
            state = base(optimizer)
        if is_fresh:
            # To learn the state's form, torch made a step with zero gradients; Adam must not count it.
            inner.state.clear()
            state["state"].clear()

        pipeline = self._strategy._pipeline
        if pipeline is not None:
            state = complete_groups(renamed(state, pipeline.head_name), pipeline.channel.down)
        return state

    def load(
        self, base: Callable[..., dict[str, Any]], filepath: Any, weights_only: bool | None
    ) -> dict[str, Any]:
        """Read a checkpoint of any layout: one file, or a folder of sharded weights."""
        strategy = self._strategy
        self.wait()
        path = Path(strategy.broadcast(filepath))
        if not cuts_weights(strategy):
            if not _is_sharded(path) or isinstance(strategy, FSDPStrategy):
                return base(filepath, weights_only=weights_only)
            checkpoint = read_folder(path, weights_only=weights_only)
            checkpoint["state_dict"] = as_named_in(strategy.lightning_module, checkpoint["state_dict"])
            return checkpoint

        pipeline = strategy._pipeline
        if _is_sharded(path):
            names = {} if pipeline is None else pipeline.head_name
            return self._load_folder(path, names, weights_only)
        if pipeline is not None:
            raise MisconfigurationException(
                f"{path} is not a checkpoint folder, and a pipeline loads only folders. Load the file "
                "without pipeline_parallel_size and save it with THDModelParallelStrategy() once."
            )
        return self._load_file(base, path, weights_only)

    def _load_file(
        self, base: Callable[..., dict[str, Any]], path: Path, weights_only: bool | None
    ) -> dict[str, Any]:
        """Load whole weights and optimizer states into a sharded model."""
        strategy = self._strategy
        # Hide the optimizers from Lightning, which would number parameters in the order of the module.
        optimizers = strategy.optimizers
        strategy.optimizers = []
        try:
            checkpoint = base(path, weights_only=weights_only)
        finally:
            strategy.optimizers = optimizers
        load_whole_states(checkpoint.get("optimizer_states", ()), self._optimizers(), strategy.model)
        return checkpoint

    def _optimizers(self) -> list[Optimizer]:
        """Return the optimizers of a running fit; after a fit, the strategy keeps them."""
        fits = self._strategy._trainer.state.fn == "fit"
        return [*self._strategy.optimizers] if fits else []

    def _load_folder(self, path: Path, names: Mapping[str, str], weights_only: bool | None) -> dict[str, Any]:
        """Load weights and optimizer states; ``names`` maps the model's names to the folder's."""
        model = self._strategy.model
        strict = self._strategy.lightning_module.strict_loading
        weights = {"state_dict": get_model_state_dict(model)}
        keys = FileSystemReader(path).read_metadata().state_dict_metadata.keys()
        if strict:
            self._refuse_unknown(path, weights["state_dict"], keys)
        load(weights, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=not strict))
        model.load_state_dict(as_named_in(model, weights["state_dict"]), strict=strict)

        if any(key.startswith("optimizer_") for key in keys):  # without states Lightning refuses to resume
            for i, optimizer in enumerate(self._optimizers()):
                drop_unknown_options(f"optimizer_{i}", optimizer, keys)
                load_state_of_folder(path, f"optimizer_{i}", optimizer, model, names, keys)
        return _rest_of(path, weights_only)

    def _refuse_unknown(self, path: Path, weights: Mapping[str, Any], keys: Iterable[str]) -> None:
        """Refuse a folder with weights that the model lacks on all stages; a collective."""
        names_of_stages = [list(weights)]
        pipeline = self._strategy._pipeline
        if pipeline is not None:
            names_of_stages *= pipeline.channel.ranks
            dist.all_gather_object(names_of_stages, list(weights), group=pipeline.channel.down)

        of_model = {f"state_dict.{name}" for names in names_of_stages for name in names}
        extra_state = _key_of_extra_state()
        saved = {key for key in keys if key.startswith("state_dict.") and extra_state not in key}
        unknown = sorted(saved - of_model)
        if unknown:
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
        meta = io.BytesIO()  # what is not sharded is copied here, because training goes on and changes it
        torch.save(checkpoint, meta)
        written: Any = dcp.state_dict_saver.async_save(sharded, checkpoint_id=part, process_group=self._group)
        self._running = self._thread.submit(self._finish, written, part, path, meta.getvalue())

    def _finish(self, written: Future[Any], part: Path, path: Path, meta: bytes) -> None:
        """Complete a folder whose shards are being written, and give it its name."""
        written.result()  # on the first rank this waits for every rank's part
        if not self._is_first:
            return

        with (part / METADATA).open("wb") as file:
            file.write(meta)
            file.flush()
            os.fsync(file.fileno())

        # At every moment the folder of before or the new one is complete, if under another name.
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
        running = self._running
        self._running = None
        if running is not None:
            running.result()
            self._thread.submit(lambda: None).result()  # this also waits for removals in the queue


class _WithExtraState(nn.Module):
    """A module of which torch saves only an extra state."""

    def get_extra_state(self) -> int:
        """Return the state."""
        return 0


@cache
def _key_of_extra_state() -> str:
    """Return the key under which torch saves the extra state of a module."""
    (key,) = _WithExtraState().state_dict()
    return key


def _is_sharded(path: Path) -> bool:
    return path.is_dir() and (path / METADATA).is_file()


def read_folder(path: Path, *, weights_only: bool | None = None) -> dict[str, Any]:
    """Read a folder in the form that an unsharded strategy saves, with optimizer states by parameter name."""
    state = _whole_state(path)
    checkpoint = _rest_of(path, weights_only)
    checkpoint["state_dict"] = state["state_dict"]

    names = [name for name in state if name.startswith("optimizer_")]
    names.sort(key=lambda name: int(name.removeprefix("optimizer_")))
    # torch writes no empty dicts, and so no "state" of an optimizer that has made no step.
    checkpoint["optimizer_states"] = [{"state": {}, **state[name]} for name in names]
    return checkpoint


def _whole_state(path: Path) -> dict[str, Any]:
    """Read weights and optimizer states of a folder, whole and nested as they were saved, on this rank only.

    torch saves a nested state under flat keys, ``optimizer_0.state.weight.step``, and keeps for each key its
    path in the nested state: ``("optimizer_0", "state", "weight", "step")``, with the index of a list as int.
    """
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    flat: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        flat[key] = None  # a number or another object, which load() replaces
        if isinstance(entry, TensorStorageMetadata):
            flat[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        # torch warns that it reads in one process, even if it is told to.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(flat, storage_reader=reader, no_dist=True)

    nested: dict[str, Any] = {}
    for key, value in flat.items():
        _put_at(nested, metadata.planner_data[key], value)
    return nested


def _put_at(nested: dict[str, Any], place: Sequence[str | int], value: Any) -> None:
    """Put a value at its path in a nested state; create the dicts and lists on the way."""
    container: Any = nested
    for part, following in zip(place, [*place[1:], None], strict=True):
        if isinstance(part, int):
            container.extend([None] * (part + 1 - len(container)))
        if following is None:
            container[part] = value
            return
        inside = container[part] if isinstance(part, int) else container.get(part)
        if inside is None:
            inside = [] if isinstance(following, int) else {}
            container[part] = inside
        container = inside


def _rest_of(folder: Path, weights_only: bool | None) -> dict[str, Any]:
    """Read the file of a folder for all that is not sharded, such as the states of loops and callbacks."""
    rest: dict[str, Any] = torch.load(folder / METADATA, weights_only=bool(weights_only))
    return rest


def by_index(state: Mapping[str, Any], optimizer: Optimizer, module: nn.Module) -> Mapping[str, Any]:
    """Replace the names of parameters in a state by the numbers that ``optimizer.state_dict()`` uses."""
    if _is_numbered(state):
        return state
    state = by_name(state, optimizer, module)
    refuse_others(state["state"], state["param_groups"], optimizer, module)

    name_of = {id(parameter): plain_name(name) for name, parameter in module.named_parameters()}
    group_of = {name: group for group in state["param_groups"] for name in group["params"]}
    numbered: dict[str, Any] = {"state": {}, "param_groups": []}
    start = 0  # the number of the group's first parameter
    for group in optimizer.param_groups:
        names = [name_of[id(parameter)] for parameter in group["params"]]
        for number, name in enumerate(names, start=start):
            if name in state["state"]:
                numbered["state"][number] = state["state"][name]

        # The saved group is that of the first parameter; a group without parameters keeps its options.
        options = group_of[names[0]] if names else group
        numbers = list(range(start, start + len(names)))
        numbered["param_groups"].append({**options, "params": numbers})
        start += len(names)
    return numbered


def by_name(state: Mapping[str, Any], optimizer: Optimizer, module: nn.Module) -> Mapping[str, Any]:
    """Replace numbers of parameters in a state by their names, and refuse groups of other sizes."""
    if all(isinstance(name, str) for group in state["param_groups"] for name in group["params"]):
        return state
    if _is_numbered(state):
        saved_sizes = [len(group["params"]) for group in state["param_groups"]]
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if saved_sizes != sizes:
            raise ValueError(
                f"The checkpoint's optimizer has groups of {saved_sizes} parameters, but this optimizer has "
                f"groups of {sizes}. Make it with the same groups, because the saved states are numbered."
            )
        names = names_in(optimizer, module)
    else:  # Lightning's numbers follow the order of the module
        names = [plain_name(name) for name, _ in module.named_parameters()]

    groups = [
        {**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]
    ]
    named = {names[number]: value for number, value in state["state"].items()}
    return {**state, "state": named, "param_groups": groups}


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
    in_optimizer = set(names_in(optimizer, module))
    in_module = {plain_name(name) for name, _ in module.named_parameters()}
    lost = sorted(set(saved) & in_module - in_optimizer)  # those of other stages are not in the module
    if lost:
        raise ValueError(
            f"The checkpoint has states of {len(lost)} parameters that the optimizer does not hold, "
            f"{lost[:3]} among them. Give the optimizer these parameters too; it does not update frozen ones."
        )

    new = sorted(in_optimizer.difference(*(group["params"] for group in groups)))
    if new:
        raise ValueError(
            f"The optimizer holds {len(new)} parameters that the checkpoint's optimizer did not, {new[:3]} "
            "among them. Make it with the same parameters, or load only the weights."
        )


def parameters_in(optimizer: Optimizer, module: nn.Module, names: Iterable[str]) -> list[nn.Parameter]:
    """Return an optimizer's parameters with the given names."""
    wanted = set(names)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    named = zip(parameters, names_in(optimizer, module), strict=True)
    return [parameter for parameter, name in named if name in wanted]


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
                group.update(_options_of(saved))
            continue

        named = by_name(state, optimizer, model)
        refuse_others(named["state"], named["param_groups"], optimizer, model)
        with trained(parameters_in(optimizer, model, named["state"])):
            set_state(model, optimizer, named, options)


def set_state(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], options: StateDictOptions
) -> None:
    """Load an optimizer's state; set groups without parameters here, because torch can load one at most."""
    groups = optimizer.param_groups
    saved_groups = state["param_groups"]
    empty = {i: group for i, group in enumerate(groups) if not group["params"]}
    for i, group in empty.items():
        if i < len(saved_groups):
            group.update(_options_of(saved_groups[i]))

    optimizer.param_groups = [group for i, group in enumerate(groups) if i not in empty]
    try:
        if optimizer.param_groups:
            of_filled = [group for i, group in enumerate(saved_groups) if i not in empty]
            set_optimizer_state_dict(
                model, optimizer, optim_state_dict={**state, "param_groups": of_filled}, options=options
            )
    finally:
        for i, group in empty.items():
            optimizer.param_groups.insert(i, group)

    # torch gives every parameter a state. One that had no step yet, such as a tower's without images, must
    # have none: Adam would correct its averages as after a step.
    with_state = set(parameters_in(optimizer, model, state["state"]))
    for parameter in optimizer.state.keys() - with_state:
        del optimizer.state[parameter]


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, such as ``lr``, without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def load_state_of_folder(
    path: Path,
    optimizer_key: str,
    optimizer: Optimizer,
    model: nn.Module,
    names: Mapping[str, str],
    keys: Iterable[str],
) -> None:
    """Load the state that a folder with these ``keys`` holds under ``optimizer_key``; a collective.

    ``names`` maps the model's names of parameters to the folder's, where they differ.
    """
    model_names = {in_folder: name for name, in_folder in names.items()}
    start = f"{optimizer_key}.state."
    saved = set()  # the model's names of the parameters that have a state
    for key in keys:
        if key.startswith(start):
            in_folder = key.removeprefix(start).rpartition(".")[0]
            saved.add(model_names.get(in_folder, in_folder))

    with trained(parameters_in(optimizer, model, saved)):
        # torch loads into tensors of the right form: those of this optimizer, under the folder's names.
        form: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
        form["state"] = {name: state for name, state in form["state"].items() if name in saved}
        names_of_groups = [set(group["params"]) for group in form["param_groups"]]
        folder_state = {optimizer_key: renamed(form, names)}
        load(folder_state, checkpoint_id=path)

        loaded = renamed(folder_state[optimizer_key], model_names)
        refuse_others(saved, loaded["param_groups"], optimizer, model)
        for group, of_model in zip(loaded["param_groups"], names_of_groups, strict=True):
            group["params"] = [name for name in group["params"] if name in of_model]
        set_state(model, optimizer, loaded, StateDictOptions(cpu_offload=True, strict=False))


def renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return an optimizer's state with some parameters renamed, in its parameter groups too."""
    groups = [
        {**group, "params": [names.get(name, name) for name in group["params"]]}
        for group in state["param_groups"]
    ]
    states = {names.get(name, name): value for name, value in state["state"].items()}
    return {"state": states, "param_groups": groups}


def complete_groups(state: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """Add every pipeline stage's parameter names to an optimizer state's groups; a collective."""
    of_stages: list[Any] = [None] * group.size()
    names = [entry["params"] for entry in state["param_groups"]]
    dist.all_gather_object(of_stages, names, group=group)
    numbers = [len(groups) for groups in of_stages]
    if len(set(numbers)) > 1:
        raise ValueError(
            f"The optimizer has {numbers} parameter groups on the stages of the pipeline. Make the same "
            "groups on every rank, empty ones included."
        )

    for i, entry in enumerate(state["param_groups"]):
        every_name = (name for groups in of_stages for name in groups[i])
        entry["params"] = list(dict.fromkeys(every_name))  # each once, in the order of the stages
    return state


def drop_unknown_options(optimizer_key: str, optimizer: Optimizer, keys: Collection[str]) -> None:
    """Drop groups' options without a key in the folder, such as a learning-rate finder's ``initial_lr``."""
    for i, group in enumerate(optimizer.param_groups):
        start = f"{optimizer_key}.param_groups.{i}."
        if not any(key.startswith(start) for key in keys):
            raise ValueError(f"The checkpoint has no {start[:-1]}. Make the optimizers with the same groups.")
        for option in group.keys() - {"params"}:
            if start + option not in keys:
                del group[option]
