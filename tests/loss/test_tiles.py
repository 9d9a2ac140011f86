"""Sizes of tiles, their products in full precision, and the map from products to logits."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_thd.loss import fused_linear_logprobs
from lightning_thd.loss.tiles import products
from lightning_thd.loss.tiles.budget import stash_shape, tile_shape
from lightning_thd.loss.tiles.logits import LogitMap

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROWS, WIDTH, COLUMNS = 512, 256, 1024  # 2^27 multiplications: worth a kernel


def test_documented_values() -> None:
    assert tile_shape(8192, 32_000, device=CPU, itemsize=4, chunk="auto") == (1024, 2048)
    kept = {"device": CPU, "itemsize": 4, "kept_itemsize": 4}
    assert stash_shape(8192, 32_000, **kept, chunk="auto")[0] == 512
    assert stash_shape(8192, 151_936, **kept, chunk="auto")[0] == 256
    assert stash_shape(8192, 32_000, **kept, chunk=16)[0] == 16


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 10**6), (10**6, 3), (0, 5), (5, 0)])
def test_two_tiles_fit_their_budget_and_are_never_empty(
    device: torch.device, rows: int, columns: int
) -> None:
    c, v = tile_shape(rows, columns, device=device, itemsize=4, chunk="auto")
    assert min(c, v) >= 1
    assert 2 * 4 * c * v <= 256 * 2**20
    assert min(stash_shape(rows, columns, device=device, itemsize=4, kept_itemsize=2, chunk="auto")) >= 1


def test_logit_map_applies_cap_before_temperature() -> None:
    x = torch.linspace(-9, 9, 7, dtype=torch.float64)
    capped = LogitMap(scale=2.0, softcap=5.0, temperature=0.5).apply_(x.clone())
    torch.testing.assert_close(capped, torch.tanh(x * 2 / 5) * 5 / 0.5)
    torch.testing.assert_close(LogitMap(scale=2.0, temperature=4.0).apply_(x.clone()), x / 2)
    with pytest.raises(ValueError, match="softcap=inf"):
        LogitMap(softcap=float("inf"))


def test_a_bf16_product_in_two_halves_keeps_what_rounding_loses() -> None:
    if not products.cpu_multiplies_bf16():
        pytest.skip("this CPU has no bf16 instructions; tiles are widened instead")
    torch.manual_seed(0)
    a, b = torch.randn(70, 300).bfloat16(), torch.randn(90, 300).bfloat16()
    exact = a.double() @ b.double().T
    out = products.product(a, b, out=torch.empty(70, 90))
    rounded = (torch.mm(a, b.t()).double() - exact).abs().max()
    assert rounded > 0.05
    assert (out.double() - exact).abs().max() < 1e-3  # 2^-17 of a largest product of 80


def test_without_bf16_instructions_tiles_are_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "cpu_multiplies_bf16", lambda: False)
    torch.manual_seed(0)
    a, b = torch.randn(7, 30).bfloat16(), torch.randn(9, 30).bfloat16()
    wide = products.operand(a, torch.bfloat16, torch.float32)
    assert wide.dtype == torch.float32
    out = products.product(wide, products.operand(b, torch.bfloat16, torch.float32), out=torch.empty(7, 9))
    torch.testing.assert_close(out.double(), a.double() @ b.double().T, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_accumulate(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    a, b = torch.randn(5, 6, dtype=wide), torch.randn(6, 7).to(dtype)
    total = torch.full((5, 7), torch.nan, dtype=wide)
    products.accumulate(total, a, b, dtype, first=True)
    products.accumulate(total, a, b, dtype, first=False)
    torch.testing.assert_close(total, 2 * (a @ b.to(wide)), rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("size", [0.0, 1e-9, 1e9])
def test_fp16_gradients_of_any_size(size: float) -> None:
    a, b = torch.full((2, 3), size), torch.ones(3, 4).half()
    total = torch.empty(2, 4)
    products.accumulate(total, a, b, torch.float16, first=True)
    torch.testing.assert_close(total, torch.full((2, 4), 3 * size), rtol=1e-3, atol=0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensor_cores_hand_out_fp32(dtype: torch.dtype) -> None:
    a = torch.randn(64, 256, device="cuda").to(dtype)
    b = torch.randn(128, 256, device="cuda").to(dtype)
    out = products.product(a, b, out=torch.empty(64, 128, device="cuda"))
    exact = a.double() @ b.double().T
    assert (out.double() - exact).abs().max() < 1e-3
    total = torch.empty(64, 256, device="cuda")
    products.accumulate(total, out, b, dtype, first=True)
    torch.testing.assert_close(total.double(), out.double() @ b.double(), rtol=1e-2, atol=2.0)


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
