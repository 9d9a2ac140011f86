"""Gradients of bf16 on a CPU are at least as close to fp64 as those of torch's own bf16 kernel."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from lightning_thd import varlen_attention


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_bf16_gradients_are_as_close_as_torchs(groups: int) -> None:
    torch.manual_seed(0)
    length, heads, size = 192, 4, 32
    q = torch.randn(length, heads, size, dtype=torch.bfloat16)
    k, v = (torch.randn(length, groups, size, dtype=torch.bfloat16) for _ in range(2))
    grad = torch.randn(length, heads, size, dtype=torch.bfloat16)
    cu = torch.tensor([0, length], dtype=torch.int32)

    def ours(*given: torch.Tensor) -> torch.Tensor:
        return varlen_attention(*given, cu, cu, length, length, backend="cpu")

    def torchs(*given: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in given)
        k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)

    def gradients(attend, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        return list(torch.autograd.grad(attend(*leaves), leaves, grad.to(dtype)))

    wanted = gradients(torchs, torch.float64)
    for mine, theirs, exact in zip(
        gradients(ours, torch.bfloat16), gradients(torchs, torch.bfloat16), wanted, strict=True
    ):
        assert mine.dtype == torch.bfloat16
        error, their_error = ((x.double() - exact).norm() / exact.norm() for x in (mine, theirs))
        assert error <= 1.05 * their_error  # rounding of the result itself is the same
        assert error < 0.01
