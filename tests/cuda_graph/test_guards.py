"""What a captured step may not ask, and how its logs are noted."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch

from lightning_thd.callbacks.cuda_graph import CaptureError
from lightning_thd.cuda_graph.errors import reporting_to
from lightning_thd.cuda_graph.guards import HostValue, guarded

USES: list[Any] = [
    bool,
    int,
    float,
    str,
    operator.index,
    operator.neg,
    lambda x: x + 1,
    lambda x: 2 * x,
    lambda x: x % 3,
    lambda x: x == 0,
    lambda x: x < 5,
    lambda x: f"{x}",
    lambda x: {x: 1},
]


@pytest.mark.parametrize("use", USES)
def test_a_batch_index_may_be_passed_on_but_not_used(use: Any) -> None:
    value = HostValue("batch_idx")
    assert [value][0] is value
    with pytest.raises(CaptureError, match="the step uses batch_idx, which changes from batch to batch"):
        use(value)


def test_a_lint_hears_of_the_use_and_goes_on() -> None:
    heard: list[tuple[str, str | None]] = []
    with reporting_to(lambda message, where: heard.append((message, where))):
        assert HostValue("batch_idx", 4) + 1 == 5
    assert len(heard) == 1
    assert "test_guards.py" in str(heard[0][1])


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.layer = 0.5, torch.nn.Linear(1, 1)


def with_trainer() -> tuple[Any, Any]:
    module = Module()
    trainer = SimpleNamespace(global_step=3, world_size=2, current_epoch=1, callback_metrics={})
    module._trainer = trainer  # type: ignore[assignment]
    return module, trainer


def test_the_trainers_progress_is_refused_and_its_shape_is_not() -> None:
    module, trainer = with_trainer()
    with guarded(module):
        assert module._trainer.world_size == 2
        for name in ("global_step", "current_epoch", "callback_metrics"):
            with pytest.raises(CaptureError, match=rf"the step uses trainer.{name}"):
                getattr(module._trainer, name)
    assert module._trainer is trainer
    assert "log" not in module.__dict__
