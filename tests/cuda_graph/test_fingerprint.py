"""What a graph has baked in: modules, their hooks and tensors, and what the step reads of them."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_thd import causal_lm_loss
from lightning_thd.callbacks.cuda_graph import CaptureError, GraphedStep
from lightning_thd.cuda_graph.fingerprint import Fingerprint, only_looking, written_by
from lightning_thd.cuda_graph.recording import RecordingBackend
from tests.cuda_graph import support
from tests.cuda_graph.support import BUCKETS, GraphModule, gradients, graphed, random_batch, worst
from tests.tiny import tiny_llama


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._alpha, self.unread = 1.0, 1
        self.config = SimpleNamespace(beta=2.0, nested=SimpleNamespace(deep=1))
        self.factors = {"a": 1.0, "b": [2.0]}
        self.names = {"x"}
        self.shape, self.times = torch.abs, partial(torch.mul, other=1.0)

    kind = 1.0

    def helper(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.times(self.shape(x)) * self.helper() * self.kind * self.config.nested.deep
        factor = self._alpha * self.config.beta * self.factors["a"] * len(self.names)
        factor = factor * getattr(self, "later", 1.0) * self.factors["b"][0]
        result: Tensor = self.last * factor
        return result


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.plain = nn.Linear(2, 2, bias=False)
        self.norm = nn.BatchNorm1d(2)
        self.inner = Inner()
        self.metric = MeanMetric()  # whose hash is of its state
        self.scale, self.seen = 1.0, [1]
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(self.norm(self.plain(self.linear(x)))) * self.scale
        return result


def taken_of(part: Part) -> Fingerprint:
    with written_by(part) as written:
        part(torch.ones(4, 3)).sum().backward()
    return Fingerprint(part, lambda module, x: module(x), written)


def replace_data(part: Part) -> None:
    part.linear.weight.data = part.linear.weight.data.clone()


def replace_buffer(part: Part) -> None:
    part.table = torch.zeros(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace_data, "weight moved to other memory"),
        (replace_buffer, "table moved to other memory"),
        (
            lambda part: setattr(part.linear, "bias", nn.Parameter(torch.zeros(2))),
            "bias moved to other memory",
        ),
        (lambda part: setattr(part.plain, "weight", None), "weight moved to other memory"),
        (lambda part: part.linear.bias.requires_grad_(False), "bias.requires_grad changed"),
        (lambda part: part.norm.eval(), "between train() and eval()"),
        (lambda part: setattr(part, "scale", 2.0), "the attribute scale, which the step reads, changed"),
        (lambda part: setattr(part, "scale", True), "the attribute scale"),
        (lambda part: delattr(part, "scale"), "the attribute scale"),
        (lambda part: setattr(part.inner, "_alpha", 2.0), "the attribute inner._alpha"),
        (lambda part: setattr(part.norm, "eps", 1.0), "the attribute norm.eps"),
        (lambda part: setattr(part.inner.config, "beta", 1.0), "inner.config, which the step reads, holds"),
        (lambda part: part.inner.factors.update(a=3.0), "inner.factors, which the step reads, holds"),
        (lambda part: part.inner.names.add("y"), "inner.names, which the step reads, holds"),
        (lambda part: setattr(part, "linear", nn.Linear(3, 2)), "the modules of the module changed"),
        (lambda part: part.inner.add_module("new", nn.Identity()), "the modules of inner changed"),
        (
            lambda part: part.plain.register_parameter("bias", nn.Parameter(torch.zeros(2))),
            "the parameters of plain changed",
        ),
        (lambda part: part.inner.register_buffer("new", torch.zeros(1)), "the buffers of inner changed"),
        (lambda part: part.linear.register_forward_hook(print), "the hooks of linear changed"),
        (lambda part: part.linear.register_forward_pre_hook(print), "the hooks of linear changed"),
        (lambda part: part.linear.register_full_backward_hook(print), "the hooks of linear changed"),
        (
            lambda part: setattr(part.norm, "forward", lambda x: x),
            "the attribute norm.forward",
        ),
        (lambda part: setattr(part.inner, "shape", torch.neg), "the attribute inner.shape"),
        (
            lambda part: part.inner.times.keywords.update(other=2.0),
            "inner.times, which the step reads, holds",
        ),
        (
            lambda part: setattr(part.inner.config.nested, "deep", 2),
            "inner.config, which the step reads, holds",
        ),
        (
            lambda part: setattr(part.inner.config.nested, "deep", 1.0),  # 1 before, of another dtype
            "inner.config, which the step reads, holds",
        ),
        (
            lambda part: part.inner.factors["b"].__setitem__(0, 1),
            "inner.factors, which the step reads, holds",
        ),
        (
            lambda part: setattr(part.inner, "helper", lambda: 2.0),
            "inner.helper, which the step reads, is new",
        ),
        (lambda part: setattr(part.inner, "later", 2.0), "inner.later, which the step reads, is new"),
        (lambda part: setattr(part.inner, "__class__", type("Other", (Inner,), {})), "Inner became a Other"),
    ],
)
def test_changes_are_named(change: Callable[[Part], object], message: str) -> None:
    part = Part()
    fingerprint = taken_of(part)
    with torch.no_grad():
        part.linear.weight.mul_(2.0)  # in place: a graph sees it
    part.seen.append(2)  # the step does not read it
    part.inner.unread = 2
    part.inner.config.unread = 2
    part.inner.fresh = 2
    part.inner(torch.zeros(1))  # which stores what it was given
    part.metric.update(1.0)
    part.metric.more = nn.Linear(1, 1)  # the step does not use it
    watch = part.linear.register_forward_pre_hook(only_looking(partial(print)))
    assert fingerprint.change() is None
    watch.remove()
    assert fingerprint.change() is None
    change(part)
    assert message in str(fingerprint.change())


def test_what_classes_define_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part()
    for name, value in (("kind", 2.0), ("helper", lambda self: 2.0), ("forward", lambda self, x: x)):
        fingerprint = taken_of(part)
        assert fingerprint.change() is None
        monkeypatch.setattr(Inner, name, value)
        assert fingerprint.change() == "the class Inner, which the step uses, changed"


def test_hooks_of_every_module_are_watched() -> None:
    fingerprint = taken_of(Part())
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    assert fingerprint.change() == "the hooks of every module changed"
    handle.remove()
    assert fingerprint.change() is None


FACTOR = 1.0
SETTINGS = SimpleNamespace(factor=1.0, unread=0)
SEEN: list[float] = []


def test_a_global_of_another_type_is_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprint = Fingerprint(Part(), lambda module, x: module(x) * FACTOR)
    assert fingerprint.change() is None
    for value in (1, torch.ones(2)):
        monkeypatch.setitem(globals(), "FACTOR", value)
        assert fingerprint.change() == "the global FACTOR, which the step reads, changed"


def test_a_number_in_a_module_of_the_users_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprint = Fingerprint(Part(), lambda module, x: module(x) * support.LONGEST)
    assert fingerprint.change() is None
    monkeypatch.setattr(support, "LONGEST", 25)
    assert "the global LONGEST" in str(fingerprint.change())


def scaled(x: Tensor) -> Tensor:
    return x * FACTOR


class Scales:
    """An object whose method the step calls."""

    def apply(self, x: Tensor) -> Tensor:
        return self.helpers["scaled"](x)

    helpers: ClassVar = {"scaled": scaled}


@pytest.mark.parametrize(
    "step",
    [
        lambda module, x: scaled(module(x)),
        partial(lambda function, module, x: function(module(x)), scaled),
        lambda module, x: Scales().apply(module(x)),
        lambda module, x: [scaled(row) for row in module(x)],
    ],
)
def test_a_global_is_watched_wherever_the_step_comes_to_read_it(
    step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint = Fingerprint(Part(), step)
    assert fingerprint.change() is None
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert "the global FACTOR" in str(fingerprint.change())


def test_a_step_that_was_typed_in_is_watched_too() -> None:
    scope: dict[str, Any] = {"FACTOR": 1.0}
    exec(
        compile("def step(module, x):\n    return module(x) * module.scale * FACTOR\n", "<stdin>", "exec"),
        scope,
    )
    part = Part()
    fingerprint = Fingerprint(part, scope["step"])
    assert fingerprint.change() is None
    scope["FACTOR"] = 2.0
    assert "the global FACTOR" in str(fingerprint.change())
    part.scale = 2.0
    assert "the attribute scale" in str(fingerprint.change())


def test_what_a_step_takes_from_around_it_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    enclosed, engine = 1.0, SimpleNamespace(factor=1.0, steps=0)

    def weighed(module: nn.Module, batch: Any) -> Tensor:
        return causal_lm_loss(module, batch) * FACTOR * SETTINGS.factor * enclosed * engine.factor

    model = tiny_llama(torch.float64)
    step = GraphedStep(weighed, model, buckets=BUCKETS, backend=RecordingBackend(), require=True)
    batch = random_batch(1)
    before = float(step(batch).detach())
    for wanted in (2, 4, 8, 16):
        match wanted:
            case 2:
                monkeypatch.setitem(globals(), "FACTOR", 2.0)
            case 4:
                monkeypatch.setattr(SETTINGS, "factor", 2.0)
            case 8:
                enclosed = 2.0
            case _:
                engine.factor = 2.0
        engine.steps += 1  # nothing that the step reads
        SETTINGS.unread += 1
        SEEN.append(1.0)
        if wanted == 16:  # as often as graphs are made anew
            with pytest.raises(CaptureError, match="engine, which the step takes from around it, changed"):
                step(batch)
        else:
            assert float(step(batch).detach()) == pytest.approx(wanted * before)
            assert step.stats.fallbacks == {"parameters_moved": wanted.bit_length() - 1}
            assert float(step(batch).detach()) == pytest.approx(wanted * before)
    assert step.stats.replays == 4


@pytest.mark.slow  # autocast does so unmarked
def test_other_modes_of_torch_capture_again() -> None:
    step = graphed(tiny_llama(torch.float64))
    for _ in range(2):
        step(random_batch(1)).backward()
    captures = step.stats.captures
    torch.set_float32_matmul_precision("high")
    try:
        step(random_batch(1)).backward()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert step.stats.captures == 2 * captures
    for _ in range(2):
        step(random_batch(1)).backward()
    assert step.stats.captures == 3 * captures
    assert step.stats.replays == 5


class LowRank(nn.Module):
    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.full((2, base.in_features), 0.1, dtype=base.weight.dtype))
        self.up = nn.Parameter(torch.full((base.out_features, 2), 0.1, dtype=base.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + (x @ self.down.T) @ self.up.T
        return result


def insert_low_rank(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.q_proj = LowRank(attention.q_proj)


def sharpen(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 3.0


@pytest.mark.parametrize("change", [insert_low_rank, sharpen])
def test_a_model_changed_between_steps_runs_as_it_is_now(change: Callable[[Any], None]) -> None:
    model = tiny_llama(torch.float64)
    step = graphed(model)
    batch = random_batch(1)
    step(batch).backward()
    change(model)
    wanted = causal_lm_loss(model, batch)
    expected = [x.clone() for x in gradients(model, wanted)]
    wanted = wanted.detach()
    for _ in range(2):  # eagerly at first, then from graphs of what it has become
        found = step(batch)
        assert abs(float(found.detach() - wanted)) < 1e-9
        assert worst(gradients(model, found), expected) < 1e-7
    assert step.stats.replays == 2
    assert step.stats.fallbacks == {"parameters_moved": 1}


def test_a_hyperparameter_that_a_callback_changes_is_seen() -> None:
    class Weighed(GraphModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return causal_lm_loss(self.model, batch) * self.hparams["factor"]

    module = Weighed()
    module.save_hyperparameters({"factor": 1.0})
    step = GraphedStep(
        lambda module, batch: module.training_step(batch, 0),
        module,
        buckets=BUCKETS,
        backend=RecordingBackend(),
        require=True,
    )
    batch = random_batch(2)
    before = float(step(batch).detach())
    module.hparams["factor"] = 0.5
    assert float(step(batch).detach()) == pytest.approx(before / 2)


def test_a_number_that_a_library_counts_keeps_graphs() -> None:
    """As do callbacks of the garbage collector, which may run during a capture."""
    scope: dict[str, Any] = {"count": 0, "torch": torch}
    code = "def helper(x):\n    global count\n    count += 1\n    return torch.abs(x)\n"
    exec(compile(code, f"{sysconfig.get_path('purelib')}/counts.py", "exec"), scope)
    helper = scope["helper"]
    step = GraphedStep(
        lambda module, batch: helper(causal_lm_loss(module, batch)),
        tiny_llama(torch.float64),
        buckets=BUCKETS,
        backend=RecordingBackend(),
        require=True,
    )
    step(random_batch(1)).backward()
    scope["count"] += 1
    step(random_batch(1)).backward()
    assert step.stats.fallbacks == {}
