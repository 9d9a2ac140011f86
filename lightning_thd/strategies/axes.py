"""A Lightning strategy with ``THDStrategyMixin`` -> its parallel axes: their sizes and process groups."""

from __future__ import annotations

import atexit
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd._private import private_of, set_private
from lightning_thd.parallel.across_ranks import communication_device
from lightning_thd.parallel.context.dynamic_step import make_degree_groups
from lightning_thd.parallel.mesh import AxisSizes, Meshes, make_meshes, resolve_sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """The axes of a job that has started, fixed until it ends."""

    sizes: AxisSizes
    collective_device: torch.device  # where tensors must be for collectives of the whole job
    meshes: Meshes | None  # None if ranks hold all weights, and context_parallel_size is 1 or "dynamic"
    # Size -> this rank's group of that size, for dynamic context parallelism; None under a fixed size.
    degree_groups: Mapping[int, dist.ProcessGroup] | None

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return this rank's process group along an axis; None without meshes."""
        return None if self.meshes is None else self.meshes.group(axis)


def cuts_weights(strategy: object) -> bool:
    """Return whether a strategy can shard weights on a mesh, as FSDP2 and tensor parallelism do."""
    return isinstance(strategy, ModelParallelStrategy)


def gathers_once(strategy: Any) -> bool:
    """Return whether FSDP2 gathers weights only in the first microbatch of a step."""
    return cuts_weights(strategy) and getattr(strategy, "reshard_after_forward", None) is False


def start_axes(strategy: Any, start: Callable[[], None]) -> Axes:
    """Start the process group and build the mesh; ``start`` is the base strategy's ``setup_environment``."""
    _refuse_axes(strategy)
    start_again(strategy)
    cuts = cuts_weights(strategy)
    if cuts:
        # The part of Lightning's setup_environment() before it builds a mesh, which would have other axes.
        private_of(strategy, "lightning.pytorch.strategies.ModelParallelStrategy._setup_distributed")()
    else:
        start()

    sizes = sizes_of(strategy)
    meshes = None
    if cuts or sizes.peers > 1:
        meshes = make_meshes(sizes, strategy.root_device.type, replicas=strategy.data_parallel_replicas)
        if cuts:
            _show_mesh(strategy, meshes)

    device = communication_device(None, strategy.root_device)
    sharing = strategy.sharing
    degree_groups = None
    if sharing is not None:
        degree_groups = make_degree_groups(sizes.data, sharing.max_degree, tp=sharing.tp, device=device)
    return Axes(sizes=sizes, collective_device=device, meshes=meshes, degree_groups=degree_groups)


def _show_mesh(strategy: Any, meshes: Meshes) -> None:
    """Make a mesh the ``device_mesh`` of the strategy, and of the module for its ``configure_model``."""
    module = strategy.lightning_module
    set_private(strategy, "lightning.pytorch.strategies.ModelParallelStrategy._device_mesh", meshes.axes)
    set_private(module, "lightning.pytorch.LightningModule._device_mesh", meshes.axes)


def sizes_of(strategy: Any) -> AxisSizes:
    """Return the sizes that a strategy's attributes set, checked against the number of processes."""
    return resolve_sizes(
        getattr(strategy, "world_size", 1),
        data=strategy.data_parallel_size,
        context=fixed_context(strategy),
        tensor=strategy.tensor_parallel_size,
        pipeline=strategy.pipeline_parallel_size,
        expert=strategy.expert_parallel_size,
    )


def fixed_context(strategy: Any) -> int:
    """Return the fixed number of context-parallel ranks; 1 if every microbatch has its own number."""
    size = strategy.context_parallel_size
    return 1 if isinstance(size, str) else int(size)


def arguments_of(
    initialise: Callable[..., None], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the arguments with which a base strategy was built, by name, with its own defaults."""
    bound = inspect.signature(initialise).bind(*args, **kwargs)
    bound.apply_defaults()
    parameters = bound.signature.parameters.values()
    others = next((each.name for each in parameters if each.kind is each.VAR_KEYWORD), None)
    named = dict(bound.arguments)
    more = named.pop(others) if others is not None else {}
    return {**named, **more}


def _refuse_axes(strategy: Any) -> None:
    """Refuse sizes that the base strategy was given, and sizes of axes that it does not have."""
    if cuts_weights(strategy):
        given = strategy.base_arguments
        arguments = {axis: given.get(f"{axis}_parallel_size", "auto") for axis in ("data", "tensor")}
        if set(arguments.values()) != {"auto"}:
            raise MisconfigurationException(
                f"{type(strategy).__name__} was given sizes as arguments ({arguments}), which leave no ranks "
                "for context parallelism. Set the attributes data_parallel_size and tensor_parallel_size "
                "instead."
            )
        return

    of_cut_weights = (
        "data_parallel_replicas",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "expert_parallel_size",
    )
    for name in of_cut_weights:
        size = getattr(strategy, name)
        if size != 1:
            raise MisconfigurationException(
                f"{name}={size} under {type(strategy).__name__}, which keeps all weights on every rank. Use "
                "THDModelParallelStrategy, or leave it at 1."
            )


def timeout_of(strategy: Any) -> timedelta | None:
    """Return the ``timeout`` that a strategy of several ranks was given for collectives, or None."""
    timeout: timedelta | None = strategy.base_arguments.get("timeout")
    return timeout


def start_again(strategy: Any) -> None:
    """Start the process group of a restarted job under new keys, because torchrun's store keeps old ones."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    environment = getattr(strategy, "cluster_environment", None)
    if restarts == "0" or not shares_store or environment is None or dist.is_initialized():
        return
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    timeout = timeout_of(strategy)
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    store = TCPStore(environment.main_address, environment.main_port, is_master=False, **options)

    backend = getattr(strategy, "process_group_backend", None)
    if backend is None:
        backend = dist.get_default_backend_for_device(strategy.root_device)
    # Lightning leaves a process group that exists as it is.
    dist.init_process_group(
        backend,
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        store=PrefixStore(f"start_{restarts}", store),
        **options,
    )
    atexit.register(_end_process_group)  # torch warns of groups of NCCL that outlive the program


def _end_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
