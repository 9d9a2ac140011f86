from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_thd.loss.lazy_logits import carry_values, open_values
from lightning_thd.loss.tiles.logits import LogitMap

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
