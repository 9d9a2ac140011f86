"""A model called without its head: what its layers know, what it does to its logits, heads of users' own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

pytest.importorskip("transformers")

from transformers import LlamaForCausalLM

from lightning_thd import causal_lm_loss
from lightning_thd._static import static_shapes
from lightning_thd.callbacks.cuda_graph import GraphedStep
from lightning_thd.cuda_graph.recording import RecordingBackend
from lightning_thd.loss.lazy_logits import Record, carry_values, open_values
from lightning_thd.loss.tiles.logits import LogitMap
from lightning_thd.models import announce
from lightning_thd.models.pack import Pack, current_scope
from tests.cuda_graph.support import BUCKETS, random_batch
from tests.models import matrix
from tests.models.families import build
from tests.tiny import checkpoint_activations, tiny_llama


def refuse(*_: Any) -> None:
    raise AssertionError("a tensor was read back")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_state_space_layers_read_no_lengths_back(
    checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (batch, _) = build("mamba2", "thd").train(), matrix.packs()
    model(**batch.hf_kwargs())  # the first call checks the model
    if checkpointing:
        checkpoint_activations(model)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "tolist", refuse)
        loss = causal_lm_loss(model, batch)
        loss.backward()
        with pytest.raises(AssertionError, match="read back"):  # or the patch would show nothing
            model(**batch.hf_kwargs())
    logits = model(**batch.hf_kwargs()).logits[0]
    wanted = torch.nn.functional.cross_entropy(logits, batch.targets, ignore_index=-100)
    torch.testing.assert_close(loss, wanted)


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_a_loss_announces_its_batch_and_a_bare_call_is_searched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (batch, _) = build(name, "thd").train(), matrix.packs()
    wanted = causal_lm_loss(model, batch)
    monkeypatch.setattr(announce, "find_pack", refuse)
    assert torch.equal(causal_lm_loss(model, batch), wanted)
    with pytest.raises(AssertionError, match="read back"):
        model(**batch.hf_kwargs())
    assert current_scope() is None


def test_a_recorded_step_is_given_no_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (batch, _) = build("bamba", "thd").train(), matrix.packs()
    wanted = causal_lm_loss(model, batch)
    monkeypatch.setattr(Pack, "from_batch", refuse)
    monkeypatch.setattr(Pack, "lengths", property(refuse))
    with static_shapes():
        torch.testing.assert_close(causal_lm_loss(model, batch), wanted)


# ---- What a model does to its logits

SHAPE = (1, 4, 10)


def capped(x: Tensor) -> Tensor:
    x = x / 3.0
    x = torch.tanh(x)
    return x * 3.0


IN_PLACE = 4
FOLLOWED: list[tuple[Callable[[Any], Any], LogitMap]] = [
    (lambda x: x, LogitMap()),
    (lambda x: x / 4.0, LogitMap(scale=0.25)),
    (lambda x: x * 0.5 * 3, LogitMap(scale=1.5)),
    (lambda x: 2.0 * x.float(), LogitMap(scale=2.0)),
    (lambda x: x.mul_(2.0).div(8.0).to(torch.bfloat16), LogitMap(scale=0.25)),
    (capped, LogitMap(scale=1.0, softcap=3.0)),
    (lambda x: 3.0 * torch.nn.functional.tanh(x * 2.0 / 3.0), LogitMap(scale=2.0, softcap=3.0)),
    (lambda x: capped(x) * 2.0, LogitMap(scale=2.0, softcap=6.0)),
    (lambda x: x[..., :7], LogitMap(valid_vocab_size=7)),
    (lambda x: x[:, :, :-2], LogitMap(valid_vocab_size=8)),
    (lambda x: x[:, :].contiguous()[...], LogitMap()),
]


@pytest.mark.parametrize("number", range(len(FOLLOWED)))
def test_what_a_model_does_is_followed(number: int) -> None:
    function, wanted = FOLLOWED[number]
    logits = carry_values(torch.ones(1), SHAPE)
    seen = function(logits).record.as_map()
    assert logits.record == Record() or number == IN_PLACE  # what a model leaves unused changes nothing
    assert seen.agrees(wanted)
    real = torch.randn(SHAPE, dtype=torch.float64)
    expected = function(real.clone()).double()[0]
    torch.testing.assert_close(
        seen.apply_(real[0].clone())[:, : seen.valid_vocab_size], expected, rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x + 1.0, r"applies '?\w*add"),
        (lambda x: x * torch.ones(10), "multiplies its logits by tensor"),
        (lambda x: x / 0.0, "applies 'truediv'|applies '__truediv__'|applies 'div'"),
        (lambda x: x.softmax(-1), "applies 'softmax'"),
        (lambda x: x[:, -1:], r"takes logits\["),
        (lambda x: x[..., 2:], r"takes logits\["),
        (lambda x: torch.tanh(torch.tanh(x)), "caps its logits by tanh twice"),
        (
            lambda x: torch.nn.functional.cross_entropy(x[0], torch.zeros(4, dtype=torch.long)),
            r"takes logits\[",
        ),
        (lambda x: torch.ones(10) * x, "multiplies its logits by tensor"),
        (lambda x: x.data, "applies 'data'"),
    ],
)
def test_what_cannot_be_followed_is_refused(function: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        function(carry_values(torch.ones(1), SHAPE))


def test_values_and_their_gradient_pass_through_and_hooks_see_it() -> None:
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    logits = carry_values(values * 2, SHAPE)
    seen = []
    logits.register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
    assert logits.shape == SHAPE
    assert logits.requires_grad
    assert logits._base is None  # FSDP2 warns about views
    assert logits.untyped_storage().nbytes() == 12
    opened = open_values(logits)
    assert opened.tolist() == [2.0, 4.0, 6.0]
    (opened * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [2.0, 20.0, 200.0]
    assert seen == [SHAPE]


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_a_compiled_model_loses_nothing_that_is_recorded() -> None:
    make = torch.compiler.disable(carry_values)
    seen = torch.compiler.disable(lambda logits: found.append(logits.record.as_map()))
    found: list[LogitMap] = []

    @torch.compile(backend="eager")
    def model(values: Tensor) -> Tensor:
        seen(capped(make(values * 2, SHAPE)))
        return values

    model(torch.ones(1, requires_grad=True))
    assert found[0].agrees(LogitMap(softcap=3.0))


# ---- Heads with a forward of their own


class Head(nn.Module):
    """A head of a user's own: what it computes is given, and new parts start where they change nothing."""

    def __init__(self, weight: nn.Parameter, forward: Callable[[Head, Tensor], Tensor]) -> None:
        super().__init__()
        vocabulary, width = weight.shape
        self.weight, self.function = weight, forward
        self.down = nn.Parameter(torch.randn(4, width).to(weight.dtype))
        self.up = nn.Parameter(torch.zeros(vocabulary, 4).to(weight.dtype))
        self.offset = nn.Parameter(torch.zeros(vocabulary).to(weight.dtype))
        self.factor, self.scale = nn.Parameter(torch.ones((), dtype=weight.dtype)), 1.0

    def forward(self, hidden: Tensor) -> Tensor:
        return self.function(self, hidden)


def in_place(head: Head, x: Tensor) -> Tensor:
    logits = F.linear(x, head.weight)
    logits += head.offset
    logits *= 1.09
    return logits


def measured(head: Head, x: Tensor) -> Tensor:
    logits = F.linear(x, head.weight)
    logits.detach().abs().max().item()
    logits * 0.5
    return logits


def overwritten(head: Head, x: Tensor) -> Tensor:
    logits = F.linear(x, head.weight)
    logits[..., 0] = -5.0
    return logits


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -grads[0]


class Halved(torch.autograd.Function):
    """A product whose backward is its own, as that of VeLoRA."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 0.5 * grads[0] @ weight, 0.5 * grads[0].flatten(0, -2).T @ x.flatten(0, -2)


def without_gradient(head: Head, x: Tensor) -> Tensor:
    with torch.no_grad():
        base = F.linear(x, head.weight)
    return base + F.linear(x, head.up @ head.down)


HEADS: dict[str, Callable[[Head, Tensor], Tensor]] = {
    "LoRA": lambda head, x: F.linear(x, head.weight) + F.linear(F.linear(x, head.down), head.up) * 2.0,
    "LoRA by matmul": lambda head, x: (x @ head.down.T) @ head.up.T + torch.matmul(x, head.weight.t()),
    "merged LoRA": lambda head, x: F.linear(x, head.weight + head.up @ head.down),
    "bias": lambda head, x: F.linear(x, head.weight) - head.offset,
    "factor": lambda head, x: F.linear(x, head.weight, head.offset) * head.factor,
    "factor in Python": lambda head, x: head.scale * (x @ head.weight.T),
    "factor of columns": lambda head, x: F.linear(x, head.weight) * (head.offset + 1.0),
    "normalised": lambda head, x: F.linear(F.normalize(x, dim=-1), F.normalize(head.weight, dim=-1)) * 10,
    "cap": lambda head, x: torch.tanh(F.linear(x, head.weight) / 3.0) * 3.0,
    "layer before": lambda head, x: F.linear(F.gelu(F.linear(x, head.down.T @ head.down)), head.weight),
    "LoRA with a backward of its own": lambda head, x: (
        F.linear(x, head.weight) + F.linear(Halved.apply(x, head.down), head.up)
    ),
    "in place": in_place,
    "measured": measured,
}
REFUSED: dict[str, tuple[Callable[[Head, Tensor], Tensor], str]] = {
    "einsum": (
        lambda head, x: torch.einsum("bth,vh->btv", x, head.weight),
        "whose forward is not hidden @ weight.T",
    ),
    "relu": (lambda head, x: F.linear(x, head.weight).relu(), "whose forward is not hidden @ weight.T"),
    "overwritten": (overwritten, r"overwritten \(test_head_call.py:.* applies '__setitem__'"),
    "backward": (
        lambda head, x: F.linear(x, head.weight) + F.linear(Reversed.apply(F.linear(x, head.down)), head.up),
        "autograd function of its own",
    ),
    "backward of the product": (
        lambda head, x: Halved.apply(x, head.weight),
        "whose forward is not hidden @ weight.T",
    ),
    "without gradient": (without_gradient, "whose forward is not hidden @ weight.T"),
    "drawn twice": (lambda head, x: F.linear(x, head.weight).clamp_(-9.0, 9.0), "applies 'clamp_'"),
}


def with_head(forward: Callable[[Head, Tensor], Tensor], dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model: Any = tiny_llama(dtype)
    model.lm_head = Head(model.lm_head.weight, forward)
    return model


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_ones_own_is_run_as_it_is_and_learns(name: str) -> None:
    model, batch = with_head(HEADS[name], torch.float64), random_batch(1)
    for moved in (0.0, 0.1):  # as it starts, and after it has learned something
        with torch.no_grad():
            for part in (model.lm_head.up, model.lm_head.offset, model.lm_head.factor):
                part.add_(moved * torch.randn_like(part))
        model.lm_head.scale += moved
        logits = model(**batch.hf_kwargs()).logits[0]
        wanted = F.cross_entropy(logits, batch.targets, ignore_index=-100)
        found = causal_lm_loss(model, batch)
        torch.testing.assert_close(found, wanted)
        ours, theirs = gradients(model, found), gradients(model, wanted)
        assert ours.keys() == theirs.keys()
        for key, gradient in theirs.items():
            torch.testing.assert_close(ours[key], gradient, msg=key)


@pytest.mark.parametrize("name", REFUSED)
def test_a_head_that_is_no_sum_of_products_is_refused(name: str) -> None:
    function, message = REFUSED[name]
    model, batch = with_head(function, torch.float64), random_batch(1)
    with pytest.raises((ValueError, NotImplementedError, RuntimeError), match=message):
        causal_lm_loss(model, batch).backward()


def test_a_head_that_was_patched_is_run_as_it_is() -> None:
    model, batch = tiny_llama(torch.float64), random_batch(1)
    head: Any = model.lm_head
    own, more = head.forward, nn.Parameter(torch.zeros_like(head.weight))
    head.forward = lambda hidden: own(hidden) + hidden @ more.T
    causal_lm_loss(model, batch).backward()
    assert more.grad is not None
    assert torch.equal(more.grad, head.weight.grad)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_with_a_parametrization_that_moves_is_read_once(tied: bool) -> None:
    model: Any = tiny_llama(torch.float64)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    spectral_norm(model.lm_head)
    other, batch = copy.deepcopy(model), random_batch(1)
    for _ in range(2):  # each forward in training moves the vectors of its power iteration
        found = causal_lm_loss(model, batch)
        logits = other(**batch.hf_kwargs()).logits[0]
        wanted = F.cross_entropy(logits, batch.targets, ignore_index=-100)
        torch.testing.assert_close(found, wanted)
        ours, theirs = gradients(model, found), gradients(other, wanted)
        for key, gradient in theirs.items():
            torch.testing.assert_close(ours[key], gradient, msg=key)


def test_a_head_of_ones_own_is_recorded() -> None:
    model, batch = with_head(HEADS["LoRA"], torch.float64), random_batch(1)
    step = GraphedStep(causal_lm_loss, model, buckets=BUCKETS, backend=RecordingBackend(), require=True)
    torch.testing.assert_close(step(batch), causal_lm_loss(model, batch))
    assert step.stats.replays == 1


def doubled_logits(module: nn.Module, args: Any, output: Any) -> Any:
    if hasattr(output, "logits"):
        output.logits = output.logits * 2
    return output


def all_doubled(module: nn.Module, args: Any, output: Any) -> Any:
    for name in list(output):
        output[name] = output[name] * 2
    return output


@pytest.mark.parametrize(
    ("place", "hook", "message"),
    [
        ("", doubled_logits, r"hook doubled_logits \(test_head_call.py.* asks for logits"),
        (
            "",
            all_doubled,
            r"one of all_doubled \(test_head_call.py.* changes its outputs, which are the loss",
        ),
        ("lm_head", lambda m, i, o: o + 1.0, r"<lambda> \(test_head_call.py.* applies 'add'"),
        ("lm_head", lambda m, i, o: o.new_zeros(()), r"applies 'new_zeros'"),
        ("lm_head", lambda m, i, o: torch.zeros(1), r"forward hook <lambda> \(test_head_call.py"),
    ],
)
def test_a_hook_that_changes_logits_is_named(place: str, hook: Callable[..., Any], message: str) -> None:
    model, batch = tiny_llama(torch.float64), random_batch(1)
    model.get_submodule(place).register_forward_hook(hook)
    for _ in range(2):
        with pytest.raises((ValueError, NotImplementedError), match=message):
            causal_lm_loss(model, batch)


class Doubled(LlamaForCausalLM):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().__call__(*args, **kwargs)
        if hasattr(outputs, "logits"):
            outputs.logits = outputs.logits * 2
        return outputs


def test_a_call_around_the_forward_that_changes_logits_is_named() -> None:
    model = tiny_llama(torch.float64)
    model.__class__ = Doubled
    with pytest.raises(ValueError, match=r"__call__ \(test_head_call.py.* asks for logits"):
        causal_lm_loss(model, random_batch(1))


def test_hooks_of_a_head_are_followed_or_named() -> None:
    model, batch = tiny_llama(torch.float64), random_batch(1)
    head: Any = model.lm_head
    with head.register_forward_hook(lambda m, i, o: o * 2.0):
        twice = causal_lm_loss(model, batch)
    with torch.no_grad():
        head.weight.mul_(2.0)
    torch.testing.assert_close(causal_lm_loss(model, batch), twice)
    head.register_full_backward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"hook <lambda> \(test_head_call.py.* gradients"):
        causal_lm_loss(model, batch)
