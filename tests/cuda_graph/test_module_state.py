"""What a capture takes for granted about a module, and what warm-up leaves as it was."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.callbacks.cuda_graph import CaptureError
from lightning_thd.cuda_graph.module_state import (
    refuse_fp8,
    restored,
)
from tests.cuda_graph.support import graphed, random_batch
from tests.tiny import tiny_llama


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.scale, self.seen, self._private = 1.0, [1], 0
        self.register_buffer("table", torch.zeros(2))


def test_buffers_and_random_states_come_back_whatever_the_body_does() -> None:
    part = Part()
    table, state = part.table, torch.get_rng_state()

    def body() -> None:
        with restored(part):
            torch.rand(3)
            part.table.fill_(5.0)
            part.table = torch.ones(1)
            raise KeyError

    with pytest.raises(KeyError):
        body()
    assert part.table is table
    assert part.table.tolist() == [0.0, 0.0]
    assert torch.equal(torch.get_rng_state(), state)


class TransformerEngineBaseModule(nn.Linear):
    """Stands for Transformer Engine's, which sets ``fp8`` when it runs."""

    fp8 = False


@pytest.mark.parametrize("name", ["fp8", "quantization"])
def test_transformer_engine_in_fp8_is_refused_and_in_bf16_is_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.Sequential(TransformerEngineBaseModule(2, 2), nn.Linear(2, 2))
    refuse_fp8(module)
    state = SimpleNamespace(FP8GlobalStateManager=SimpleNamespace(is_fp8_enabled=lambda: True))
    monkeypatch.setitem(sys.modules, f"transformer_engine.pytorch.{name}", state)
    refuse_fp8(nn.Linear(2, 2))  # no layer of it
    with pytest.raises(CaptureError, match="runs 1 layers in fp8.*Train in bf16 to have graphs"):
        refuse_fp8(module)
    monkeypatch.delitem(sys.modules, f"transformer_engine.pytorch.{name}")
    module[0].fp8 = True  # as its forward leaves it
    with pytest.raises(CaptureError, match="in fp8"):
        refuse_fp8(module)


def test_a_step_that_turns_fp8_on_itself_is_refused_after_its_warm_up() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.te = tiny_llama(torch.float64), TransformerEngineBaseModule(1, 1)

    def loss(module: Any, batch: THDBatch) -> Tensor:
        module.te.fp8 = True
        return causal_lm_loss(module.model, batch)

    step = graphed(Net(), loss)
    with pytest.raises(CaptureError, match="in fp8"):
        step(random_batch(1, count=4))
