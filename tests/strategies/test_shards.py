"""Modules that were built on the meta device get memory, and weights of their own ``reset_parameters``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_thd.strategies.shards import _fill_meta_tensors
from lightning_thd.warnings import THDWarning

CPU = torch.device("cpu")


class Scale(nn.Module):
    """Holds a weight that it cannot draw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


def test_weights_without_memory_are_drawn_as_the_module_draws_them() -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    torch.manual_seed(0)
    _fill_meta_tensors(module, CPU)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name)), name


def test_a_module_that_cannot_draw_its_weights_is_named() -> None:
    with torch.device("meta"):
        module = nn.Sequential(Scale(), nn.Linear(2, 2))
    with pytest.warns(THDWarning, match=r"^Scale were built without memory and have no reset_parameters\(\)"):
        _fill_meta_tensors(module, CPU)


def test_weights_with_memory_stay_as_they_are() -> None:
    module = nn.Sequential(Scale(), nn.Linear(2, 2))
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    _fill_meta_tensors(module, CPU)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name]), name
