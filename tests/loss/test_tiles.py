"""Products and exponentials of tiles: what may be rounded, and what is multiplied again exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_thd.loss import fused_linear_logprobs
from lightning_thd.loss.tiles import products

TOKENS, WIDTH, COLUMNS = 200, 128, 6000


@pytest.mark.parametrize("size", [0.0, 1e-9, 1e9])
def test_fp16_gradients_of_any_size(size: float) -> None:
    a, b = torch.full((2, 3), size), torch.ones(3, 4).half()
    total = torch.empty(2, 4)
    products.accumulate(total, a, b, torch.float16, first=True)
    torch.testing.assert_close(total, torch.full((2, 4), 3 * size), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("first", [False, True])
def test_large_fp32_products_are_exact_whichever_library_makes_them(first: bool) -> None:
    torch.manual_seed(0)
    x, w, dz = torch.randn(512, 256), torch.randn(1024, 256), torch.randn(512, 1024)
    z = products.product(x, w, out=torch.empty(512, 1024))
    torch.testing.assert_close(z.double(), x.double() @ w.double().T, rtol=1e-5, atol=1e-4)
    for a, b in ((dz, w), (dz.t(), x)):
        total = torch.full((a.shape[0], 256), torch.nan if first else 1.0)
        products.accumulate(total, a, b, torch.float32, first=first)
        exact = a.double() @ b.double() + (0.0 if first else 1.0)
        assert (total.double() - exact).norm() < 1e-6 * exact.norm()


def test_a_precision_below_fp32_is_seen() -> None:
    before = torch.get_float32_matmul_precision()
    assert not products._may_round()
    try:
        torch.set_float32_matmul_precision("medium")
        assert products._may_round()
    finally:
        torch.set_float32_matmul_precision(before)


def test_exponentials_are_off_by_their_argument_alone() -> None:
    x = torch.cat([torch.linspace(-87.0, 88.0, 100_001), torch.tensor([0.0, -1e4, -torch.inf, torch.inf])])
    exact = x.double().exp()
    found = products.exponential(x.clone(), out=torch.empty_like(x))
    normal = exact.isfinite() & (exact > 0)
    error = ((found.double() - exact).abs() / exact)[normal]
    assert (error <= 1.3e-7 * (1.0 + x[normal].abs())).all()
    assert found[-4:].tolist() == [1.0, 0.0, 0.0, float("inf")]
    assert products.exponential(torch.tensor([torch.nan]), out=torch.empty(1)).isnan().all()


def operands(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and targets whose predictions are flat, peaked, or nearly certain."""
    torch.manual_seed(0)
    size = {"flat": 1.0, "peaked": 8.0, "capped": 8.0}.get(kind, 2.0)
    hidden, weight = torch.randn(TOKENS, WIDTH), torch.randn(COLUMNS, WIDTH) * (size / WIDTH**0.5)
    targets = torch.randint(0, COLUMNS, (TOKENS,))
    if kind == "certain":
        hidden = weight[targets] * (40.0 / weight[targets].square().sum(1, keepdim=True))
    if kind == "offset":
        hidden[:, 0], weight[:, 0] = 20.0, 20.0
    if kind == "alike":
        weight[COLUMNS // 4 :] = weight[0]
    return hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), targets


def values(z: Tensor, targets: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    log_p = (z if cap is None else cap * (z / cap).tanh()).log_softmax(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("kind", ["flat", "peaked", "certain", "offset", "alike", "capped"])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_log_probabilities_in_bf16_are_exact_to_a_few_thousandths(
    kind: str, entropy: bool, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native and not products.cpu_multiplies_bf16():
        pytest.skip("this CPU has no bf16 instructions: tiles are widened")
    monkeypatch.setattr(products, "cpu_multiplies_bf16", lambda: native)
    (hidden, weight, targets), cap = operands(kind), 10.0 if kind == "capped" else None
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = values(leaves[0] @ leaves[1].T, targets, cap)
    naive = values(F.linear(hidden, weight).float(), targets, cap)
    ours = fused_linear_logprobs(hidden, weight, targets, softcap=cap, entropy=entropy)
    assert (ours.logp - exact[0]).abs().max() < 4e-3
    assert (ours.logp <= 0.0).all()
    pairs = [(ours.logp, naive[0], exact[0])]
    if entropy:
        assert (ours.entropy - exact[1]).abs().max() < 1.6e-2
        pairs.append((ours.entropy, naive[1], exact[1]))
    for mine, theirs, true in pairs:
        wanted = torch.autograd.grad(true.sum(), leaves, retain_graph=True)
        found = torch.autograd.grad(mine.sum(), (hidden, weight), retain_graph=True)
        rough = torch.autograd.grad(theirs.sum(), (hidden, weight), retain_graph=True)
        for a, b, c in zip(found, rough, wanted, strict=True):
            small = 4e-3 * TOKENS**0.5 if kind == "certain" else 0.0  # a gradient of rounding alone
            assert (a.double() - c).norm() <= 1.2 * (b.double() - c).norm() + 4e-3 * c.norm() + small


def test_a_nan_is_seen() -> None:
    hidden, weight, targets = operands("flat")
    with torch.no_grad():
        hidden[3] = torch.nan
    ours = fused_linear_logprobs(hidden, weight, targets, entropy=False)
    assert ours.logp.isnan().nonzero().flatten().tolist() == [3]
