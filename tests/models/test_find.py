"""The transformers models inside wrappers, modules and other models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from lightning_thd._find import model_config, model_with_head, models_in, outermost_models, unwrapped
from tests.models.families import build


def test_models_are_found_by_path_outer_ones_first() -> None:
    holder = nn.ModuleDict({"policy": build("llama", "eager"), "reference": build("llama", "eager")})
    policy, reference = holder.values()
    assert [name for name, _ in models_in(holder)][:2] == ["policy", "policy.model"]
    assert outermost_models(holder) == {"policy": policy, "reference": reference}
    assert model_with_head(holder) is policy
    assert model_config(holder) is policy.config
    assert model_config(nn.Linear(2, 2)) is model_config(None) is model_with_head(nn.Linear(2, 2)) is None


class Wrapped(nn.Module):
    """As DistributedDataParallel holds a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # the first import of the compiler
def test_wrappers_are_taken_off() -> None:
    peft = pytest.importorskip("peft")
    model = build("llama", "eager")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    assert unwrapped(torch.compile(Wrapped(wrapped))) is model_with_head(wrapped) is model
