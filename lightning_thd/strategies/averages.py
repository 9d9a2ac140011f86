"""Copies of the model that callbacks average -> the same copies, sharded like the model."""

from __future__ import annotations

from collections.abc import Iterable

import lightning.pytorch as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.swa_utils import AveragedModel

from lightning_thd.parallel.pipeline.cut import stages_in


def shard_copies(callbacks: Iterable[L.Callback], model: nn.Module) -> None:
    """Shard the model copies of Lightning's weight-averaging callbacks as the model is sharded.

    ``WeightAveraging``, ``EMAWeightAveraging`` and ``StochasticWeightAveraging`` copy the module before a
    strategy shards it; they update and swap parameter by parameter, never running the copy.

    Raises:
        MisconfigurationException: for a model that was cut by depth.
    """
    found = False
    for callback in callbacks:
        copy = getattr(callback, "_average_model", None)
        if isinstance(copy, nn.Module):
            if any(True for _ in stages_in(model)):
                raise MisconfigurationException(
                    f"{type(callback).__name__} averages a copy of the whole model, and a rank of a pipeline "
                    "has its own layers alone. Leave the callback out, or set pipeline_parallel_size=1."
                )
            _replace_parameters(copy.module if isinstance(copy, AveragedModel) else copy, model)
            found = True
    if found:  # after an evaluation FSDP2 leaves the root's weights gathered, and a swap would miss them
        for child in model.modules():
            if isinstance(child, FSDPModule):
                child.set_reshard_after_forward(True, recurse=False)


def _replace_parameters(copy: nn.Module, model: nn.Module) -> None:
    made: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        own = copy.get_submodule(name)
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:  # a tied one once
                clone = parameter.detach().clone()
                made[id(parameter)] = nn.Parameter(clone, requires_grad=parameter.requires_grad)
            own._parameters[key] = made[id(parameter)]
