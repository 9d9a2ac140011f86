from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_thd.loss import fused_linear_logprobs
from lightning_thd.loss.tiles import products

ROWS, WIDTH, COLUMNS = 512, 256, 1024  # 2^27 multiplications: worth a kernel


def tiles() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(COLUMNS, WIDTH, generator=generator)


@pytest.fixture
def one_dnn() -> None:
    if products._one_dnn() is None:
        pytest.skip("this CPU has no AVX-512, or torch no oneDNN")


@pytest.mark.parametrize("transposed", [False, True])
def test_the_product_is_one_in_fp32(one_dnn: None, transposed: bool) -> None:
    a, b = tiles()
    a, b = (a, b.t()) if not transposed else (a.t().contiguous().t(), b.t().contiguous())
    found = products.one_dnn_product(a, b)
    assert found is not None
    exact = a.double() @ b.double()
    assert (found.double() - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("first", [False, True])
def test_products_are_added_up_as_by_torch(first: bool) -> None:
    x, w = tiles()
    dz = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
    for a, b in ((dz, w), (dz.t(), x)):
        before = torch.full((a.shape[0], WIDTH), torch.nan if first else 1.0)
        total = before.clone()
        products.accumulate(total, a, b, torch.float32, first=first)
        exact = a.double() @ b.double() + (0.0 if first else 1.0)
        assert (total.double() - exact).norm() < 1e-6 * exact.norm()


def test_small_other_and_rounded_products_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = tiles()
    assert products.one_dnn_product(a[:8], b.t()) is None
    assert products.one_dnn_product(a.double(), b.double().t()) is None
    assert products.one_dnn_product(a.to("meta"), b.to("meta").t()) is None
    torch._C._set_mkldnn_enabled(False)
    try:
        assert products.one_dnn_product(a, b.t()) is None
    finally:
        torch._C._set_mkldnn_enabled(True)
    monkeypatch.setattr(products, "_may_round", lambda: True)
    assert products.one_dnn_product(a, b.t()) is None


def test_a_precision_below_fp32_is_seen() -> None:
    before = torch.get_float32_matmul_precision()
    assert not products._may_round()
    try:
        torch.set_float32_matmul_precision("medium")
        assert products._may_round()
    finally:
        torch.set_float32_matmul_precision(before)


def test_torch_counts_the_products() -> None:
    hidden, weight = (x.requires_grad_() for x in tiles())
    with FlopCounterMode(display=False) as counter:
        fused_linear_logprobs(hidden, weight, torch.arange(ROWS), entropy=False).logp.sum().backward()
    assert counter.get_total_flops() == 8 * ROWS * WIDTH * COLUMNS


def test_exponentials_are_off_by_their_argument_alone() -> None:
    x = torch.cat([torch.linspace(-87.0, 88.0, 100_001), torch.tensor([0.0, -1e4, -torch.inf, torch.inf])])
    exact = x.double().exp()
    found = products.exponential(x.clone(), out=torch.empty_like(x))
    normal = exact.isfinite() & (exact > 0)
    error = ((found.double() - exact).abs() / exact)[normal]
    assert (error <= 1.3e-7 * (1.0 + x[normal].abs())).all()
    assert found[-4:].tolist() == [1.0, 0.0, 0.0, float("inf")]
    assert products.exponential(torch.tensor([torch.nan]), out=torch.empty(1)).isnan().all()
    wide = torch.tensor([-1.0, 2.0], dtype=torch.float64)
    assert torch.equal(products.exponential(wide, out=torch.empty_like(wide)), wide.exp())
