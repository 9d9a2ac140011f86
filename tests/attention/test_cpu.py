"""The CPU kernel against dense fp64 attention, on every path: short, cut, whole, windowed, capped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention

from lightning_thd.attention import varlen_attention
from lightning_thd.attention.kernels import cpu, cpu_tiles
from lightning_thd.attention.kernels import cpu_plan as plan_module
from lightning_thd.attention.spec import AttentionSpec, make_spec
from tests.attention.oracle import dense_attention
from tests.attention.test_cpu_plan import SMALL_LIMITS


def offsets(lengths: list[int]) -> list[int]:
    return torch.tensor([0, *lengths]).cumsum(0).tolist()


def run(
    q: Tensor, k: Tensor, v: Tensor, lengths_q: list[int], lengths_kv: list[int], grad: Tensor,
    **options: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return out, lse, dq, dk, dv of the kernel."""
    spec: AttentionSpec = make_spec(q.shape[2], **options)  # type: ignore[arg-type]
    cu_seqlens_q = offsets(lengths_q)
    cu_seqlens_kv = offsets(lengths_kv)
    out, lse = cpu.forward(q, k, v, cu_seqlens_q, cu_seqlens_kv, spec=spec)
    return out, lse, *cpu.backward(grad, cpu.Saved(q, k, v, out, lse), cu_seqlens_q, cu_seqlens_kv, spec=spec)


def oracle(
    q: Tensor, k: Tensor, v: Tensor, lengths_q: list[int], lengths_kv: list[int], grad: Tensor,
    **options: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    spec = make_spec(q.shape[2], **options)  # type: ignore[arg-type]
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    how = {"left": spec.left, "right": spec.right, "scale": spec.scale, "softcap": spec.softcap}
    out, lse = dense_attention(*leaves, lengths_q, lengths_kv, **how)
    return out.detach(), lse.detach().t(), *torch.autograd.grad(out, leaves, grad.double())


@pytest.fixture
def small_limits() -> Iterator[None]:
    """Limits at which 40 tokens meet every path."""
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in SMALL_LIMITS.items():
            patch.setattr(plan_module, name, limit)
        patch.setattr(cpu, "_CALL_ELEMENTS", 200)
        patch.setattr(cpu, "_SCORES", 256)
        patch.setattr(cpu, "GROUPED_ELEMENTS", 64)  # with many heads, sequences of 3 to 6 go alone
        plan_module.make_plan.cache_clear()
        yield
    plan_module.make_plan.cache_clear()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    others=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    cross=st.booleans(),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (4, 4)]),
    sizes=st.sampled_from([(8, 8), (8, 4), (4, 12), (5, 5)]),
    options=st.sampled_from([
        {}, {"causal": False}, {"window": 1}, {"window": 5}, {"window": 100}, {"scale": 0.7},
        {"softcap": 1.5},
        {"causal": False, "window": (3, 2)}, {"causal": False, "window": (0, -1)},
        {"causal": False, "window": (-1, 4), "softcap": 3.0}, {"window": 7, "softcap": 3.0},
    ]),
)  # fmt: skip
def test_equals_dense_on_every_path(
    small_limits: None, lengths: list, others: list, cross: bool, heads: tuple, sizes: tuple, options: dict
) -> None:
    lengths_kv = (others * 6)[: len(lengths)] if cross else lengths
    q = torch.randn(sum(lengths), heads[0], sizes[0], dtype=torch.float64)
    k = torch.randn(sum(lengths_kv), heads[1], sizes[0], dtype=torch.float64)
    v = torch.randn(sum(lengths_kv), heads[1], sizes[1], dtype=torch.float64)
    grad = torch.randn(sum(lengths), heads[0], sizes[1], dtype=torch.float64)
    got = run(q, k, v, lengths, lengths_kv, grad, **options)
    for a, b in zip(got, oracle(q, k, v, lengths, lengths_kv, grad, **options), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"window": 100}, {"softcap": 5.0}, {"causal": False}], ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # fp32: sums of a few hundred products. bf16, fp16: 8 and 11 bits in what is stored, fp32 inside.
    [(torch.float32, 2e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)],
)
def test_dtypes_at_real_lengths(dtype: torch.dtype, tolerance: float, options: dict) -> None:
    lengths = [1, 300, 64, 2, 129, 128, 17, 17, 16, 5, 700, 1281]
    q, k, v = (torch.randn(sum(lengths), h, 32, dtype=torch.float32).to(dtype) for h in (4, 2, 2))
    grad = torch.randn(sum(lengths), 4, 32).to(dtype)
    got = run(q, k, v, lengths, lengths, grad, **options)
    for a, b in zip(got, oracle(q, k, v, lengths, lengths, grad, **options), strict=True):
        assert a.dtype == (torch.float32 if a is got[1] else dtype)
        assert (a - b).abs().max() <= tolerance * b.abs().max()


def test_huge_scores_do_not_overflow_through_padded_rows() -> None:
    """Sequences of unlike scale share a padded call; a padded row's weights may not reach the real ones."""
    lengths = [5, 4, 3]
    q, k, v, grad = (torch.randn(12, 2, 8) for _ in range(4))
    q[5:9] *= 300.0
    k[9:] *= 300.0
    got = run(q, k, v, lengths, lengths, grad)
    for a, b in zip(got, oracle(q, k, v, lengths, lengths, grad), strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-2)


def test_an_older_kernel_without_shared_heads_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [150, 9, 9]
    q, k, v, grad = (torch.randn(168, h, 8) for h in (6, 2, 2, 6))
    native = run(q, k, v, lengths, lengths, grad)
    monkeypatch.setattr(cpu_tiles, "kernel_shares_heads", lambda: False)
    for a, b in zip(run(q, k, v, lengths, lengths, grad), native, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own
def test_a_forward_mode_derivative_is_refused_where_it_would_be_zero() -> None:
    """A custom operator without a formula gives no tangent, and torch takes that for 0."""
    q, k, v = (torch.randn(6, 2, 4, dtype=torch.float64) for _ in range(3))
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)

    def attend(q: Tensor, softcap: float | None = None) -> Tensor:
        return varlen_attention(q, k, v, cu, cu, 4, 4, softcap=softcap)

    with pytest.raises(NotImplementedError, match=r"no forward-mode derivative \(torch.func.jvp\)"):
        torch.func.jvp(attend, (q,), (q,))
    with forward_ad.dual_level():
        for softcap in (None, 2.0):  # torch refuses where no operator of ours is between
            with pytest.raises(NotImplementedError, match="forward (mode )?AD"):
                attend(forward_ad.make_dual(q, q), softcap)
        assert torch.equal(attend(q), attend(q.clone()))  # beside others that have one


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 3.0}, r"no second derivative.*attn_implementation='eager'"),
        ({}, "derivative for aten::.* is not implemented"),  # torch's own, for a few short sequences
        ({"sinks": torch.zeros(2, requires_grad=True)}, "no second derivative"),
    ],
)
def test_a_second_derivative_is_refused(options: dict, message: str) -> None:
    q = torch.randn(6, 2, 8, requires_grad=True)
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    out = varlen_attention(q, q, q, cu, cu, 4, 4, **options)
    (first,) = torch.autograd.grad(out.sum(), options.get("sinks", q), create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError), match=message):
        first.sum().backward()


@pytest.mark.parametrize("layout", ["heads first", "one projection", "size strided", "expanded heads"])
def test_any_layout(layout: str) -> None:
    lengths = [150, 30, 20]
    x = torch.randn(200, 3, 4, 8)
    q, k, v = (x[:, i] for i in range(3))
    if layout == "heads first":
        q, k, v = (y.transpose(0, 1).contiguous().transpose(0, 1) for y in (q, k, v))
    elif layout == "size strided":
        q, k, v = (y.transpose(1, 2).contiguous().transpose(1, 2) for y in (q, k, v))
    elif layout == "expanded heads":
        k = k[:, :1].expand(-1, 4, -1)
        v = v[:, :1].expand(-1, 4, -1)
    grad = torch.randn(200, 1, 1).expand(-1, 4, 8)
    expected = run(*(y.contiguous() for y in (q, k, v)), lengths, lengths, grad.contiguous())
    for a, b in zip(run(q, k, v, lengths, lengths, grad), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [[58, 61, 59, 63, 60, 62], [64] * 6, [100, 127, 90], [9] * 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_crosses_into_a_neighbour_not_even_nan(lengths: list[int], dtype: torch.dtype) -> None:
    """A hidden score has weight 0, and 0 times NaN is NaN: tiles hold no row of another sequence at all."""
    tensors = [torch.randn(sum(lengths), 8, 32).to(dtype) for _ in range(4)]
    sick = [x.clone() for x in tensors]
    for x in sick:
        x[lengths[0] : lengths[0] + lengths[1]] = torch.nan
    healthy = torch.ones(sum(lengths), dtype=torch.bool)
    healthy[lengths[0] : lengths[0] + lengths[1]] = False
    results, expected = (run(*x[:3], lengths, lengths, x[3]) for x in (sick, tensors))
    for a, b in zip(results, expected, strict=True):
        assert torch.equal(a[healthy], b[healthy])
    assert results[0][~healthy].isnan().any()


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("length", "count", "causal"),
    [(1, 40, True), (16, 70, True), (41, 20, True), (128, 9, True), (1300, 2, True), (200, 5, False)],
)
def test_one_call_for_sequences_of_one_length_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, length: int, count: int, causal: bool, dtype: torch.dtype, kv_heads: int
) -> None:
    lengths = [length] * count
    # rows of one projection, as models hand them over: no tensor is contiguous
    joint = torch.randn(sum(lengths), 4 + 2 * kv_heads, 32).to(dtype)
    inputs = (*joint.split([4, kv_heads, kv_heads], dim=1), lengths, lengths)
    grad = torch.randn(sum(lengths), 4, 32).to(dtype)
    at_once = run(*inputs, grad, causal=causal)

    def cut(*args: object, **kwargs: object) -> object:
        return dataclasses.replace(plan_module.make_plan(*args, **kwargs), at_once=None)

    monkeypatch.setattr(cpu, "make_plan", cut)
    cpu._cached_work.cache_clear()
    for mine, expected in zip(at_once, run(*inputs, grad, causal=causal), strict=True):
        assert mine.is_contiguous()
        assert mine.dtype == expected.dtype
        assert torch.equal(mine, expected)
    cpu._cached_work.cache_clear()


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_bf16_gradients_are_as_close_to_fp64_as_torchs(groups: int) -> None:
    length = 192
    heads = 4
    size = 32
    q, k, v, grad = (torch.randn(length, h, size).bfloat16() for h in (heads, groups, groups, heads))
    cu = torch.tensor([0, length], dtype=torch.int32)

    def ours(*given: Tensor) -> Tensor:
        return varlen_attention(*given, cu, cu, length, length, backend="cpu")

    def torchs(*given: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in given)
        k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)

    def gradients(attend: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(attend(*leaves), leaves, grad.to(dtype))

    in_bf16 = [gradients(ours, torch.bfloat16), gradients(torchs, torch.bfloat16)]
    for mine, theirs, exact in zip(*in_bf16, gradients(torchs, torch.float64), strict=True):
        error, their_error = ((x.double() - exact).norm() / exact.norm() for x in (mine, theirs))
        assert error <= 1.05 * their_error  # rounding of the result itself is the same
        assert error < 0.01
