"""Modules that cannot be captured as one piece -> an error that says why."""

from __future__ import annotations

from torch import nn

_SHARDED = ("FSDPModule", "FullyShardedDataParallel", "FullyShardedDataParallelPlus", "DeepSpeedEngine")


def sharded_by(module: nn.Module) -> str | None:
    """Return the name of what shards the module's parameters, or None."""
    for child in module.modules():
        for cls in type(child).__mro__:
            if cls.__name__ in _SHARDED:
                return cls.__name__
    return None


def refuse_sharded(module: nn.Module) -> None:
    """Raise for modules sharded by FSDP or DeepSpeed.

    Raises:
        ValueError: naming what shards the module.
    """
    found = sharded_by(module)
    if found is not None:
        raise ValueError(
            f"The module is sharded by {found}, which gathers parameters into its own memory at every step: "
            "a captured step would keep the addresses of the first. Use CUDA graphs with one device or DDP, "
            "or train without them."
        )
