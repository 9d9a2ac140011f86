from __future__ import annotations

import math

import torch

from lightning_thd.attention.kernels.raw import apply_sinks, sinks_gradient


def test_worked_value() -> None:
    out, lse = apply_sinks(torch.ones(1, 1, 2), torch.zeros(1, 1), torch.zeros(1))
    assert out.tolist() == [[[0.5, 0.5]]]
    assert math.isclose(lse.item(), math.log(2), rel_tol=1e-6)


def test_a_query_without_keys_gives_zero_and_the_sink() -> None:
    out, lse = apply_sinks(torch.zeros(1, 1, 2), torch.full((1, 1), -torch.inf), torch.tensor([3.0]))
    assert out.tolist() == [[[0.0, 0.0]]]
    assert lse.item() == 3.0


def test_gradient_equals_autograd() -> None:
    out, lse = torch.randn(5, 3, 4, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    sinks = torch.randn(3, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(5, 3, 4, dtype=torch.float64)
    with_sinks, total = apply_sinks(out, lse, sinks)
    (wanted,) = torch.autograd.grad(with_sinks, sinks, grad)
    got = sinks_gradient(grad, with_sinks.detach(), total.detach(), sinks)
    torch.testing.assert_close(got, wanted)
