"""What a graph cannot hold runs eagerly for good, or is refused, with its line and its reason."""

from __future__ import annotations

import inspect
import logging
import operator
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.callbacks.cuda_graph import CaptureError, GraphedStep, lint_capture
from lightning_thd.cuda_graph.guards import HostValue, guarded, remembered
from lightning_thd.parallel.shard import shard_batch
from tests.cuda_graph.support import BUCKETS, GraphModule, graphed, random_batch
from tests.models.families import build
from tests.tiny import TinyModule, tiny_llama


def item_loss(model: nn.Module, batch: THDBatch) -> Tensor:
    loss = causal_lm_loss(model, batch)
    return loss * (1.0 if loss.item() > 0 else 2.0)  # the line to be named


def lengths_loss(model: nn.Module, batch: THDBatch) -> Tensor:
    return causal_lm_loss(model, batch) / len(batch)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (item_loss, r"test_refusals.py:\d+ in item_loss: .item\(\) reads a value back"),
        (lengths_loss, r"test_refusals.py:\d+ in lengths_loss: the step reads batch.lengths"),
        (lambda m, b: None, r"returned None"),
        (lambda m, b: causal_lm_loss(m, b).detach(), r"no output of the step requires a gradient"),
        (lambda m, b: {"loss": causal_lm_loss(m, b), "slots": 3}, r"returned a int beside its tensors"),
    ],
)
def test_what_a_graph_cannot_hold_runs_eagerly_for_good_with_its_line_named(
    function: Any, message: str
) -> None:
    model = tiny_llama(torch.float64)
    step = graphed(model, function, require=False)
    batches = [random_batch(seed, count=4) for seed in range(3)]
    with pytest.warns(UserWarning, match=message) as caught:
        outputs = [step(batch) for batch in batches]
    assert sum("CUDA graphs are off" in str(w.message) for w in caught) == 1
    assert str(outputs) == str([function(model, batch) for batch in batches])
    assert step.stats.fallbacks["capture_error"] == 3
    assert step.stats.replays == 0
    with pytest.raises(CaptureError, match=message):
        graphed(model, function)(batches[0])


def test_sharded_modules_and_steps_without_buckets_are_refused() -> None:
    class FSDPModule(nn.Module):
        pass

    with pytest.raises(ValueError, match="sharded by FSDPModule"):
        GraphedStep(causal_lm_loss, FSDPModule(), buckets=BUCKETS)
    with pytest.raises(ValueError, match="got no buckets"):
        GraphedStep(causal_lm_loss, tiny_llama(), buckets=[])


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")
def test_without_cuda_steps_run_eagerly() -> None:
    model = tiny_llama(torch.float64)
    batch = random_batch(1, count=4)
    step = GraphedStep(causal_lm_loss, model, buckets=BUCKETS)
    with pytest.warns(UserWarning, match="there is no CUDA device"):
        assert torch.equal(step(batch), causal_lm_loss(model, batch))


class Extra(nn.Module):
    """Wraps the tiny model with what a replay would get wrong."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = tiny_llama(torch.float64)
        self.kind = kind
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        # a list hides it from the module
        self.outside = [torch.ones((), dtype=torch.float64, requires_grad=True)]
        self.last = torch.zeros(())
        self.calls = 0
        self.losses = list[Tensor]()
        self.mean = MeanMetric()

    def loss(self, batch: THDBatch) -> Tensor:
        loss = causal_lm_loss(self.model, batch)
        if self.kind == "in place":
            self.total += batch.targets.numel()
        elif self.kind == "rebound":
            self.total = self.total + 1
        elif self.kind == "kept":  # a hook would read the value of the capture
            self.last = loss.detach()
        elif self.kind == "counted":
            self.calls += 1
            self.losses.append(loss.detach())
            self.mean.update(loss.detach())
        elif self.kind == "outside":
            loss = loss * self.outside[0]
        return loss


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "in place",
            r"the step changes Extra.total. A replay would not change Python state again, and would count "
            "dummy tokens of padding in a buffer. Move counters",
        ),
        ("rebound", r"the step changes Extra.total"),
        ("kept", r"the step changes Extra.last"),
        ("counted", r"the step changes Extra.calls"),
        ("outside", r"trains a tensor of shape \(\) that is not a parameter of the module"),
    ],
)
def test_state_that_a_replay_would_get_wrong_is_refused_and_left_alone(kind: str, message: str) -> None:
    module = Extra(kind)
    buffer = module.total
    step = graphed(module, Extra.loss, require=False)
    with pytest.warns(UserWarning, match=message):
        loss = step(random_batch(1, count=4))
    assert float(module.total) == {"in place": loss_slots(), "rebound": 1.0}.get(kind, 0.0)
    assert (module.total is buffer) == (kind != "rebound")
    if kind == "kept":
        assert module.last == loss
    if kind == "counted":  # once, by the eager step
        assert module.calls == len(module.losses) == module.mean.update_count == 1
        assert float(module.mean.compute()) == pytest.approx(float(loss.detach()))
    assert loss.requires_grad


def loss_slots() -> int:
    return int(random_batch(1, count=4).targets.numel())  # one eager step, no warm-up left behind


def test_balancing_losses_are_refused() -> None:
    model = build("mixtral", "thd").train()
    model.config.output_router_logits = True
    with pytest.raises(CaptureError, match="balancing loss would count the dummy tokens"):
        graphed(model)(random_batch(1, count=4))


class TransformerEngineBaseModule(nn.Linear):
    """Stands for Transformer Engine's, which sets ``fp8`` when it runs."""

    fp8 = False


@pytest.mark.parametrize("switch", ["whole", "inside"])
def test_transformer_engine_in_fp8_is_refused(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.ModuleDict({"model": tiny_llama(torch.float64), "te": TransformerEngineBaseModule(1, 1)})

    def loss(module: Any, batch: THDBatch) -> Tensor:
        module["te"].fp8 = module["te"].fp8 or switch == "inside"
        return causal_lm_loss(module["model"], batch)

    if switch == "whole":
        state = SimpleNamespace(FP8GlobalStateManager=SimpleNamespace(is_fp8_enabled=lambda: True))
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.quantization", state)
    with pytest.raises(CaptureError, match="runs 1 layers in fp8.*Train in bf16 to have graphs"):
        graphed(module, loss)(random_batch(1, count=4))


USES: list[Any] = [bool, int, str, operator.neg, lambda x: 2 * x, lambda x: x < 5, lambda x: {x: 1}]


def test_a_batch_index_may_be_passed_on_but_not_used() -> None:
    value = HostValue("batch_idx")
    assert [value][0] is value
    for use in USES:
        with pytest.raises(CaptureError, match="the step uses batch_idx, which changes from batch to batch"):
            use(value)


def test_the_trainers_progress_is_refused_and_its_shape_is_not() -> None:
    module = GraphModule()
    trainer: Any = SimpleNamespace(global_step=3, world_size=2, current_epoch=1, callback_metrics={})
    module._trainer = trainer
    with guarded(module):
        assert module._trainer.world_size == 2
        for name in ("global_step", "current_epoch", "callback_metrics"):
            with pytest.raises(CaptureError, match=rf"the step uses trainer.{name}"):
                getattr(module._trainer, name)
    assert module._trainer is trainer
    assert "log" not in module.__dict__


def bad_step(model: nn.Module, batch: THDBatch) -> Tensor:
    loss = causal_lm_loss(model, batch)
    a = loss.item()
    b = batch.targets.tolist()[0]
    c = batch.targets[batch.targets > 0].sum()
    d = (batch.targets > 0).nonzero().sum()
    if loss > 0:
        loss = loss + 0.0
    e = torch.tensor(3.0)
    f = len(batch.lengths)
    g = torch.repeat_interleave(batch.cu_seqlens.diff().long()).sum()
    h = len(str(loss.detach()))
    i = logging.LogRecord("", 0, "", 0, "%s", (loss,), None).getMessage()
    return loss + 0.0 * (a + b + c + d + e + f + g + h + len(i))


def test_every_line_is_named_once() -> None:
    lines, start = inspect.getsourcelines(bad_step)
    report = lint_capture(tiny_llama(), random_batch(1, count=4), step=bad_step)
    named = [int(x.where.split(":")[1].split()[0]) - start for x in report.findings if x.where]
    texts = [lines[i].strip() for i in named]
    assert [t[0] for t in texts] == list("abcdief" + "ghi")
    assert len(report.findings) == 10
    assert not report.ok


@pytest.mark.parametrize("name", ["mistral", "bamba", "gpt2"])
def test_families_are_clean(name: str) -> None:
    model = build(name, "thd").train().to(torch.bfloat16 if name == "mistral" else torch.float32)
    report = lint_capture(model, random_batch(1, count=6, longest=8))
    assert report.ok, str(report)


def test_lightning_modules_are_judged_by_their_training_step_and_left_as_they_were() -> None:
    module = GraphModule()
    batch = random_batch(1, count=4)
    before = {name: p.clone() for name, p in module.state_dict().items()}
    state = torch.get_rng_state()
    report = lint_capture(module, batch)
    assert report.ok, str(report)
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
    assert all(p.grad is None and p.device.type == "cpu" for p in module.parameters())
    assert "log" not in module.__dict__
    messages = [x.message for x in lint_capture(TinyModule(), batch).findings]
    assert "batch.sequence_ids" in messages[0]
    assert any("TinyModule.seen" in message for message in messages)


class Index(GraphModule):
    @torch.autocast("cpu", enabled=False)  # a wrapper of (*args, **kwargs)
    def training_step(self, batch: THDBatch, batch_idx: int, weight: float = 1.0) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * batch_idx * weight


class Fixed(GraphModule):
    scale = torch.ones(2)  # no buffer, so it stays on the CPU

    def training_step(self, *args: Any) -> Any:
        return super().training_step(*args)["loss"] * self.scale.to(args[0].input_ids.device).sum()


def test_the_batch_index_and_copies_to_the_device_are_found() -> None:
    reports = [lint_capture(module(), random_batch(1, count=4)) for module in (Index, Fixed)]
    assert [x.message.split(",")[0] for report in reports for x in report.findings] == [
        "the step uses argument 2 of training_step (batch_idx)",
        "a copy to another device copies host values to the device",
    ]


def test_messages() -> None:
    with pytest.raises(ValueError, match="lint_capture got a Tensor; wanted a THDBatch"):
        lint_capture(tiny_llama(), torch.ones(1))  # type: ignore[arg-type]
    whole = THDBatch.collate([{"input_ids": torch.ones(8, dtype=torch.int64)}])
    with pytest.raises(ValueError, match=r"steps always run eagerly \(context_parallel\); wanted a THDBatch"):
        lint_capture(tiny_llama(), shard_batch(whole, group=None, cp=2, rank=0))
    shared = THDBatch.collate([{"input_ids": [3, 4]}, {"input_ids": [3, 5]}], share_prefixes=True)
    with pytest.raises(ValueError, match="wanted a THDBatch without shared prefixes"):
        lint_capture(tiny_llama(), shared)


def test_expanded_attributes_do_not_stop_a_module_from_being_given_back() -> None:
    module: Any = nn.Linear(2, 2)
    module.mask = torch.ones(1).expand(3)
    module.count = 1
    module.kept = torch.ones(2)
    give_back = remembered(map(vars, module.modules()))
    module.count = 5
    module.kept.zero_()
    give_back()
    assert (module.count, module.kept.tolist(), module.mask.tolist()) == (1, [1.0, 1.0], [1.0] * 3)
