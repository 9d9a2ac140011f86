"""Products and exponentials of tiles: what may be rounded, and what is multiplied again exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_thd.loss import fused_linear_logprobs
from lightning_thd.loss.tiles import products

TOKENS = 200
WIDTH = 128
COLUMNS = 6000


@pytest.mark.parametrize("size", [0.0, 1e-9, 1e9])
def test_fp16_gradients_of_any_size(size: float) -> None:
    """A product with fp16 is right for values that fp16 itself cannot hold."""
    total = torch.empty(2, 4)
    products.accumulate(total, torch.full((2, 3), size), torch.ones(3, 4).half(), torch.float16, first=True)
    torch.testing.assert_close(total, torch.full((2, 4), 3 * size), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("first", [False, True])
def test_large_fp32_products_are_exact_whichever_library_makes_them(first: bool) -> None:
    """The forward product, and both of the backward, equal fp64; ``first`` overwrites what was there."""
    torch.manual_seed(0)
    x = torch.randn(512, 256)
    w = torch.randn(1024, 256)
    dz = torch.randn(512, 1024)

    z = products.product(x, w, out=torch.empty(512, 1024))
    torch.testing.assert_close(z.double(), x.double() @ w.double().T, rtol=1e-5, atol=1e-4)

    for a, b in ((dz, w), (dz.t(), x)):  # the gradients of x and of w
        total = torch.full((a.shape[0], 256), torch.nan if first else 1.0)
        products.accumulate(total, a, b, torch.float32, first=first)
        exact = a.double() @ b.double() + (0.0 if first else 1.0)
        assert (total.double() - exact).norm() < 1e-6 * exact.norm()


def test_a_precision_below_fp32_is_seen() -> None:
    torch.set_float32_matmul_precision("highest")
    assert not products._may_round()
    torch.set_float32_matmul_precision("medium")
    assert products._may_round()


def test_a_precision_that_a_test_leaves_is_set_back() -> None:
    """The test above leaves "medium"; a fixture of conftest.py sets back what was there before."""
    assert torch.get_float32_matmul_precision() == "highest"
    assert not products._may_round()


def test_exponentials_are_off_by_their_argument_alone() -> None:
    """The relative error grows with the argument only; 0 and infinite arguments are exact, NaN stays."""
    limits = torch.tensor([0.0, -1e4, -torch.inf, torch.inf])
    x = torch.cat([torch.linspace(-87.0, 88.0, 100_001), limits])
    exact = x.double().exp()
    result = products.exponential(x.clone(), out=torch.empty_like(x))

    is_normal = exact.isfinite() & (exact > 0)
    error = ((result.double() - exact).abs() / exact)[is_normal]
    assert (error <= 1.3e-7 * (1.0 + x[is_normal].abs())).all()
    assert result[-4:].tolist() == [1.0, 0.0, 0.0, float("inf")]
    assert products.exponential(torch.tensor([torch.nan]), out=torch.empty(1)).isnan().all()


def operands(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and targets whose predictions are flat, peaked, or nearly certain."""
    torch.manual_seed(0)
    size = {"flat": 1.0, "peaked": 8.0, "capped": 8.0}.get(kind, 2.0)
    hidden = torch.randn(TOKENS, WIDTH)
    weight = torch.randn(COLUMNS, WIDTH) * (size / WIDTH**0.5)
    targets = torch.randint(0, COLUMNS, (TOKENS,))

    if kind == "certain":
        hidden = weight[targets] * (40.0 / weight[targets].square().sum(1, keepdim=True))
    if kind == "offset":  # all logits are large, and differ little
        hidden[:, 0] = 20.0
        weight[:, 0] = 20.0
    if kind == "alike":
        weight[COLUMNS // 4 :] = weight[0]
    return hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), targets


def logp_and_entropy(z: Tensor, targets: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets, and entropies, from all logits."""
    if cap is not None:
        z = cap * (z / cap).tanh()
    log_p = z.log_softmax(-1)
    logp = log_p.gather(1, targets[:, None]).squeeze(1)
    return logp, -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("kind", ["flat", "peaked", "certain", "offset", "alike", "capped"])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_log_probabilities_in_bf16_are_exact_to_a_few_thousandths(
    kind: str, entropy: bool, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are near fp64; gradients are about as near to it as those of logits in bf16, or nearer."""
    if native and not products.cpu_multiplies_bf16():
        pytest.skip("this CPU has no bf16 instructions: tiles are widened")
    monkeypatch.setattr(products, "cpu_multiplies_bf16", lambda: native)
    hidden, weight, targets = operands(kind)
    cap = 10.0 if kind == "capped" else None

    leaves64 = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact_logp, exact_entropy = logp_and_entropy(leaves64[0] @ leaves64[1].T, targets, cap)
    rounded_logp, rounded_entropy = logp_and_entropy(F.linear(hidden, weight).float(), targets, cap)
    fused = fused_linear_logprobs(hidden, weight, targets, softcap=cap, entropy=entropy)

    assert (fused.logp - exact_logp).abs().max() < 4e-3
    assert (fused.logp <= 0.0).all()
    outputs = [(fused.logp, rounded_logp, exact_logp)]
    if entropy:
        assert (fused.entropy - exact_entropy).abs().max() < 1.6e-2
        outputs.append((fused.entropy, rounded_entropy, exact_entropy))

    rounding = 4e-3 * TOKENS**0.5 if kind == "certain" else 0.0  # whose gradients are rounding only
    for value, rounded_value, exact_value in outputs:
        ours = torch.autograd.grad(value.sum(), (hidden, weight), retain_graph=True)
        rounded = torch.autograd.grad(rounded_value.sum(), (hidden, weight), retain_graph=True)
        exact = torch.autograd.grad(exact_value.sum(), leaves64, retain_graph=True)
        for a, b, c in zip(ours, rounded, exact, strict=True):
            error = (a.double() - c).norm()
            assert error <= 1.2 * (b.double() - c).norm() + 4e-3 * c.norm() + rounding


def test_a_nan_is_seen() -> None:
    """NaN in one hidden state reaches the value of its own token only."""
    hidden, weight, targets = operands("flat")
    with torch.no_grad():
        hidden[3] = torch.nan
    ours = fused_linear_logprobs(hidden, weight, targets, entropy=False)
    assert ours.logp.isnan().nonzero().flatten().tolist() == [3]
