from __future__ import annotations

import pytest
import torch

from lightning_thd.attention import varlen_attention
from tests.attention.oracle import dense_attention


def cu(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


CASES = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": 5},
    "window wider than any sequence": {"window": 5000},
    "two-sided window": {"causal": False, "window": (3, 2)},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 2.0},
    "softcap and window": {"softcap": 2.0, "window": 4},
}


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "value_size"), [(4, 4, 16, 16), (4, 2, 16, 8), (6, 1, 8, 24)]
)
@pytest.mark.parametrize("case", CASES)
def test_equals_dense(
    case: str, heads: int, kv_heads: int, size: int, value_size: int, cross: bool, sinks: bool
) -> None:
    options = CASES[case]
    lengths_q = [1, 7, 0, 600, 3, 12]
    lengths_kv = [4, 3, 5, 610, 0, 12] if cross else lengths_q
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q = normal(sum(lengths_q), heads, size).requires_grad_()
    k = normal(sum(lengths_kv), kv_heads, size).requires_grad_()
    v = normal(sum(lengths_kv), kv_heads, value_size).requires_grad_()
    sink = normal(heads).requires_grad_() if sinks else None
    inputs = [q, k, v] + ([sink] if sink is not None else [])
    out = varlen_attention(q, k, v, cu(lengths_q), cu(lengths_kv), 600, 610, sinks=sink, **options)
    left, right = {
        "window": (4, 0),
        "window wider than any sequence": (4999, 0),
        "two-sided window": (3, 2),
        "softcap and window": (3, 0),
        "bidirectional": (-1, -1),
    }.get(case, (-1, 0))
    expected, _ = dense_attention(
        q, k, v, lengths_q, lengths_kv,
        left=left, right=right, sinks=sink, scale=options.get("scale"), softcap=options.get("softcap"),
    )  # fmt: skip
    grad = normal(*out.shape)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    for got, want in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-11, rtol=1e-11)
