from __future__ import annotations

import pytest
import torch

from lightning_thd.loss.tiles import products


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
