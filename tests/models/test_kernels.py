"""``use_kernels=True``: kernels replace the forward of layers, here stand-ins of a hub's, on packs."""

from __future__ import annotations

import copy
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, modeling_utils
from transformers.integrations import hub_kernels

from lightning_thd import THDBatch, causal_lm_loss
from tests.cuda_graph.support import gradients, random_batch, worst
from tests.models.families import build

TOLERANCE = 1e-5  # fp32


def norm(self: Any, hidden: Tensor) -> Tensor:
    RAN.append("norm")
    return F.rms_norm(hidden, self.weight.shape, self.weight, self.variance_epsilon)


def gated(self: Any, x: Tensor) -> Tensor:
    RAN.append("gated")
    gate = F.linear(x, self.gate_proj.weight)
    up = F.linear(x, self.up_proj.weight)
    return F.linear(gate * gate.sigmoid() * up, self.down_proj.weight)


RAN: list[str] = []
KERNELS = {"RMSNorm": norm, "MLP": gated}


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a stand-in where transformers calls the package kernels: it binds another forward to layers."""

    def kernelize(model: Any, mode: Any = None) -> None:
        for module in model.modules():
            for ending, forward in KERNELS.items():
                if type(module).__name__.endswith(ending):
                    module.forward = MethodType(forward, module)
        model._use_kernels = True

    RAN.clear()
    monkeypatch.setattr(modeling_utils, "is_kernels_available", lambda: True)
    monkeypatch.setattr(modeling_utils, "kernelize", kernelize)
    monkeypatch.setattr(hub_kernels, "register_kernel_mapping_transformers", lambda: None)


def assert_same_step(model: Any, plain: Any, batch: THDBatch) -> None:
    expected = causal_lm_loss(plain, batch)
    RAN.clear()
    loss = causal_lm_loss(model, batch)
    assert set(RAN) == {"norm", "gated"}
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=TOLERANCE)
    assert worst(gradients(model, loss), gradients(plain, expected)) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_a_model_switched_to_kernels_trains_exactly_on_packs(name: str) -> None:
    plain = build(name, "thd").train()
    model: Any = copy.deepcopy(plain)
    model.set_use_kernels(True)
    for seed in range(3):
        assert_same_step(model, plain, random_batch(seed, count=5))


def test_a_model_loaded_with_kernels_trains_exactly_on_packs(tmp_path: Path) -> None:
    plain: Any = build("llama", "thd")
    plain.save_pretrained(tmp_path)
    options: Any = {"attn_implementation": "thd", "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, use_kernels=True, **options)
    assert model.use_kernels
    assert_same_step(model.train(), plain.train(), random_batch(1, count=5))
