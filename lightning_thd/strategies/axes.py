"""A Lightning strategy with ``THDStrategyMixin`` -> its parallel axes: their sizes and process groups."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd._private import private
from lightning_thd.parallel.across_ranks import communication_device
from lightning_thd.parallel.context.shared_step import make_degree_groups
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
    cuts, meshes = cuts_weights(strategy), None
    (strategy._setup_distributed if cuts else start)()
    sizes = sizes_of(strategy)
    if cuts or sizes.peers > 1:
        meshes = make_meshes(sizes, strategy.root_device.type, replicas=strategy.data_parallel_replicas)
    if cuts and meshes is not None:
        strategy._device_mesh = strategy.lightning_module._device_mesh = meshes.axes
    device = communication_device(None, strategy.root_device)
    groups = None
    if (sharing := strategy.sharing) is not None:
        groups = make_degree_groups(sizes.data, sharing.max_degree, tp=sharing.tp, device=device)
    return Axes(sizes=sizes, collective_device=device, meshes=meshes, degree_groups=groups)


def sizes_of(strategy: Any) -> AxisSizes:
    """Return the sizes that a strategy's attributes set, checked against the number of processes."""
    return resolve_sizes(
        getattr(strategy, "world_size", 1),
        data=strategy.data_parallel_size,
        context=fixed_context(strategy),
        tensor=strategy.tensor_parallel_size,
        pipeline=strategy.pipeline_parallel_size,
    )


def fixed_context(strategy: Any) -> int:
    """Return the fixed number of context-parallel ranks; 1 if every microbatch has its own number."""
    size = strategy.context_parallel_size
    return 1 if isinstance(size, str) else int(size)


def _refuse_axes(strategy: Any) -> None:
    if cuts_weights(strategy):
        given = {name: getattr(strategy, f"_{name}_parallel_size") for name in ("data", "tensor")}
        if set(given.values()) != {"auto"}:
            raise MisconfigurationException(
                f"{type(strategy).__name__} was given sizes as arguments ({given}), which leave no ranks for "
                "context parallelism. Set the attributes data_parallel_size and tensor_parallel_size instead."
            )
        return
    for name in ("data_parallel_replicas", "tensor_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(strategy, name)) != 1:
            raise MisconfigurationException(
                f"{name}={size} under {type(strategy).__name__}, which keeps all weights on every rank. Use "
                "THDModelParallelStrategy, or leave it at 1."
            )


def start_again(strategy: Any) -> None:
    """Start the process group of a restarted job under new keys, because torchrun's store keeps old ones."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    environment = getattr(strategy, "cluster_environment", None)
    if restarts == "0" or not shared or environment is None or dist.is_initialized():
        return
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    options = {"timeout": timeout} if (timeout := getattr(strategy, "_timeout", None)) is not None else {}
    store = TCPStore(environment.main_address, environment.main_port, is_master=False, **options)
    init_dist_connection = private("lightning.fabric.utilities.distributed._init_dist_connection")
    init_dist_connection(
        environment,
        strategy._get_process_group_backend(),
        store=PrefixStore(f"start_{restarts}", store),
        **options,
    )
