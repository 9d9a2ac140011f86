"""A fit that graphs cannot serve is what it is without them: steps that read the host, Trainers, batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd import THDBatch
from lightning_thd.callbacks.cuda_graph import CUDAGraphCallback, GraphCosts
from lightning_thd.cuda_graph.recording import RecordingBackend
from tests.callbacks.support import Repeated, assert_same, callback, fit, parameters
from tests.cuda_graph.support import GraphModule
from tests.tiny import TinyModule, largest_error


class ReadsHost(GraphModule):
    def training_step(self, batch: THDBatch, batch_idx: int) -> Any:
        self.log("sequences", float(len(batch)))  # the line to be named
        return super().training_step(batch, batch_idx)


class LogsMetric(GraphModule):
    def __init__(self) -> None:
        super().__init__()
        import torchmetrics

        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: THDBatch, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.mean(output["loss"].detach())
        self.log("mean", self.mean)
        return output


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (ReadsHost, r"test_cuda_graph_refusals.py:\d+ in training_step: the step reads batch.lengths"),
        (LogsMetric, r"the step logs 'mean', a MeanMetric"),
        (TinyModule, r"tiny.py:\d+ in training_step: the step reads batch.sequence_ids"),
    ],
)
def test_a_step_that_cannot_be_captured_trains_as_if_nothing_was_there(module: Any, message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        found = fit(callback(require=False, max_sequences=9), module=module(), max_steps=2)
    wanted = fit(module=module(), max_steps=2)
    assert largest_error(parameters(found[0]), parameters(wanted[0])) == 0.0
    assert found[0].outputs == wanted[0].outputs
    for key, value in wanted[1].callback_metrics.items():
        assert torch.equal(found[1].callback_metrics[key], value), key


class Manual(GraphModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: THDBatch, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.manual_backward(output["loss"])
        self.optimizers().step()
        self.optimizers().zero_grad()
        return output


class Unavailable(RecordingBackend):
    def unavailable(self, device: torch.device) -> str | None:
        return "there is no CUDA device"


@pytest.mark.parametrize(
    ("module", "graphs", "options", "message"),
    [
        (GraphModule, {"backend": Unavailable()}, {}, "there is no CUDA device"),
        (Manual, {}, {"gradient_clip_val": None}, "automatic_optimization=False.*GraphedStep"),
        (GraphModule, {"max_sequences": 1}, {}, r"max_sequences=\(1,\) is smaller than any batch needs"),
        (
            GraphModule,
            {"max_sequences": "auto", "costs": GraphCosts(eager=1.0, graph=1.0)},
            {},
            "not expected to be faster",
        ),
    ],
)
def test_where_graphs_are_not_possible_the_callback_idles_with_one_message_or_raises(
    module: Any, graphs: Any, options: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        found = fit(callback(**{"require": False, **graphs}), module=module(), max_steps=2, **options)
    messages = [r.getMessage() for r in caplog.records if "CUDAGraphCallback is idle" in r.getMessage()]
    assert len(messages) == 1
    wanted = fit(module=module(), max_steps=2, **options)
    assert largest_error(parameters(found[0]), parameters(wanted[0])) == 0.0
    with pytest.raises(MisconfigurationException, match=message):
        fit(callback(**graphs), module=module(), **options)


def test_sharded_modules_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lightning_thd.callbacks.cuda_graph.sharded_by",
        lambda module: "FullyShardedDataParallel",
    )
    with pytest.raises(
        MisconfigurationException, match="sharded by FullyShardedDataParallel, whose gathered"
    ):
        fit(callback())


def test_batches_of_another_type_are_left_alone() -> None:
    class Plain(GraphModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.model(batch[None], use_cache=False).logits.square().mean()
            return {"loss": loss, "tokens": torch.ones(())}

    data = Repeated([torch.arange(5)] * 4)
    module, _ = fit(callback(require=False), module=Plain(), data=data, max_steps=4)
    assert len(module.outputs) == 4
    with pytest.raises(MisconfigurationException, match="the batches are Tensor"):
        fit(callback(), module=Plain(), data=data, max_steps=4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")
def test_the_default_idles_without_cuda() -> None:
    graphs = CUDAGraphCallback()
    assert_same(fit(graphs), fit(), 1e-15)
    assert graphs.stats.hit_rate == 0.0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_sequences": 0}, "wanted 'auto', a number of sequences such as 64"),
        ({"max_sequences": ()}, "wanted 'auto'"),
        ({"max_sequences": "many"}, "max_sequences='many'"),
        ({"max_sequences": (8, True)}, "wanted 'auto'"),
    ],
)
def test_messages(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CUDAGraphCallback(**kwargs)
