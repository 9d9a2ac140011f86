from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from lightning_thd.loss import (
    fused_linear_cross_entropy,
    fused_linear_logprobs,
    static_shapes,
)
from tests.loss.oracles import Case, Largest, relative, wide

# fp32 sums of a hundred terms; fp64 is there to find wrong formulas
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def check(case: Case, *, use: tuple[int, ...], chunk: int | str = "auto") -> None:
    """Outputs and gradients of a weighted sum of some of them, against the oracle."""
    leaves, targets = case.tensors()
    upstream = torch.randn(3, case.tokens, dtype=case.dtype)
    results = fused_linear_logprobs(leaves[0], leaves[1], targets, chunk=chunk, **case.kwargs(leaves))  # type: ignore[arg-type]
    ours = torch.autograd.grad(sum((upstream[i] * results[i]).sum() for i in use), leaves)
    leaves64 = wide(leaves)
    expected = case.logprobs(leaves64, targets)
    theirs = torch.autograd.grad(sum((upstream[i].double() * expected[i]).sum() for i in use), leaves64)
    for a, b in zip([*results, *ours], [*expected, *theirs], strict=True):
        assert relative(a, b) < TOLERANCE[case.dtype], (case, use)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(
    ("dtype", "use"),
    [(torch.float32, (0, 1, 2)), *((torch.float64, use) for use in ((0,), (1,), (2,), (0, 1, 2)))],
)
def test_values_and_gradients(dtype: torch.dtype, softcap: float | None, use: tuple[int, ...]) -> None:
    for bias, ignored, valid in itertools.product((False, True), (0.0, 0.02, 0.5), (None, 90)):
        case = Case(dtype=dtype, softcap=softcap, bias=bias, ignored=ignored, valid_vocab_size=valid)
        check(replace(case, temperature=0.7, logit_scale=1.3), use=use)
    check(Case(dtype=dtype, softcap=softcap), use=use)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 20),
    width=st.integers(1, 9),
    vocabulary=st.integers(1, 30),
    chunk=st.one_of(st.just("auto"), st.integers(1, 25)),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_any_shape_and_tile(
    tokens: int, width: int, vocabulary: int, chunk: int | str, ignored: float, seed: int
) -> None:
    case = Case(tokens=tokens, width=width, vocabulary=vocabulary, ignored=ignored, seed=seed)
    check(case, use=(0, 1, 2), chunk=chunk)


def test_small_column_tiles_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_thd.loss.tiles import budget

    monkeypatch.setitem(budget._WIDEST, "cpu", 7)
    monkeypatch.setattr(budget, "CPU_BYTES", 7 * 5 * 16)
    for softcap in (None, 4.0):
        check(Case(softcap=softcap, bias=True, ignored=0.3, valid_vocab_size=95), use=(0, 1, 2))


def test_double_backward_is_refused() -> None:
    leaves, targets = Case().tensors()
    loss = fused_linear_logprobs(leaves[0], leaves[1], targets).logp.sum()
    with pytest.raises(RuntimeError, match=r"create_graph=True.*keeps no logits"):
        torch.autograd.grad(loss, leaves, create_graph=True)


def test_no_logits_are_made_and_scoring_keeps_nothing() -> None:
    case = Case(tokens=4096, width=8, vocabulary=6000, dtype=torch.float32)
    leaves, targets = case.tensors()
    with Largest() as seen:
        results = fused_linear_logprobs(leaves[0], leaves[1], targets)
        sum(result.sum() for result in results).backward()  # type: ignore[union-attr]
    assert 0 < seen.largest <= 8 * 2**20  # one tile; the logits would take 98 MB
    with torch.no_grad():
        results = fused_linear_logprobs(leaves[0], leaves[1], targets)
    assert all(result.grad_fn is None for result in results)


def test_bf16_is_exact_to_a_hundredth_where_a_rounded_product_is_not() -> None:
    torch.manual_seed(0)
    hidden = (torch.randn(256, 128) * 2).bfloat16()
    weight = torch.randn(2000, 128).bfloat16()
    targets = torch.randint(0, 2000, (256,))
    exact = -F.cross_entropy(hidden.double() @ weight.double().T, targets, reduction="none")
    rounded = -F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="none")
    ours = fused_linear_logprobs(hidden, weight, targets).logp
    assert ours.dtype == torch.float32
    assert (rounded.double() - exact).abs().max() > 0.05
    assert (ours.double() - exact).abs().max() < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients(dtype: torch.dtype) -> None:
    case = Case(dtype=dtype, width=64, vocabulary=300)
    leaves, targets = case.tensors()

    def gradients(results: tuple[Tensor, ...], of: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad((results[0] - 0.1 * results[1]).mean(), of)

    ours = gradients(fused_linear_logprobs(leaves[0], leaves[1], targets), leaves)
    leaves64 = wide(leaves)
    exact = gradients(case.logprobs(leaves64, targets), leaves64)
    log_p = F.linear(leaves[0], leaves[1]).float().log_softmax(-1)
    logp = log_p.gather(1, targets[:, None]).squeeze(1)
    naive = gradients((logp, -(log_p.exp() * log_p).sum(-1)), leaves)
    for a, b, c in zip(ours, exact, naive, strict=True):
        assert a.dtype == dtype
        assert relative(a, b) < max(1.1 * relative(c, b), 2e-3)  # no worse than rounded logits


def test_rows_select_tokens_in_their_order() -> None:
    case = Case(ignored=0.3)
    leaves, targets = case.tensors()
    everything = fused_linear_logprobs(leaves[0], leaves[1], targets)
    rows = torch.tensor([7, 3, 3, 50])
    some = fused_linear_logprobs(leaves[0], leaves[1], targets, rows=rows)
    mask = torch.zeros(case.tokens, dtype=torch.bool)
    mask[[3, 7, 50]] = True
    masked = fused_linear_logprobs(leaves[0], leaves[1], targets, rows=mask)
    for all_, picked, by_mask in zip(everything, some, masked, strict=True):
        torch.testing.assert_close(picked, all_[rows])
        torch.testing.assert_close(by_mask, all_[mask])
    a = torch.autograd.grad(some.logp.sum(), leaves)
    b = torch.autograd.grad(everything.logp[rows].sum(), leaves)
    torch.testing.assert_close(a, b)


def test_ignored_rows_are_left_out_and_change_nothing() -> None:
    leaves, targets = Case(ignored=0.5).tensors()
    free = fused_linear_logprobs(leaves[0], leaves[1], targets)
    with static_shapes():
        static = fused_linear_logprobs(leaves[0], leaves[1], targets)
    ours = torch.autograd.grad(sum(x.sum() for x in free), leaves)
    theirs = torch.autograd.grad(sum(x.sum() for x in static), leaves)
    torch.testing.assert_close(tuple(free), tuple(static))
    torch.testing.assert_close(ours, theirs)
    poisoned = leaves[0].detach().clone()
    poisoned[targets == -100] = torch.nan
    assert fused_linear_logprobs(poisoned, leaves[1], targets).logp.isfinite().all()


def test_leading_dimensions_come_back() -> None:
    leaves, targets = Case(tokens=24).tensors()
    flat = fused_linear_logprobs(leaves[0], leaves[1], targets)
    shaped = fused_linear_logprobs(leaves[0].view(2, 12, -1), leaves[1], targets.view(2, 12))
    assert shaped.logp.shape == (2, 12)
    torch.testing.assert_close(shaped.entropy.flatten(), flat.entropy)


def test_autocast_casts_both_and_returns_fp32() -> None:
    leaves, targets = Case(dtype=torch.float32, width=64).tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = fused_linear_logprobs(leaves[0], leaves[1], targets)
        results.logp.sum().backward()  # under autocast too: the tiles must not be cast again
    rounded = [leaf.detach().bfloat16().double() for leaf in leaves]
    expected = Case(width=64).logprobs(rounded, targets)
    assert results.logp.dtype == torch.float32
    assert (results.logp.double() - expected[0]).abs().max() < 1e-2
    assert leaves[0].grad is not None
    assert leaves[0].grad.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_inside_a_compiled_function() -> None:
    def policy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        results = fused_linear_logprobs(hidden * 2.0, weight, targets)
        return (results.logp * 1.5 - results.entropy).sum() + fused_linear_cross_entropy(
            hidden, weight, targets
        )

    leaves, targets = Case(dtype=torch.float32, ignored=0.4).tensors()
    compiled = torch.compile(policy, backend="aot_eager")
    ours = torch.autograd.grad(compiled(leaves[0], leaves[1], targets), leaves)
    theirs = torch.autograd.grad(policy(leaves[0], leaves[1], targets), leaves)
    torch.testing.assert_close(ours, theirs)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.0}, r"temperature=0.0; wanted a finite number above 0.*Greedy"),
    ({"temperature": float("nan")}, "temperature=nan; wanted a finite number"),
    ({"logit_scale": 0.0}, "scale is 0, wanted another number"),
    ({"targets": torch.tensor([0, 101, 2, 3])}, r"targets\[1\] is 101, wanted 0 to 100 or ignore_index=-100"),
    ({"targets": torch.tensor([0, 95, 2, 3]), "valid_vocab_size": 90}, r"targets\[1\] is 95, wanted 0 to 89"),
    ({"targets": torch.zeros(5, dtype=torch.long)}, r"targets is \[5\].*already shifted"),
    ({"targets": torch.zeros(4)}, "targets is torch.float32, wanted int64"),
    ({"targets": torch.zeros(4, dtype=torch.long, device="meta")}, "targets is on meta and hidden on cpu"),
    (
        {"weight": torch.randn(101, 16).double()},
        r"hidden is torch.float32 and weight torch.float64, wanted one dtype",
    ),
    ({"weight": torch.randn(101, 16, device="meta")}, "weight is on meta and hidden on cpu"),
    ({"weight": torch.randn(101, 15)}, r"hidden is \[4, 16\] and weight \[101, 15\]"),
    ({"hidden": torch.zeros(4, 16, dtype=torch.long)}, "hidden is torch.int64 .*wanted one dtype of fp32"),
    ({"bias": torch.zeros(7)}, r"bias is \[7\], wanted \[101\]"),
    ({"valid_vocab_size": 102}, "valid_vocab_size is 102 but weight has 101 rows"),
    ({"valid_vocab_size": 0}, "valid_vocab_size=0; wanted 1 or more"),
    ({"rows": torch.tensor([0, 4])}, "rows goes from 0 to 4, wanted indices 0 to 3"),
    ({"rows": torch.zeros(3, dtype=torch.bool)}, r"rows is torch.bool \[3\], wanted int64"),
    ({"rows": torch.zeros(3)}, "rows is torch.float32"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_messages(changes: dict[str, Any], message: str) -> None:
    good = {"hidden": torch.randn(4, 16), "weight": torch.randn(101, 16), "targets": torch.arange(4)}
    arguments = {**good, **changes}
    tensors = [arguments.pop(name) for name in ("hidden", "weight", "targets")]
    with pytest.raises(ValueError, match=message):
        fused_linear_logprobs(*tensors, **arguments)
