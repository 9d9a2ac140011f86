"""Layers that torch compiles, inside graphs and in eager training: how often, and that nothing changes."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.callbacks.cuda_graph import CaptureError, GraphedStep, make_buckets
from lightning_thd.cuda_graph import recording
from lightning_thd.cuda_graph.backend import CudaBackend
from lightning_thd.cuda_graph.compiled import compiled_layers
from lightning_thd.cuda_graph.recording import RecordingBackend
from lightning_thd.parallel.fsdp import layers_of
from tests.cuda_graph.support import BUCKETS, gradients, graphed, random_batch, worst
from tests.models.families import build
from tests.tiny import checkpoint_activations, tiny_llama

# torch's compiler looks at .grad of the hidden states, which autograd warns of.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
PACKS = 40
ROUNDING = 1e-5  # fp32: the compiler may take sums in another order
THREE = make_buckets((8, 11, 14), slots=128, max_seqlen=24)


@pytest.fixture(autouse=True)
def _compiler_without_memory() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def model_of(name: str = "qwen3") -> nn.Module:
    torch.manual_seed(0)
    return build(name, "thd").train()


def forty_packs() -> list[THDBatch]:
    """Packs of 1 to 12 sequences; about one in three has more than 128 tokens.

    None has a single token, for which torch's compiler always makes a graph of its own.
    """
    packs = [random_batch(seed) for seed in range(PACKS + 2)]
    packs = [batch for batch in packs if batch.input_ids.numel() > 1][:PACKS]
    assert len(packs) == PACKS
    return packs


def assert_step_equals(model: nn.Module, loss: Tensor, wanted: Tensor) -> None:
    """Compare a loss and its gradients with those of an uncompiled run."""
    actual = [x.clone() for x in gradients(model, loss)]
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=ROUNDING)
    assert worst(actual, gradients(model, wanted)) < ROUNDING


def assert_compiled_once() -> None:
    assert counters["stats"]["unique_graphs"] == 1
    assert dict(counters["graph_break"]) == {}


@pytest.mark.parametrize("name", ["qwen3", pytest.param("llama", marks=pytest.mark.slow)])
def test_forty_packs_in_three_buckets_need_one_graph(name: str) -> None:
    model = model_of(name)
    step = graphed(model, buckets=THREE, compile_layers=True)
    fits = 0
    for batch in forty_packs():
        loss = step(batch)
        assert_step_equals(model, loss, causal_lm_loss(model, batch))
        fits += batch.input_ids.numel() <= 128
    assert step.stats.replays + step.stats.fallbacks["num_sequences"] == fits
    assert step.stats.replays > PACKS // 2
    assert step.stats.fallbacks["tokens"] == PACKS - fits > 0
    assert_compiled_once()
    assert not any("forward" in vars(layer) for layer in layers_of(model))


def test_recordings_hold_the_graphs_that_the_compiler_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer of every bucket runs compiled while it is recorded, forward and backward."""
    runs: Counter[str] = Counter()
    turned = recording._Watch.turned

    def counted(self: Any, *, on: bool) -> Any:
        runs["graphs" if on else "layers"] += 1
        return turned(self, on=on)

    monkeypatch.setattr(recording._Watch, "turned", counted)
    model = model_of()
    batch = random_batch(1, count=4)
    loss = graphed(model, buckets=THREE, compile_layers=True)(batch)
    layers = len(layers_of(model))
    assert runs == {"layers": layers * len(THREE), "graphs": 2 * layers * len(THREE)}
    assert_step_equals(model, loss, causal_lm_loss(model, batch))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_forty_packs_in_eager_training_need_one_graph(backend: str) -> None:
    """Inductor compiles C++ here; its Triton kernels have not run in such a test."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor on a CPU needs g++")
    model = model_of()
    plain = model_of()
    compiler = CompileCounterWithBackend(backend)
    for layer in layers_of(model):
        layer.compile(dynamic=True, backend=compiler)
    after_first = 0

    for i, batch in enumerate(forty_packs()):
        loss = causal_lm_loss(model, batch)
        expected = causal_lm_loss(plain, batch)
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=ROUNDING)
        assert worst(gradients(model, loss), gradients(plain, expected)) < ROUNDING
        after_first = compiler.frame_count if i == 0 else after_first

    assert compiler.frame_count == after_first  # no recompilation
    assert_compiled_once()


def test_layers_of_a_graph_compile_where_other_code_runs_uncompiled() -> None:
    """As in a step whose FLOPs are counted; a graph would keep uncompiled layers for good."""
    compiler = CompileCounterWithBackend("aot_eager")

    class Counting(RecordingBackend):
        def compiled(self, function: Any) -> Any:
            return torch.compile(function, dynamic=False, backend=compiler)

    model = model_of()
    with torch.compiler.set_stance("force_eager"):
        with compiled_layers(model, Counting()):
            causal_lm_loss(model, random_batch(1, count=4))
        made = compiler.frame_count
        assert made > 0
        causal_lm_loss(model, random_batch(2, count=3))
    assert compiler.frame_count == made


@pytest.mark.slow
def test_layers_that_a_user_compiled_stay_compiled() -> None:
    model = model_of()
    compiler = CompileCounterWithBackend("aot_eager")
    for layer in layers_of(model):
        layer.compile(dynamic=True, backend=compiler)
    step = graphed(model, compile_layers=True)
    for seed in (0, 1):
        batch = random_batch(seed, count=4)
        loss = step(batch)
        with torch.compiler.set_stance("force_eager"):
            assert_step_equals(model, loss, causal_lm_loss(model, batch))
    assert step.stats.replays == 2
    made = compiler.frame_count
    causal_lm_loss(model, random_batch(2)).backward()
    assert compiler.frame_count == made > 0


@pytest.mark.parametrize("case", ["checkpoints", "checkpoint wrappers", "autocast", "sums", "hooks"])
def test_compiled_steps_keep_what_uncompiled_ones_do(case: str) -> None:
    model = model_of()
    hooked = list[int]()
    if case == "checkpoints":
        checkpoint_activations(model)
    if case == "checkpoint wrappers":  # around layers, where transformers before 5.23 had its own, too
        model.model.layers = nn.ModuleList(map(checkpoint_wrapper, layers_of(model)))

    if case == "hooks":
        layers_of(model)[1].register_forward_hook(lambda layer, args, out: hooked.append(1))
    step = graphed(model, compile_layers=True, keep_gradients=case != "sums")
    tolerance = 2e-2 if case == "autocast" else ROUNDING
    region = torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast")
    batches = [random_batch(seed, count=5) for seed in range(3)]

    with region:
        model.zero_grad()
        for batch in batches:
            step(batch).backward()
        actual = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        for batch in batches:
            causal_lm_loss(model, batch).backward()

    expected = [p.grad for p in model.parameters() if p.grad is not None]
    assert worst(actual, expected) < tolerance
    assert step.stats.replays == len(batches)
    assert_compiled_once()
    assert bool(hooked) == (case == "hooks")


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama(torch.float32)
        for layer in self.model.model.layers:
            layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.3))


def test_dropout_in_compiled_layers_draws_anew_in_every_replay() -> None:
    module = WithDropout()
    batch = random_batch(4, count=5)
    step = graphed(module, lambda m, b: causal_lm_loss(m.model, b), compile_layers=True)
    losses = {float(step(batch).detach()) for _ in range(4)}
    assert len(losses) == 4
    assert step.stats.replays == 4


class Branching(nn.Module):
    """A layer that the compiler cannot trace in one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.linear(x)


class OfBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 8)
        self.layers = nn.ModuleList([Branching(), Branching()])


def loss_of_branches(module: Any, batch: THDBatch) -> Tensor:
    hidden = module.table(batch.input_ids)
    for layer in module.layers:
        hidden = layer(hidden)
    return (hidden.sum(-1) * (batch.targets != -100)).sum() * batch.loss_scale


def test_layers_that_break_the_graph_are_refused_and_left_as_they_were() -> None:
    module = OfBranches()
    with pytest.raises(CaptureError, match=r"cannot compile the layers .*Leave compile_layers out"):
        graphed(module, loss_of_branches, compile_layers=True)(random_batch(0, count=3))
    assert not any("forward" in vars(layer) for layer in module.layers)


class OldBackend:
    """A backend of the time before layers could be compiled."""

    name = "old"
    warm_ups = 2

    def __init__(self) -> None:
        for method in ("unavailable", "warm_up", "capture", "time_s", "release"):
            setattr(self, method, getattr(RecordingBackend(), method))


@pytest.mark.parametrize(
    ("name", "backend", "message"),
    [
        ("bamba", RecordingBackend(), "carry a state or a convolution.*Leave compile_layers out"),
        ("linear", RecordingBackend(), "found no layers in Linear.*ModuleLists"),
        ("qwen3", OldBackend(), r"backend with a method compiled\(function\), and 'old' has none"),
    ],
)
def test_what_cannot_be_compiled_is_refused_at_construction(name: str, backend: Any, message: str) -> None:
    module = nn.Linear(2, 2) if name == "linear" else model_of(name)
    with pytest.raises(ValueError, match=message):
        GraphedStep(causal_lm_loss, module, buckets=BUCKETS, backend=backend, compile_layers=True)


@pytest.mark.parametrize("case", ["triton", "capability", "python"])
def test_a_machine_without_the_compiler_is_refused_with_what_it_lacks(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_thd.cuda_graph import compiled

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda: (6, 1) if case == "capability" else (8, 0)
    )
    has_triton = None if case == "triton" else object()
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: has_triton)
    if case == "python":
        monkeypatch.setattr(torch._dynamo, "is_dynamo_supported", lambda: False)
    lacks = {
        "triton": "needs triton",
        "capability": r"7\.0 or more, and this one has 6\.1",
        "python": "on Python",
    }
    with pytest.raises(ValueError, match=lacks[case]):
        GraphedStep(causal_lm_loss, model_of(), buckets=BUCKETS, backend=CudaBackend(), compile_layers=True)
