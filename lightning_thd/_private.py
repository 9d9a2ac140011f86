"""A private name of another package -> its value, or an error that names the feature that needs it.

``PRIVATE`` lists the private modules, classes and functions that this package takes from others by an import.
Each is taken where it is used, so that a release that moves one stops one feature and nothing else.
"""

from __future__ import annotations

import importlib
from typing import Any, Final, NamedTuple

from lightning_thd._versions import installed_version


class PrivateName(NamedTuple):
    """What is known of one private name."""

    place: str  # the module of this package that uses it
    checked: str  # the releases in which it was checked
    feature: str  # what stops working if it is gone


class PrivateNameGone(RuntimeError):
    """Another package no longer has a private name that a feature needs."""


PRIVATE: Final[dict[str, PrivateName]] = {
    "lightning.fabric.utilities.distributed._init_dist_connection": PrivateName(
        "strategies/axes.py", "lightning 2.6.6", "a job that torchrun has started again"
    ),
    "lightning.fabric.utilities.init._materialize_distributed_module": PrivateName(
        "strategies/shards.py", "lightning 2.6.6", 'strategy="thd_model_parallel"'
    ),
    "lightning.pytorch.overrides.distributed._IndexBatchSamplerWrapper": PrivateName(
        "data/loader.py", "lightning 2.6.6", "the indices of predicted batches in BasePredictionWriter"
    ),
    "torch.distributed.checkpoint.default_planner._EmptyStateDictLoadPlanner": PrivateName(
        "strategies/checkpoints.py", "torch 2.11 to 2.13", "loading a sharded checkpoint into another layout"
    ),
    "torch.distributed.checkpoint.state_dict_loader._load_state_dict": PrivateName(
        "strategies/checkpoints.py", "torch 2.11 to 2.13", "loading a sharded checkpoint into another layout"
    ),
    "torch.utils.data._utils.worker": PrivateName(
        "data/streams/intake.py", "torch 2.11 to 2.13", "streams that are read by workers (num_workers)"
    ),
}


def private(name: str) -> Any:
    """Return what a name of ``PRIVATE`` names.

    Raises:
        PrivateNameGone: if the installed release has no such name.
    """
    known = PRIVATE[name]
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (AttributeError, ImportError) as error:
        package = name.partition(".")[0]
        raise PrivateNameGone(
            f"{known.feature} needs {name}, which {package} {installed_version(package)} does not have. It "
            f"was checked with {known.checked}. Install such a release, or a newer lightning_thd. Everything "
            "else works."
        ) from error
