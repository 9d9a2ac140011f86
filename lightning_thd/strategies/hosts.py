"""A Lightning strategy with the mixin -> the sizes of its axes, or an error if it cannot host the mixin."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lightning_thd.parallel.mesh import AxisSizes, resolve_sizes

# Names of Lightning's classes, for importing them needs their packages; why the step loop cannot run in them.
_REFUSED = {
    "DeepSpeedStrategy": "whose engine accumulates, clips and steps by itself",
    "XLAStrategy": "which compiles one step of fixed shapes",
    "SingleDeviceXLAStrategy": "which compiles one step of fixed shapes",
}


def refuse_host(strategy: type) -> None:
    """Refuse a class that puts the mixin on a strategy whose steps the mixin cannot run.

    Raises:
        TypeError: naming the strategy, and those that can.
    """
    for base in strategy.__mro__:
        if base.__name__ in _REFUSED and base.__module__.partition(".")[0].startswith("lightning"):
            raise TypeError(
                f"{strategy.__name__} puts THDStrategyMixin on {base.__name__}, {_REFUSED[base.__name__]}. "
                "Put it on SingleDeviceStrategy, DDPStrategy, FSDPStrategy or ModelParallelStrategy, or use "
                f"Packs(n) under {base.__name__} without the mixin."
            )


def cuts_weights(strategy: object) -> bool:
    """Return whether a strategy can shard weights on a mesh, as FSDP2 and tensor parallelism do."""
    return isinstance(strategy, ModelParallelStrategy)


def own_axes(strategy: Any) -> tuple[int, int] | None:
    """Return the data and tensor sizes given to a ``ModelParallelStrategy`` itself.

    Returns:
        Data and tensor, ``auto`` resolved as Lightning does; None for another strategy, and for one that was
        left at ``auto`` while the mixin's attributes give sizes.
    """
    if not isinstance(strategy, ModelParallelStrategy):
        return None
    mixin: Any = strategy
    data, tensor = strategy._data_parallel_size, strategy._tensor_parallel_size
    asked = mixin.data_parallel_size is not None or mixin.context_parallel_size != 1
    if data == tensor == "auto" and (asked or mixin.tensor_parallel_size != 1):
        return None
    return (
        strategy.num_nodes if data == "auto" else data,
        strategy.num_processes if tensor == "auto" else tensor,
    )


def resolve_axes(
    strategy: Strategy,
    *,
    data: int | Literal["auto"] | None,
    context: int,
    tensor: int,
    pipeline: int = 1,
) -> AxisSizes:
    """Return the sizes of a job's axes, the host strategy's own axes taken into account.

    Ranks that share a pack are taken from the data axis of a host that has one: its mesh's ``data_parallel``
    ranks are those that see different tokens, among which FSDP2 shards and averages.

    Raises:
        ValueError: when they do not make up the job, or contradict the host's.
    """
    world = getattr(strategy, "world_size", 1)
    own = own_axes(strategy)
    if own is None:
        if tensor != 1 and not isinstance(strategy, ModelParallelStrategy):
            raise ValueError(
                f"tensor_parallel_size={tensor} under {type(strategy).__name__}, which does not cut weights "
                "by rows and columns. Put THDStrategyMixin on ModelParallelStrategy, or use "
                "THDModelParallelStrategy(tensor_parallel_size=...)."
            )
        return resolve_sizes(
            world, data="auto" if data is None else data, context=context, tensor=tensor, pipeline=pipeline
        )
    host_data, host_tensor = own
    fits = host_data % context == 0 and data in (None, "auto", host_data // context)
    if not fits or tensor not in (1, host_tensor):
        raise ValueError(
            f"{type(strategy).__name__} was given data_parallel_size={host_data} and "
            f"tensor_parallel_size={host_tensor}, but its attributes say data_parallel_size={data}, "
            f"context_parallel_size={context} and tensor_parallel_size={tensor}. Ranks that share a pack are "
            f"taken from the data axis: give it data_parallel_size=<groups> * {context}, or no sizes but the "
            "attributes."
        )
    return resolve_sizes(world, data=host_data // context, context=context, tensor=host_tensor)


def local_gradients(strategy: Strategy) -> AbstractContextManager[Any] | None:
    """Return a context in which gradients stay unreduced; None for hosts that have their own or need none."""
    model: Any = getattr(strategy, "model", None)
    if isinstance(strategy, FSDPStrategy) and isinstance(model, FullyShardedDataParallel):
        context: AbstractContextManager[Any] = model.no_sync()
        return context
    if isinstance(strategy, ModelParallelStrategy) and model is not None:
        return _without("set_requires_gradient_sync", model)
    return None


@contextmanager
def kept_weights(strategy: Strategy) -> Generator[None]:
    """Keep what FSDP2 has gathered past a backward pass, where it is not freed after forward passes either.

    A step of several microbatches then gathers weights once, and takes no more memory at its peak, which is
    where a forward pass ends.
    """
    model: Any = getattr(strategy, "model", None)
    if gathers_once(strategy) and isinstance(model, nn.Module):
        with _without("set_reshard_after_backward", model):
            yield
    else:
        yield


def gathers_once(strategy: Strategy) -> bool:
    """Return whether the ranks of FSDP2 meet to gather weights in a step's first microbatch alone."""
    return (
        isinstance(strategy, ModelParallelStrategy)
        and getattr(strategy, "reshard_after_forward", None) is False
    )


@contextmanager
def _without(setting: str, model: nn.Module) -> Generator[None]:
    """Switch a setting of FSDP2's modules off inside this context."""
    sharded = [child for child in model.modules() if isinstance(child, FSDPModule)]
    for module in sharded:
        getattr(module, setting)(False, recurse=False)
    try:
        yield
    finally:
        for module in sharded:
            getattr(module, setting)(True, recurse=False)
