"""Heads with a forward of their own: followed where it is a product by their weight, else refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_thd.callbacks.cuda_graph import GraphedStep
from lightning_thd.cuda_graph.recording import RecordingBackend
from lightning_thd.loss import causal_lm_loss
from tests.cuda_graph.support import BUCKETS, random_batch
from tests.tiny import tiny_llama


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
