from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_thd.attention import varlen_attention
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


@pytest.mark.parametrize("backend", ["cpu", "portable"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_equals_dense_forward_and_backward(case: str, cross: bool, sinks: bool, backend: Backend) -> None:
    options, (left, right) = CASES[case]
    lengths_q = [1, 7, 0, 300, 3, 12]
    lengths_kv = [4, 3, 5, 310, 0, 12] if cross else lengths_q
    q = torch.randn(sum(lengths_q), 4, 16, dtype=torch.float64, requires_grad=True)
    k = torch.randn(sum(lengths_kv), 2, 16, dtype=torch.float64, requires_grad=True)
    v = torch.randn(sum(lengths_kv), 2, 8, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True) if sinks else None
    leaves = [q, k, v] + ([] if sink is None else [sink])
    out = varlen_attention(
        q, k, v, cu(lengths_q), cu(lengths_kv), 300, 310, sinks=sink, backend=backend, **options
    )
    expected, _ = dense_attention(
        q, k, v, lengths_q, lengths_kv,
        left=left, right=right, sinks=sink, scale=options.get("scale"), softcap=options.get("softcap"),
    )  # fmt: skip
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    grad = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize(
    "case", ["causal", "bidirectional", "window wider than any sequence", "softcap and scale"]
)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize(
    "lengths", [([5], [5]), ([1, 9, 128, 3], None), ([4, 2], [4, 7]), ([3, 3, 3, 3, 3], None)]
)
def test_a_few_short_sequences_equal_dense(lengths: tuple, heads: tuple[int, int], case: str) -> None:
    """Up to four go to the kernel one by one, differentiated by torch itself."""
    lengths_q, lengths_kv = lengths[0], lengths[1] or lengths[0]
    options, (left, right) = CASES[case]
    q = torch.randn(sum(lengths_q), heads[0], 16, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(sum(lengths_kv), heads[1], 16, dtype=torch.float64, requires_grad=True) for _ in "kv")
    out = varlen_attention(q, k, v, cu(lengths_q), cu(lengths_kv), 128, 128, **options)
    expected, _ = dense_attention(
        q, k, v, lengths_q, lengths_kv,
        left=left, right=right, scale=options.get("scale"), softcap=options.get("softcap"),
    )  # fmt: skip
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    assert out.is_contiguous()  # AFMoE and JetMoE view it
    grad = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("value", [None, {"input_ids": [1]}, 3.0, torch.tensor(200)])
def test_a_longest_sequence_is_a_number_of_the_host(value: object) -> None:
    offsets = cu(LENGTHS)
    for given in ((value, 200), (200, value)):
        with pytest.raises(TypeError, match=r"max_seqlen_(q|kv) is .* an int. Pass an int known on the host"):
            varlen_attention(*inputs(), offsets, offsets, *given)


def test_one_token_returns_its_value() -> None:
    q, k, v = (torch.randn(1, 2, 8) for _ in range(3))
    assert torch.equal(varlen_attention(q, k, v, cu([1]), cu([1]), 1, 1), v)


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


@pytest.mark.parametrize("given_dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_all_three(given_dtype: torch.dtype) -> None:
    q, k, v = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = varlen_attention(q, k, v.to(given_dtype), cu(LENGTHS), cu(LENGTHS), 200, 200)
    halves = [x.bfloat16() for x in (q, k, v)]
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, varlen_attention(*halves, cu(LENGTHS), cu(LENGTHS), 200, 200))
    out.float().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


def test_autocast_leaves_fp64_alone() -> None:
    q, k, v = inputs(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert varlen_attention(q, k, v, cu(LENGTHS), cu(LENGTHS), 200, 200).dtype == torch.float64


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
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_compile_without_breaks_and_bounded_recompilations() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def attend(q: Tensor, k: Tensor, v: Tensor, at: Tensor, longest: int) -> Tensor:
        return varlen_attention(q * 2, k, v, at, at, longest, longest, window=7).square()

    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for lengths in (
        [3, 5, 9],
        [4, 4, 9],
        [10, 20],
        [1, 2, 3, 4, 5],
        [100],
        [7, 7, 8, 30],
        [50, 2],
        [3, 0, 4],
    ):
        q, k, v = (torch.randn(sum(lengths), h, 16, requires_grad=True) for h in (4, 2, 2))
        out = compiled(q, k, v, cu(lengths), max(lengths))
        wanted = attend(q, k, v, cu(lengths), max(lengths))
        torch.testing.assert_close(out, wanted)
        grad = torch.randn_like(out)
        for a, b in zip(
            torch.autograd.grad(out, (q, k, v), grad),
            torch.autograd.grad(wanted, (q, k, v), grad),
            strict=True,
        ):
            torch.testing.assert_close(a, b)
    assert counter.frame_count <= 3  # fixed sizes, then symbolic T and longest, then a T of one sequence
    torch._dynamo.reset()


def test_meta_tensors_get_shapes_without_reading_offsets() -> None:
    q, k = (torch.empty(10, h, 16, device="meta", requires_grad=True) for h in (4, 2))
    v = torch.empty(10, 2, 8, device="meta", requires_grad=True)
    at = torch.empty(3, dtype=torch.int32, device="meta")
    out = varlen_attention(q, k, v, at, at, 6, 6, sinks=torch.empty(4, device="meta"))
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


def call(**changes: object) -> Tensor:
    """A good call of two sequences with some arguments changed."""
    x = torch.randn(5, 4, 8)
    arguments: dict = {
        "q_THD": x, "k_THD": x[:, :2], "v_THD": x[:, :2],
        "cu_seqlens_q": cu([3, 2]), "cu_seqlens_kv": cu([3, 2]), "max_seqlen_q": 3, "max_seqlen_kv": 3,
    }  # fmt: skip
    return varlen_attention(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"cu_seqlens_q": cu([3, 1])},
            r"cu_seqlens_q runs from 0 to 4 but must run from 0 to 5, the rows of q\.",
        ),
        (
            {"cu_seqlens_kv": cu([3, 3])},
            "cu_seqlens_kv runs from 0 to 6 .* the rows of k and v.*sequence of its own",
        ),
        ({"cu_seqlens_q": cu([3, 2]) + 1}, "cu_seqlens_q runs from 1 to 6"),
        ({"cu_seqlens_q": torch.tensor([0, 6, 5], dtype=torch.int32)}, "falls from 6 to 5 at sequence 1"),
        (
            {"max_seqlen_q": 2},
            "max_seqlen_q=2 but cu_seqlens_q has a sequence of 3: .* Pass max_seqlen_q=3 or more",
        ),
        ({"max_seqlen_kv": 1}, "max_seqlen_kv=1 but cu_seqlens_kv has a sequence of 3"),
        (
            {"cu_seqlens_q": cu([3, 2]).long()},
            r"cu_seqlens_q is torch.int64; want int32.*\.to\(torch.int32\)",
        ),
        ({"cu_seqlens_q": cu([3, 2])[None]}, r"cu_seqlens_q has shape \[1, 3\]; want \[sequences \+ 1\]"),
        ({"cu_seqlens_q": cu([])}, r"cu_seqlens_q has shape \[1\]; .* at least one sequence"),
        (
            {"cu_seqlens_q": cu([3, 2]).to("meta")},
            r"cu_seqlens_q is on meta but q is on cpu; .*\.to\('cpu'\)",
        ),
        ({"cu_seqlens_kv": cu([3, 1, 1])}, "cu_seqlens_q has 3 entries and cu_seqlens_kv 4"),
        (
            {"k_THD": torch.randn(5, 3, 8), "v_THD": torch.randn(5, 3, 8)},
            "4 query heads are not divisible by 3",
        ),
        (
            {"k_THD": torch.randn(5, 0, 8), "v_THD": torch.randn(5, 0, 8)},
            "4 query heads are not divisible by 0",
        ),
        ({"q_THD": torch.randn(5, 8)}, r"q has shape \[5, 8\]; want three dimensions"),
        ({"q_THD": torch.randn(1, 5, 4, 8)}, r"q has shape \[1, 5, 4, 8\]; want three dimensions"),
        ({"k_THD": torch.randn(5, 2, 4)}, "q has head size 8 and k 4"),
        ({"v_THD": torch.randn(4, 2, 8)}, "k has 5 slots of 2 heads and v has 4 of 2"),
        (
            {"v_THD": torch.randn(5, 2, 8).double()},
            "q is torch.float32, k is torch.float32 and v is torch.float64",
        ),
        ({"q_THD": torch.ones(5, 4, 8).long()}, "q is torch.int64; want a floating dtype"),
        ({"k_THD": torch.randn(5, 2, 8).to("meta")}, "q is on cpu, k on meta and v on cpu"),
        (
            {"sinks": torch.zeros(2)},
            r"sinks is torch.float32 \[2\] on cpu; want one float for each of the 4 query",
        ),
        ({"window": 0}, "window=0"),
        ({"backend": "torch"}, "backend='torch' cannot run this call"),
    ],
)
def test_messages(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_the_good_call_is_good() -> None:
    assert call().shape == (5, 4, 8)


def test_the_portable_kernel_moves_no_other_sequence_not_even_by_nan() -> None:
    q, k, v = (x.detach() for x in inputs())
    base = varlen_attention(q, k, v, cu(LENGTHS), cu(LENGTHS), 200, 200, backend="portable")
    for x in (q, k, v):
        x[1:8] = torch.nan
    for options in ({}, {"softcap": 1e9}):
        out = varlen_attention(q, k, v, cu(LENGTHS), cu(LENGTHS), 200, 200, backend="portable", **options)
        torch.testing.assert_close(out[8:], base[8:])
        assert out[1:8].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
)
def test_the_portable_kernel_in_other_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    q, k, v = inputs(dtype)
    out = varlen_attention(q, k, v, cu(LENGTHS), cu(LENGTHS), 200, 200, backend="portable")
    wanted, _ = dense_attention(q, k, v, LENGTHS, LENGTHS, left=-1, right=0)
    assert out.dtype == dtype
    assert (out - wanted).abs().max() <= tolerance * wanted.abs().max()
