"""What a captured step may not ask, and how its logs are noted."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch

from lightning_thd.callbacks.cuda_graph import CaptureError
from lightning_thd.cuda_graph.errors import as_capture_error, calling_line, reporting_to
from lightning_thd.cuda_graph.guards import HostValue, LoggedValue, check_numbers, guarded

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


def test_logs_are_noted_with_their_arguments_and_metrics_refused() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    module, _ = with_trainer()
    with guarded(module) as logged:
        module.log("a", 1.0, True, on_step=False)
        module.log_dict({"b": torch.ones(()), "c": 2}, sync_dist=True)
        with pytest.raises(CaptureError, match="the step logs 'm', a MeanMetric"):
            module.log("m", torchmetrics.MeanMetric())
    assert [x.name for x in logged] == ["a", "b", "c"]
    assert logged[0][1:] == (1.0, (True,), {"on_step": False})
    assert logged[2].kwargs == {"sync_dist": True}


def note(**values: Any) -> list[LoggedValue]:
    return [LoggedValue(name, value, (), {}) for name, value in values.items()]


def test_numbers_have_to_be_constants() -> None:
    check_numbers([note(a=0.25, b=torch.ones(())), note(a=0.25, b=torch.zeros(()))], {128})
    with pytest.raises(CaptureError, match="logs 'a' as the Python number 1, which depends on the batch"):
        check_numbers([note(a=1), note(a=2)], set())
    with pytest.raises(CaptureError, match="logs 'a' as the Python number 128"):
        check_numbers([note(a=128), note(a=128)], {128})
    with pytest.raises(CaptureError, match="logs other keys from run to run"):
        check_numbers([note(a=1), note(b=1)], set())


def test_errors_get_the_line_of_the_code_that_raised() -> None:
    assert "test_guards.py" in str(calling_line())
    known = CaptureError("mine", "here")
    assert as_capture_error(known) is known
    assert str(known) == "here: mine"
    try:
        raise KeyError("x")
    except KeyError as error:
        found = as_capture_error(error)
    assert found.message == "KeyError: 'x'"
    assert "in test_errors_get_the_line" in str(found.where)
    assert as_capture_error(ValueError()).message == "ValueError: no message"
