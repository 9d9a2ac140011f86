"""A Lightning strategy with the mixin -> the axes of its job: sizes, this rank's place, process groups.

The attributes of the mixin give the sizes, or a ``ModelParallelStrategy`` its own arguments. Ranks that share
a pack are then taken from its data axis: the ranks of its mesh's ``data_parallel`` axis see different tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd.parallel.across_ranks import communication_device
from lightning_thd.parallel.context.shared_step import make_degree_groups
from lightning_thd.parallel.mesh import AxisSizes, Meshes, make_meshes, resolve_sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """The axes of a job that has started, fixed until it ends.

    Attributes:
        sizes: ranks along each axis.
        data_rank: this rank's index among the ranks that read different data.
        wire: the device on which the job's process group communicates.
        meshes: the mesh and its groups; None if every rank holds all weights and reads its own data.
        degree_groups: groups that share microbatches under dynamic context parallelism, by size.
    """

    sizes: AxisSizes
    data_rank: int
    wire: torch.device
    meshes: Meshes | None
    degree_groups: Mapping[int, dist.ProcessGroup] | None


def cuts_weights(strategy: object) -> bool:
    """Return whether a strategy can shard weights on a mesh, as FSDP2 and tensor parallelism do."""
    return isinstance(strategy, ModelParallelStrategy)


def gathers_once(strategy: Any) -> bool:
    """Return whether the ranks of FSDP2 gather weights in a step's first microbatch only."""
    return cuts_weights(strategy) and getattr(strategy, "reshard_after_forward", None) is False


def start_axes(strategy: Any, start: Callable[[], None]) -> Axes:
    """Start the job's process group and build the mesh of its axes; ``start`` is the base's own method."""
    _refuse_axes_of_weights(strategy)
    start_again(strategy)
    if cuts_weights(strategy) and _own_axes(strategy) is None:
        strategy._setup_distributed()
        sizes = sizes_of(strategy)
        meshes: Meshes | None = _meshes(strategy, sizes)
        assert meshes is not None
        strategy._device_mesh = strategy.lightning_module._device_mesh = meshes.axes
    else:
        start()
        sizes = sizes_of(strategy)
        meshes = _meshes(strategy, sizes) if sizes.peers > 1 or cuts_weights(strategy) else None
    wire = communication_device(None, strategy.root_device)
    groups = None
    if (sharing := strategy.sharing) is not None:
        groups = make_degree_groups(sizes.data, sharing.max_degree, tp=sharing.tp, device=wire)
    rank = sizes.data_rank(getattr(strategy, "global_rank", 0))
    return Axes(sizes=sizes, data_rank=rank, wire=wire, meshes=meshes, degree_groups=groups)


def sizes_of(strategy: Any) -> AxisSizes:
    """Return the sizes that a strategy's attributes and arguments ask for, checked against the job."""
    try:
        return _resolved(strategy)
    except ValueError as err:
        raise MisconfigurationException(str(err)) from err


def fixed_context(strategy: Any) -> int:
    """Return the number of ranks that share every pack: 1 for a dynamic number."""
    size = strategy.context_parallel_size
    return 1 if isinstance(size, str) else int(size)


def _resolved(strategy: Any) -> AxisSizes:
    world, own = getattr(strategy, "world_size", 1), _own_axes(strategy)
    data, tensor = strategy.data_parallel_size, strategy.tensor_parallel_size
    context, pipeline = fixed_context(strategy), strategy.pipeline_parallel_size
    if own is None:
        if tensor != 1 and not cuts_weights(strategy):
            raise ValueError(
                f"tensor_parallel_size={tensor} under {type(strategy).__name__}, which does not cut weights "
                "by rows and columns. Put THDStrategyMixin on ModelParallelStrategy, or use "
                "THDModelParallelStrategy(tensor_parallel_size=...)."
            )
        return resolve_sizes(
            world, data="auto" if data is None else data, context=context, tensor=tensor, pipeline=pipeline
        )
    own_data, own_tensor = own
    fits = own_data % context == 0 and data in (None, "auto", own_data // context) and pipeline == 1
    if not fits or tensor not in (1, own_tensor):
        raise ValueError(
            f"{type(strategy).__name__} was given data_parallel_size={own_data} and "
            f"tensor_parallel_size={own_tensor}, but its attributes say data_parallel_size={data}, "
            f"context_parallel_size={context} and tensor_parallel_size={tensor}, "
            f"pipeline_parallel_size={pipeline}. Ranks that share a pack are taken from the data axis: "
            f"give it data_parallel_size=<groups> * {context} and no pipeline, or only the attributes."
        )
    return resolve_sizes(world, data=own_data // context, context=context, tensor=own_tensor)


def _own_axes(strategy: Any) -> tuple[int, int] | None:
    """Return the data and tensor sizes given to a ``ModelParallelStrategy`` itself, ``auto`` resolved.

    None if the strategy is another one, or was left at ``auto`` while the mixin's attributes give sizes.
    """
    if not cuts_weights(strategy):
        return None
    data, tensor = strategy._data_parallel_size, strategy._tensor_parallel_size
    asked = strategy.data_parallel_size is not None or strategy.context_parallel_size != 1
    asked = asked or strategy.tensor_parallel_size != 1 or strategy.pipeline_parallel_size != 1
    if data == tensor == "auto" and asked:
        return None
    return (
        strategy.num_nodes if data == "auto" else data,
        strategy.num_processes if tensor == "auto" else tensor,
    )


def _refuse_axes_of_weights(strategy: Any) -> None:
    """Refuse axes that share weights or layers under a strategy that keeps them whole."""
    if cuts_weights(strategy):
        return
    for name in ("data_parallel_replicas", "pipeline_parallel_size"):
        if (size := getattr(strategy, name)) != 1:
            raise MisconfigurationException(
                f"{name}={size} under {type(strategy).__name__}, which does not share weights out. Use "
                "THDModelParallelStrategy, or leave it at 1."
            )


def _meshes(strategy: Any, sizes: AxisSizes) -> Meshes:
    try:
        return make_meshes(sizes, strategy.root_device.type, replicas=strategy.data_parallel_replicas)
    except ValueError as err:
        raise MisconfigurationException(str(err)) from err


def start_again(strategy: Any) -> None:
    """Start the process group of a job that torchrun has restarted, before Lightning would.

    torchrun's agent keeps one store over all starts of a job, with the addresses of dead ranks in it. Ranks
    that look there hang or end in "Connection refused". Here every start has its own keys.
    """
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    environment = getattr(strategy, "cluster_environment", None)
    if start == "0" or not shared or environment is None or dist.is_initialized():
        return
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    options = {"timeout": timeout} if (timeout := getattr(strategy, "_timeout", None)) is not None else {}
    store = TCPStore(environment.main_address, environment.main_port, is_master=False, **options)
    _init_dist_connection(
        environment,
        strategy._get_process_group_backend(),
        store=PrefixStore(f"start_{start}", store),
        **options,
    )
