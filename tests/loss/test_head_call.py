"""A model called without its head: what its layers know, what it does to its logits, heads of users' own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("transformers")

from lightning_thd import causal_lm_loss
from lightning_thd._static import static_shapes
from lightning_thd.callbacks.cuda_graph import GraphedStep
from lightning_thd.cuda_graph.recording import RecordingBackend
from lightning_thd.loss.head_call import carry_values, open_values
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
    result = function(logits)
    assert result is logits
    seen = logits.record.as_map()
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
        (lambda x: x / 0.0, "divides its logits by 0.0"),
        (lambda x: x.softmax(-1), "applies 'softmax'"),
        (lambda x: x[:, -1:], r"takes logits\["),
        (lambda x: x[..., 2:], r"takes logits\["),
        (lambda x: torch.tanh(torch.tanh(x)), "caps its logits by tanh twice"),
        (
            lambda x: torch.nn.functional.cross_entropy(x[0], torch.zeros(4, dtype=torch.long)),
            r"takes logits\[",
        ),
        (lambda x: torch.ones(10) * x, "applies 'mul'"),
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


# ---- Heads with a forward of their own


class Plain(nn.Module):
    """The same product, written otherwise."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape

    def forward(self, hidden: Tensor) -> Tensor:
        found = hidden @ self.weight.T
        return found if self.bias is None else found + self.bias


class Normalised(Plain):
    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, F.normalize(self.weight))


class Scaled(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * 3.0


class Dropping(Plain):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(F.dropout(hidden, 0.5, training=True))


class Asking(Plain):
    def forward(self, hidden: Tensor, wanted: Tensor | None = None) -> Tensor:
        assert wanted is not None  # nothing can be said of it
        return super().forward(hidden)


class Wanting(Plain):
    def forward(self, hidden: Tensor, temperature: float) -> Tensor:
        return super().forward(hidden) / temperature


def scaled(model: Any) -> None:
    weight = model.lm_head.weight
    model.lm_head = Scaled(weight.shape[1], weight.shape[0], bias=False)
    model.lm_head.weight = weight


def patched(model: Any) -> None:
    own = model.lm_head.forward
    model.lm_head.forward = lambda hidden: own(hidden) * 3.0


def patched_to_want(model: Any) -> None:
    own = model.lm_head.forward
    model.lm_head.forward = lambda hidden, scale: own(hidden) * scale


def put(kind: type[Plain]) -> Callable[[Any], None]:
    return lambda model: setattr(model, "lm_head", kind(model.lm_head.weight))


@pytest.mark.parametrize(
    "change", [scaled, patched, patched_to_want, put(Normalised), put(Dropping), put(Wanting)]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_head_that_does_more_is_refused(change: Callable[[Any], None], dtype: torch.dtype) -> None:
    model, batch = tiny_llama(dtype), random_batch(1)
    causal_lm_loss(model, batch)
    change(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"whose forward is not hidden @ weight.T \+ bias"):
            causal_lm_loss(model, batch)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("how", ["plain", "patched", "asking"])
def test_a_head_that_multiplies_and_adds_is_followed(how: str, biased: bool) -> None:
    model, batch = tiny_llama(torch.float64), random_batch(1)
    head: Any = model.lm_head
    weight = head.weight
    bias = nn.Parameter(torch.linspace(0, 1, len(weight), dtype=torch.float64)) if biased else None
    if how == "patched":
        own = head.forward
        head.bias = bias
        head.forward = lambda hidden: own(hidden)
    else:
        model.lm_head = (Plain if how == "plain" else Asking)(weight, bias)
    torch.manual_seed(3)
    found = causal_lm_loss(model, batch)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), drawn)  # nothing was drawn
    body: Any = model.model
    hidden = body(**batch.hf_kwargs()).last_hidden_state[0]
    wanted = F.cross_entropy(F.linear(hidden, weight, bias), batch.targets, ignore_index=-100)
    torch.testing.assert_close(found, wanted)


def test_a_head_that_starts_at_zero_is_looked_at_once_it_says_something() -> None:
    model, batch = tiny_llama(torch.float64), random_batch(1)
    put(Normalised)(model)
    head: Any = model.lm_head
    with torch.no_grad():
        head.weight.zero_()
    torch.testing.assert_close(causal_lm_loss(model, batch).item(), math.log(len(head.weight)))
    with torch.no_grad():
        head.weight.normal_()
    with pytest.raises(ValueError, match="whose forward is not hidden"):
        causal_lm_loss(model, batch)


def test_a_head_is_looked_at_before_its_step_is_recorded() -> None:
    model, batch = tiny_llama(torch.float64), random_batch(1)
    put(Normalised)(model)
    step = GraphedStep(causal_lm_loss, model, buckets=BUCKETS, backend=RecordingBackend())
    with (
        pytest.warns(UserWarning, match="whose forward is not hidden"),
        pytest.raises(ValueError, match="whose forward is not hidden"),
    ):
        step(batch)
    model = tiny_llama(torch.float64)
    put(Plain)(model)
    step = GraphedStep(causal_lm_loss, model, buckets=BUCKETS, backend=RecordingBackend(), require=True)
    torch.testing.assert_close(step(batch), causal_lm_loss(model, batch))
    assert step.stats.replays == 1
