from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from lightning_thd.attention import varlen_attention
from lightning_thd.attention.spec import AttentionSpec, make_spec
from lightning_thd.attention.support import Backend
from tests.attention.oracle import dense_attention

LENGTHS = [1, 7, 64, 3, 200, 12]
TOTAL = sum(LENGTHS)


def cu(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def inputs(dtype: torch.dtype = torch.float32, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, 16), (kv_heads, 16), (kv_heads, 16))
    return [torch.randn(TOTAL, *s, generator=generator).to(dtype).requires_grad_() for s in shapes]


CASES = {
    "causal": ({}, (-1, 0)),
    "bidirectional": ({"causal": False}, (-1, -1)),
    "window": ({"window": 5}, (4, 0)),
    "window wider than any sequence": ({"window": 5000}, (4999, 0)),
    "two-sided window": ({"causal": False, "window": (3, 2)}, (3, 2)),
    "softcap and scale": ({"softcap": 2.0, "scale": 0.3}, (-1, 0)),
}
# Queries, keys, query and key-value heads, value size. Up to four short ones go to the kernel one by one.
SHAPES = [
    ([1, 7, 0, 300, 3, 12], None, 4, 2, 8),
    ([1, 7, 0, 300, 3, 12], [4, 3, 5, 310, 0, 12], 4, 2, 8),
    ([5], None, 4, 4, 16),
    ([1, 9, 128, 3], None, 4, 2, 16),
    ([4, 2], [4, 7], 4, 2, 16),
    ([3, 3, 3, 3, 3], None, 4, 4, 16),
]


@pytest.mark.parametrize("backend", ["cpu", "portable"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_dense_forward_and_backward(case: str, shape: tuple, sinks: bool, backend: Backend) -> None:
    options, (left, right) = CASES[case]
    lengths_q, others, heads, kv_heads, value_size = shape
    lengths_kv = others or lengths_q
    sizes = ((lengths_q, heads, 16), (lengths_kv, kv_heads, 16), (lengths_kv, kv_heads, value_size))
    leaves = [torch.randn(sum(n), *s, dtype=torch.float64, requires_grad=True) for n, *s in sizes]
    sink = torch.randn(heads, dtype=torch.float64, requires_grad=True) if sinks else None
    out = varlen_attention(
        *leaves, cu(lengths_q), cu(lengths_kv), 310, 310, sinks=sink, backend=backend, **options
    )
    expected, _ = dense_attention(
        *leaves, lengths_q, lengths_kv,
        left=left, right=right, sinks=sink, scale=options.get("scale"), softcap=options.get("softcap"),
    )  # fmt: skip

    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    assert out.is_contiguous()  # AFMoE and JetMoE view it

    leaves += [] if sink is None else [sink]
    grad = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize(
    ("options", "left", "right"),
    [
        ({}, -1, 0),
        ({"causal": False}, -1, -1),
        ({"window": 1}, 0, 0),
        ({"window": (511, 7)}, 511, 0),  # causal wins over a right side, as in flash-attn
        ({"window": (-1, -1)}, -1, 0),
        ({"window": (3, -1), "causal": False}, 3, -1),
    ],
)
def test_window_sides(options: dict, left: int, right: int) -> None:
    assert make_spec(64, **options) == AttentionSpec(left=left, right=right, scale=0.125, softcap=0.0)


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 3.0}, {"causal": False}], ids=str)
def test_one_sequence_moves_no_other(options: dict) -> None:
    q, k, v = inputs()
    base = varlen_attention(q, k, v, cu(LENGTHS), cu(LENGTHS), 200, 200, **options)
    for i, (start, length) in enumerate(zip(cu(LENGTHS).tolist(), LENGTHS, strict=False)):
        moved = [x.detach().clone() for x in (q, k, v)]
        for x in moved:
            x[start : start + length] += 1.0
        out = varlen_attention(*moved, cu(LENGTHS), cu(LENGTHS), 200, 200, **options)
        rows = torch.arange(TOTAL)
        outside = (rows < start) | (rows >= start + length)
        assert torch.equal(out[outside], base[outside])
        assert not torch.equal(out[~outside], base[~outside]), i
        grads = torch.autograd.grad(base[~outside].sum(), (q, k, v), retain_graph=True)
        assert all(grad[outside].abs().max() == 0 for grad in grads)
        assert grads[2][~outside].abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"backend": "portable"}])
def test_autocast_casts_all_three_but_not_fp64(dtype: torch.dtype, options: dict) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = inputs(wide)
    with torch.autocast("cpu", torch.bfloat16):
        out = varlen_attention(q, k, v.to(dtype), cu(LENGTHS), cu(LENGTHS), 200, 200, **options)
    same = [x if dtype == torch.float64 else x.bfloat16() for x in (q, k, v)]
    assert torch.equal(out, varlen_attention(*same, cu(LENGTHS), cu(LENGTHS), 200, 200, **options))
    out.float().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == wide


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_gives_the_same_bits(reentrant: bool, autocast: bool) -> None:
    sinks = torch.randn(4, requires_grad=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention(q * 1.5, k, v, cu(LENGTHS), cu(LENGTHS), 200, 200, window=50, sinks=sinks)

    def gradients(run: object) -> tuple[Tensor, ...]:
        leaves = inputs()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = run(*leaves)
        out.float().square().sum().backward()
        return (out.detach(), *(x.grad for x in leaves), sinks.grad)

    plain = gradients(attend)
    sinks.grad = None
    recomputed = gradients(lambda *x: checkpoint(attend, *x, use_reentrant=reentrant))
    torch.testing.assert_close(recomputed, plain, rtol=0, atol=0)


def test_meta_tensors_get_shapes_without_reading_offsets() -> None:
    q, k = (torch.empty(10, h, 16, device="meta", requires_grad=True) for h in (4, 2))
    v = torch.empty(10, 2, 8, device="meta", requires_grad=True)
    cu_seqlens = torch.empty(3, dtype=torch.int32, device="meta")
    out = varlen_attention(q, k, v, cu_seqlens, cu_seqlens, 6, 6, sinks=torch.empty(4, device="meta"))
    out.sum().backward()
    assert out.shape == (10, 4, 8)
    assert v.grad is not None
    assert v.grad.shape == v.shape


def test_the_operator_keeps_torchs_contract() -> None:
    from lightning_thd.attention.kernels.cpu import varlen_attention_cpu

    q, k, v = (torch.randn(9, h, 8, requires_grad=True) for h in (4, 2, 2))
    sinks = torch.randn(4, requires_grad=True)
    for sink in (None, sinks):
        args = (q, k, v, cu([4, 5]), cu([4, 5]), sink, 5, 5, -1, 0, 0.5, 0.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # opcheck's own deprecations
            torch.library.opcheck(varlen_attention_cpu, args)


def test_the_portable_kernel_moves_no_other_sequence_not_even_by_nan() -> None:
    q, k, v = (x.detach() for x in inputs())
    base = varlen_attention(q, k, v, cu(LENGTHS), cu(LENGTHS), 200, 200, backend="portable")
    for x in (q, k, v):
        x[1:8] = torch.nan
    for options in ({}, {"softcap": 1e9}):
        out = varlen_attention(q, k, v, cu(LENGTHS), cu(LENGTHS), 200, 200, backend="portable", **options)
        torch.testing.assert_close(out[8:], base[8:])
        assert out[1:8].isnan().all()


def test_compile_without_breaks_and_bounded_recompilations() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def attend(q: Tensor, k: Tensor, v: Tensor, at: Tensor, longest: int) -> Tensor:
        return varlen_attention(q * 2, k, v, at, at, longest, longest, window=7).square()

    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for lengths in ([3, 5, 9], [4, 4, 9], [10, 20], [1, 2, 3, 4, 5], [100], [50, 2], [3, 0, 4]):
        leaves = [torch.randn(sum(lengths), h, 16, requires_grad=True) for h in (4, 2, 2)]
        outs = [run(*leaves, cu(lengths), max(lengths)) for run in (compiled, attend)]
        torch.testing.assert_close(*outs)
        grad = torch.randn_like(outs[0])
        torch.testing.assert_close(*(torch.autograd.grad(out, leaves, grad) for out in outs))
    assert counter.frame_count <= 3  # fixed sizes, then symbolic T and longest, then a T of one sequence
    torch._dynamo.reset()


META = torch.device("meta")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens_q": cu([3, 1])}, "cu_seqlens_q runs from 0 to 4 but .* 0 to 5, the rows of q"),
        ({"cu_seqlens_kv": cu([3, 3])}, "cu_seqlens_kv runs from 0 to 6 .* the rows of k and v"),
        ({"cu_seqlens_q": cu([3, 2]) + 1}, "cu_seqlens_q runs from 1 to 6"),
        ({"cu_seqlens_q": torch.tensor([0, 6, 5]).int()}, "falls from 6 to 5 at sequence 1"),
        ({"max_seqlen_q": 2}, "max_seqlen_q=2 but cu_seqlens_q has a sequence of 3"),
        ({"max_seqlen_kv": 1}, "max_seqlen_kv=1 but cu_seqlens_kv has a sequence of 3"),
        ({"cu_seqlens_q": cu([3, 2]).long()}, "cu_seqlens_q is torch.int64 .*; want int32"),
        ({"cu_seqlens_q": cu([3, 2])[None]}, r"cu_seqlens_q is torch.int32 \[1, 3\]; want"),
        ({"cu_seqlens_q": cu([])}, r"cu_seqlens_q is torch.int32 \[1\]; want int32 .*at least 1"),
        ({"cu_seqlens_q": cu([3, 2]).to(META)}, "cu_seqlens_q is on meta but q is on cpu"),
        ({"cu_seqlens_kv": cu([3, 1, 1])}, "cu_seqlens_q has 3 entries and cu_seqlens_kv 4"),
        ({"k_THD": torch.ones(5, 3, 8), "v_THD": torch.ones(5, 3, 8)}, "4 query heads are not .* by 3"),
        ({"k_THD": torch.ones(5, 0, 8), "v_THD": torch.ones(5, 0, 8)}, "4 query heads are not .* by 0"),
        ({"q_THD": torch.ones(1, 5, 4, 8)}, r"q has shape \[1, 5, 4, 8\]; want three dimensions"),
        (
            {"k_THD": torch.ones(1, 4, 5, 8)},
            r"Of \[1, heads, slots, head size\].*pass k\[0\]\.transpose\(0, 1\)",
        ),
        ({"k_THD": torch.ones(5, 2, 4)}, "q has head size 8 and k 4"),
        ({"v_THD": torch.ones(4, 2, 8)}, r"k has shape \[5, 2, 8\] and v \[4, 2, 8\]"),
        ({"v_THD": torch.ones(5, 2, 8).double()}, "k is torch.float32 and v is torch.float64"),
        ({"q_THD": torch.ones(5, 4, 8).long()}, "q is torch.int64; want a floating dtype"),
        ({"k_THD": torch.ones(5, 2, 8).to(META)}, "q is on cpu, k on meta and v on cpu"),
        ({"sinks": torch.zeros(2)}, r"sinks is torch.float32 \[2\] on cpu; want one float for each of the 4"),
        ({"backend": "torch"}, "backend='torch' cannot run this call"),
        *(({"window": window}, "window=.*: want None, the number") for window in (0, True, 2.5)),
        *(({"window": window}, r"want \(left, right\)") for window in ((1, 2, 3), (-2, 0))),
        ({"window": 8, "causal": False}, r"window=8 with causal=False.* for example window=\(4, 4\)"),
        *(({"scale": scale}, "is not a positive finite") for scale in (0.0, float("inf"), float("nan"))),
        *(({"softcap": softcap}, "is negative or not finite") for softcap in (-1.0, float("nan"))),
        ({"max_seqlen_q": torch.tensor(200)}, "Pass an int known on"),
        ({"max_seqlen_q": None}, "without max_seqlen_q, the longest sequence, an int known on the host"),
    ],
)
def test_messages(changes: dict, message: str) -> None:
    x = torch.randn(5, 4, 8)
    arguments: dict = {
        "q_THD": x, "k_THD": x[:, :2], "v_THD": x[:, :2],
        "cu_seqlens_q": cu([3, 2]), "cu_seqlens_kv": cu([3, 2]), "max_seqlen_q": 3, "max_seqlen_kv": 3,
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError), match=message):
        varlen_attention(**(arguments | changes))
