"""Losses of hidden states without logits, against all logits: values, gradients, tiles, extremes, ranks."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_thd.loss import (
    fused_linear_cross_entropy,
    fused_linear_distillation,
    fused_linear_logprobs,
    static_shapes,
)
from lightning_thd.loss.linear_logprobs import linear_logprobs
from lightning_thd.loss.linear_nll import linear_nll
from lightning_thd.loss.prepare import LossArgs
from lightning_thd.loss.tiles import budget
from lightning_thd.loss.tiles.nll import Penalties
from tests.loss.oracles import Case, Largest, relative, wide
from tests.ranks import RankError, run_ranks

INF = math.inf
DIVERGENCES = ("kl", "reverse_kl", "jsd")
KINDS = ("nll", "logprobs", *DIVERGENCES)
# fp32 sums of a hundred terms; fp64 is there to find wrong formulas
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}


def divergence(z: Tensor, teacher: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    q, p = (x.softmax(-1) for x in (z, teacher))

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(a > 0, a * (a.log() - b.log()), 0.0).sum(-1)

    m = beta * p + (1 - beta) * q
    return {"kl": kl(p, q), "reverse_kl": kl(q, p), "jsd": beta * kl(p, m) + (1 - beta) * kl(q, m)}[kind]


def fused(kind: str, leaves: list[Any], targets: Tensor, taught: tuple[Tensor, Tensor], **how: Any) -> Tensor:
    """Compute one number that depends on all outputs of a fused loss."""
    how = {"bias": leaves[2] if len(leaves) > 2 else None, **how}
    if kind == "nll":
        return fused_linear_cross_entropy(leaves[0], leaves[1], targets, **how)
    if kind == "logprobs":
        found = fused_linear_logprobs(leaves[0], leaves[1], targets, **how)
        return (found.logp - 0.3 * found.entropy + 0.1 * found.lse).sum()
    teacher: dict[str, Any] = {"teacher_hidden": taught[0], "teacher_weight": taught[1], "kind": kind}
    return fused_linear_distillation(leaves[0], leaves[1], targets, **teacher, **how)


def whole(
    kind: str, case: Case, leaves: list[Tensor], targets: Tensor, taught: tuple[Tensor, Tensor]
) -> Tensor:
    logp, entropy, lse = case.logprobs(leaves, targets)
    if kind == "nll":
        return -logp.sum()
    if kind == "logprobs":
        return (logp - 0.3 * entropy + 0.1 * lse).sum()
    z, teacher = case.logits(leaves), (taught[0] @ taught[1].T / case.temperature)
    z, teacher = (x.float() if x.itemsize < 4 else x for x in (z, teacher[:, : case.valid_vocab_size]))
    return divergence(z, teacher, kind)[targets != -100].sum()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(
    ("dtype", "use"),
    [(torch.float32, (0, 1, 2)), *((torch.float64, use) for use in ((0,), (1,), (2,), (0, 1, 2)))],
)
def test_log_probabilities(dtype: torch.dtype, softcap: float | None, use: tuple[int, ...]) -> None:
    plain = Case(dtype=dtype, softcap=softcap)
    check_logprobs(plain, use=use)
    for bias, ignored, valid in itertools.product((False, True), (0.0, 0.02, 0.5), (None, 90)):
        case = replace(plain, bias=bias, ignored=ignored, valid_vocab_size=valid)
        check_logprobs(replace(case, temperature=0.7, logit_scale=1.3), use=use)


def check_logprobs(case: Case, *, use: tuple[int, ...] = (0, 1, 2), chunk: Any = "auto") -> None:
    """Compare outputs, and gradients of a weighted sum of some of them."""
    leaves, targets = case.tensors()
    upstream = torch.randn(3, case.tokens, dtype=case.dtype)
    results = fused_linear_logprobs(leaves[0], leaves[1], targets, chunk=chunk, **case.kwargs(leaves))
    ours = torch.autograd.grad(sum((upstream[i] * results[i]).sum() for i in use), leaves)
    leaves64 = wide(leaves)
    expected = case.logprobs(leaves64, targets)
    theirs = torch.autograd.grad(sum((upstream[i].double() * expected[i]).sum() for i in use), leaves64)
    for a, b in zip([*results, *ours], [*expected, *theirs], strict=True):
        assert relative(a, b) < TOLERANCE[case.dtype] / 2, (case, use)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 20),
    width=st.integers(1, 9),
    vocabulary=st.integers(1, 30),
    chunk=st.one_of(st.just("auto"), st.integers(1, 25)),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    softcap=st.sampled_from([None, 4.0]),
    widest=st.sampled_from([7, 2048]),
    seed=st.integers(0, 10**6),
)
def test_any_shape_and_tile(chunk: Any, widest: int, **settings: Any) -> None:
    few = 7 * 5 * 16 if widest == 7 else budget.CPU_BYTES
    with mock.patch.object(budget, "_CPU_COLUMNS", widest), mock.patch.object(budget, "CPU_BYTES", few):
        check_logprobs(Case(**settings, bias=True), chunk=chunk)


NLL_GRID = list(
    itertools.product(
        (False, True), (0.0, 0.02, 0.5, 1.1), (None, 90), (0.0, 0.1), (0.0, 0.01), (False, True), ("auto", 7)
    )
)


@pytest.mark.parametrize("one_in", [19, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("mean", [False, True])
def test_cross_entropy(dtype: torch.dtype, softcap: float | None, mean: bool, one_in: int) -> None:
    first = 4 * (dtype == torch.float64) + 2 * (softcap is None) + mean  # others of the grid each time
    for bias, ignored, valid, smoothing, z_loss, weighted, chunk in NLL_GRID[first % one_in :: one_in]:
        case = Case(
            dtype=dtype, bias=bias, ignored=ignored, valid_vocab_size=valid, softcap=softcap,
            temperature=0.7, logit_scale=1.3,
        )  # fmt: skip
        leaves, targets = case.tensors()
        weights = torch.rand(case.tokens, dtype=dtype) * (torch.arange(case.tokens) % 5 > 0)
        options: dict[str, Any] = {
            "label_smoothing": smoothing,
            "z_loss": z_loss,
            "token_weights": weights if weighted else None,
            "reduction": "mean" if mean else "sum",
            "chunk": chunk,
            **case.kwargs(leaves),
        }
        loss = fused_linear_cross_entropy(leaves[0], leaves[1], targets, **options)
        ours = torch.autograd.grad(loss * 3.0, leaves)
        with torch.no_grad():  # the path without gradients is another one
            plain = fused_linear_cross_entropy(leaves[0], leaves[1], targets, **options)
        leaves64, counts = wide(leaves), targets != -100
        z = case.logits(leaves64)
        each = F.cross_entropy(z, targets, reduction="none", label_smoothing=smoothing)
        each = (each + z_loss * z.logsumexp(-1).square() * counts) * (weights.double() if weighted else 1.0)
        expected = each.sum() / (counts.sum().clamp_min(1) if mean else 1)
        theirs = torch.autograd.grad(expected * 3.0, leaves64)
        for a, b in zip([loss, plain, *ours], [expected, expected, *theirs], strict=True):
            assert relative(a, b) < TOLERANCE[dtype] / 2, (case, options)


GRID = list(
    itertools.product(
        (False, True), (0.02, 0.5), (None, 90), (None, 5.0), (1.0, 0.3), ("auto", 7), ["sum", "mean"]
    )
)


@pytest.mark.parametrize("one_in", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_distillation(dtype: torch.dtype, kind: Any, one_in: int) -> None:
    first = 3 * (dtype == torch.float64) + DIVERGENCES.index(kind)
    for bias, ignored, valid, softcap, alpha, chunk, reduction in GRID[first % one_in :: one_in]:
        case = Case(
            dtype=dtype, bias=bias, ignored=ignored, valid_vocab_size=valid, softcap=softcap, logit_scale=1.3
        )
        (leaves, targets), taught = case.tensors(), case.teacher()
        weights = torch.rand(case.tokens, dtype=dtype)
        options: dict[str, Any] = {"alpha": alpha, "beta": 0.3, "teacher_softcap": 4.0, "chunk": chunk}
        options |= {**case.kwargs(leaves), "temperature": 1.7, "reduction": reduction}
        loss = fused(kind, leaves, targets, taught, token_weights=weights, **options)
        ours = torch.autograd.grad(loss * 3.0, leaves)
        leaves64, counts = wide(leaves), targets != -100
        z, teacher = case.logits(leaves64), (taught[0].double() @ taught[1].double().T)[:, :valid]
        soft = divergence(z / 1.7, 4.0 * torch.tanh(teacher / 4.0) / 1.7, kind, 0.3)
        each = alpha * soft + (1 - alpha) * F.cross_entropy(z, targets, reduction="none")
        expected = (torch.where(counts, each, 0.0) * weights.double()).sum()
        expected = expected / (counts.sum() if reduction == "mean" else 1)
        theirs = torch.autograd.grad(expected * 3.0, leaves64)
        for a, b in zip([loss, *ours], [expected, *theirs], strict=True):
            assert relative(a, b) < TOLERANCE[dtype], (case, options)
    if valid is not None:  # a teacher whose vocabulary is padded differently
        other = fused(kind, leaves, targets, (taught[0], taught[1][:95]), token_weights=weights, **options)
        torch.testing.assert_close(other, loss)


def test_rows_select_tokens_in_their_order() -> None:
    leaves, targets = Case(ignored=0.3).tensors()
    everything = fused_linear_logprobs(leaves[0], leaves[1], targets)
    mask = torch.zeros(len(targets), dtype=torch.bool)
    mask[[3, 7, 50]] = True
    for rows in (torch.tensor([7, 3, 3, 50]), mask):
        some = fused_linear_logprobs(leaves[0], leaves[1], targets, rows=rows)
        for all_, picked in zip(everything, some, strict=True):
            torch.testing.assert_close(picked, all_[rows])
        a, b = (
            torch.autograd.grad(x.sum(), leaves, retain_graph=True) for x in (some[0], everything[0][rows])
        )
        torch.testing.assert_close(a, b)


def test_a_number_of_loss_tokens_known_on_the_host_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_thd.loss.prepare._WAITS", {"cpu"})
    leaves, targets = Case(ignored=0.5).tensors()
    count = 16  # CPUs multiply the rows of an incomplete block of 8 by other code, which rounds otherwise
    targets = targets.masked_fill((targets != -100).cumsum(0) > count, -100)
    call = LossArgs(hidden=leaves[0], weight=leaves[1], targets=targets)
    found = []
    for loss_tokens in (None, count, count + 8):
        given = replace(call, loss_tokens=loss_tokens)
        loss = linear_nll(given, Penalties(), token_weights=None)
        logp = linear_logprobs(given, entropy=False).logp
        found.append((loss, logp, *torch.autograd.grad(loss + logp.square().sum(), leaves)))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    with pytest.raises(RuntimeError, match="more targets count than the 15"):
        linear_nll(replace(call, loss_tokens=15), Penalties(), token_weights=None)


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_that_are_kept_checkpointed_frozen_or_differentiated_twice(kind: str) -> None:
    case = Case(bias=True, ignored=0.3)
    (leaves, targets), taught = case.tensors(), case.teacher()
    versions = [tensor._version for tensor in (*leaves, targets)]
    loss = fused(kind, leaves, targets, taught)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    for a, b in zip(torch.autograd.grad(loss * 5.0, leaves, retain_graph=True), kept, strict=True):
        torch.testing.assert_close(a, b * 5.0)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))  # handed out, so the caller's
    assert versions == [tensor._version for tensor in (*leaves, targets)]
    with pytest.raises(RuntimeError, match=r"fused_linear_\w+ was .*create_graph=True.*keeps no logits"):
        torch.autograd.grad(loss, leaves, create_graph=True)
    for reentrant in (False, True):  # torch.utils.checkpoint hands saved tensors out a single time
        again = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        run = partial(lambda *given: fused(kind, list(given), targets, taught))
        checkpoint(run, *again, use_reentrant=reentrant).backward()
        assert all(torch.equal(leaf.grad, b) for leaf, b in zip(again, kept, strict=True))
    for i in range(3):
        frozen = [leaf.detach().requires_grad_(i == j) for j, leaf in enumerate(leaves)]
        fused(kind, frozen, targets, taught).backward()
        torch.testing.assert_close(
            [leaf.grad for leaf in frozen], [kept[j] if i == j else None for j in range(3)]
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize("kind", KINDS)
def test_inside_a_compiled_function(kind: str) -> None:
    case = Case(dtype=torch.float32, ignored=0.4)
    (leaves, targets), taught = case.tensors(), case.teacher()

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return fused(kind, [hidden * 2.0, weight], targets, taught) * 1.5

    compiled = torch.compile(loss, backend="aot_eager")
    torch.testing.assert_close(*(torch.autograd.grad(f(*leaves), leaves) for f in (compiled, loss)))


@pytest.mark.parametrize("kind", KINDS)
def test_no_logits_are_made(kind: str) -> None:
    case = Case(tokens=4096, width=8, vocabulary=6000, dtype=torch.float32)
    (leaves, targets), taught = case.tensors(), case.teacher()
    with Largest() as seen:
        fused(kind, leaves, targets, taught, chunk=256).backward()
    assert 0 < seen.largest <= 256 * 6000 * 4 * 2  # the logits would take 98 MB
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        fused(kind, leaves, targets, taught)
    assert counter.get_total_flops() <= 2 * 4096 * 6000 * (8 + taught[0].shape[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision_gradients(kind: str, dtype: torch.dtype, autocast: bool) -> None:
    case = Case(dtype=dtype, width=64, vocabulary=300, tokens=700)
    (leaves, targets), taught = case.tensors(), case.teacher(32)
    with torch.no_grad():
        leaves[1].mul_(0.3)
    leaves64, scale = wide(leaves), 2.0**10 / case.tokens
    exact = whole(kind, case, leaves64, targets, tuple(x.double() for x in taught))
    theirs = torch.autograd.grad(exact * scale, leaves64)
    naive = torch.autograd.grad(whole(kind, case, leaves, targets, taught) * scale, leaves)
    if autocast:
        leaves = [x.detach().float().requires_grad_() for x in leaves]
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        loss = fused(kind, leaves, targets, taught, chunk=64)
        ours = torch.autograd.grad(loss * scale, leaves)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    for a, b, c in zip(ours, theirs, naive, strict=True):
        assert a.dtype == leaves[0].dtype
        assert relative(a, b) < max(2.0 * relative(c, b), 2e-3)  # eleven tiles of rows, each rounded


def test_bf16_is_exact_to_a_hundredth_where_a_rounded_product_is_not() -> None:
    torch.manual_seed(0)
    hidden = (torch.randn(256, 128) * 2).bfloat16()
    weight = torch.randn(2000, 128).bfloat16()
    targets = torch.randint(0, 2000, (256,))
    exact = -F.cross_entropy(hidden.double() @ weight.double().T, targets, reduction="none")
    rounded = -F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="none")
    ours = fused_linear_logprobs(hidden, weight, targets).logp
    assert (rounded.double() - exact).abs().max() > 0.05
    assert (ours.double() - exact).abs().max() < 1e-2


@pytest.mark.parametrize(("vocabulary", "chunk"), [(300, 64), (4500, 16), (5000, 1)])
def test_bf16_gradients_of_the_weight_are_summed_in_fp32(vocabulary: int, chunk: int) -> None:
    case = Case(tokens=64 * chunk, vocabulary=vocabulary, dtype=torch.bfloat16)
    leaves, targets = case.tensors()
    leaves64 = wide(leaves)
    losses = (
        fused_linear_cross_entropy(leaves[0], leaves[1], targets, chunk=chunk),
        F.cross_entropy(F.linear(*leaves).float(), targets, reduction="sum"),
        F.cross_entropy(F.linear(*leaves64), targets, reduction="sum"),
    )
    of = (leaves[1], leaves[1], leaves64[1])
    found, naive, exact = (torch.autograd.grad(loss, w)[0] for loss, w in zip(losses, of, strict=True))
    assert found.dtype == torch.bfloat16
    assert found.untyped_storage().nbytes() == found.numel() * 2
    # One product over all tokens is added up in fp32, too; rounding once a tile gave 2 to 9 times its error.
    assert relative(found, exact) < 1.2 * relative(naive, exact)


def test_an_impossible_target_costs_infinity_with_a_finite_gradient() -> None:
    leaves, targets = Case(tokens=5, bias=True).tensors()
    with torch.no_grad():
        leaves[2][targets[2]] = -INF
    theirs = F.cross_entropy(F.linear(*leaves), targets, reduction="sum")
    wanted = torch.autograd.grad(theirs, leaves)
    for loss in (
        fused_linear_cross_entropy(leaves[0], leaves[1], targets, bias=leaves[2]),
        -fused_linear_logprobs(leaves[0], leaves[1], targets, bias=leaves[2]).logp.sum(),
    ):
        assert loss.item() == theirs.item() == INF
        torch.testing.assert_close(torch.autograd.grad(loss, leaves), wanted)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.sampled_from([0, 1, 7]),
    vocabulary=st.sampled_from([1, 2, 33]),
    scale=st.sampled_from([1e-30, 1.0, 1e3, 1e30]),
    dead=st.sampled_from(["none", "first tile", "all but one", "targets too"]),
    ignored=st.sampled_from(["none", "some", "all"]),
    poison=st.sampled_from([0.0, math.nan, INF]),
    static=st.booleans(),
    chunk=st.sampled_from(["auto", 3]),
    seed=st.integers(0, 100),
)
def test_extremes_equal_all_logits(
    tokens: int, vocabulary: int, scale: float, dead: str, ignored: str, poison: float, static: bool,
    chunk: Any, seed: int,
) -> None:  # fmt: skip
    case = Case(tokens=tokens, width=4, vocabulary=vocabulary, bias=True, seed=seed)
    leaves, targets = case.tensors()
    with torch.no_grad():
        leaves[0].mul_(scale)
        leaves[2].zero_()
        if dead != "none":
            leaves[2][: vocabulary // 2 if dead == "first tile" else vocabulary - 1] = -INF
        if dead in ("first tile", "all but one"):
            targets = torch.full_like(targets, vocabulary - 1)
        if ignored != "none":
            mask = torch.arange(tokens) % (1 if ignored == "all" else 3) == 0
            targets[mask] = -100
            leaves[0][mask] = poison
    clean = [leaves[0].detach().nan_to_num(0.0, 0.0).requires_grad_(), *leaves[1:]]
    wanted = case.logprobs(clean, targets)
    with static_shapes() if static else torch.enable_grad():
        found = fused_linear_logprobs(leaves[0], leaves[1], targets, bias=leaves[2], chunk=chunk)
        loss = fused_linear_cross_entropy(leaves[0], leaves[1], targets, bias=leaves[2], chunk=chunk)
    torch.testing.assert_close((found.logp, found.entropy, loss), (*wanted[:2], -wanted[0].sum()))
    if loss.isfinite():
        theirs = torch.autograd.grad(-wanted[0].sum() + wanted[1].sum(), clean)
        ours = torch.autograd.grad(loss + found.entropy.sum(), leaves)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b.nan_to_num(0.0), rtol=1e-6, atol=1e-9 * max(1.0, scale))


@pytest.fixture
def memory_of_nan() -> Iterator[None]:
    """Fill memory that nobody wrote with NaN, as deterministic algorithms do."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 6])
@pytest.mark.parametrize("vocabulary", [3, 5000])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("static", [False, True])
def test_a_pack_without_any_target_gives_zeros(
    static: bool, kind: str, dtype: torch.dtype, tokens: int, vocabulary: int, memory_of_nan: None
) -> None:
    """No product runs, or all rows are zeros: gradients must not be what stood in memory, nor infinite."""
    case = Case(tokens=tokens, vocabulary=vocabulary, dtype=dtype, bias=True, ignored=1.1)
    leaves, targets = case.tensors()
    taught = torch.where(torch.arange(vocabulary) == 1, -INF, leaves[2].detach())
    options = {"teacher_bias": taught} if kind in DIVERGENCES else {}
    with static_shapes() if static else torch.enable_grad():
        loss = fused(kind, leaves, targets, case.teacher(), **options)
    assert loss.item() == 0.0
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("poison", [math.nan, INF])
def test_rows_that_do_not_count_touch_nothing(kind: str, static: bool, poison: float) -> None:
    """Rows without a target or of weight 0; columns of -inf are there for student and teacher."""
    case = Case(bias=True, ignored=0.3, tokens=90)
    (leaves, targets), (taught, head) = case.tensors(), case.teacher()
    with torch.no_grad():
        leaves[2].zero_()[:60] = -INF
    targets = torch.where(targets >= 0, targets % 41 + 60, targets)
    weights = (torch.arange(case.tokens) % 3).double()
    kept = (targets != -100) & ((weights > 0) | (kind == "logprobs"))
    options: dict[str, Any] = (
        {"teacher_bias": leaves[2].detach(), "alpha": 0.5} if kind in DIVERGENCES else {}
    )

    def run(hidden: Tensor, taught: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        own = {} if kind == "logprobs" else {"token_weights": weights[rows]}
        loss = fused(kind, [hidden, *leaves[1:]], targets[rows], (taught, head), **options, **own)
        return loss, *torch.autograd.grad(loss, (hidden, leaves[1]))

    rows = kept.nonzero().squeeze(1)
    wanted = run(leaves[0].detach()[kept].requires_grad_(), taught[kept], rows)
    poisoned = [torch.where(kept[:, None], x, poison) for x in (leaves[0].detach(), taught)]
    with static_shapes() if static else torch.enable_grad():
        found = run(poisoned[0].requires_grad_(), poisoned[1], torch.arange(case.tokens))
    torch.testing.assert_close((found[0], found[1][kept], found[2]), wanted)
    assert not found[1][~kept].any()
    assert wanted[2].isfinite().all()


# ---- Ranks that share the vocabulary

RANK_CASES = [
    Case(vocabulary=100),
    Case(vocabulary=100, dtype=torch.float32, ignored=0.4, softcap=5.0, temperature=0.7),
    Case(vocabulary=100, bias=True, ignored=0.02),
    Case(vocabulary=100, valid_vocab_size=30, tokens=300),  # the last ranks hold padding alone
]


class Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[func._opname] += 1
        return func(*args, **(kwargs or {}))


def shards(leaves: list[Tensor]) -> list[Tensor]:
    """The hidden states whole, and this rank's rows of weight and bias."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = [leaves[0], *(leaf.chunk(ranks)[rank] for leaf in leaves[1:])]
    return [part.detach().clone().requires_grad_() for part in parts]


def over_ranks() -> tuple[float, list[Counter[str]]]:
    """Return the largest error here, and the collectives of log-probabilities in both passes."""
    errors, calls = [], []
    for case, kind, chunk in itertools.product(RANK_CASES, KINDS, ("auto", 20)):
        full, targets = case.tensors()
        local, taught = shards(full), case.teacher()
        own = (taught[0], taught[1].chunk(dist.get_world_size())[dist.get_rank()])
        how: dict[str, Any] = {**case.kwargs(local), "tp_group": dist.group.WORLD, "chunk": chunk}
        with Collectives() as forward, mock.patch("lightning_thd.loss.linear_nll._CPU_STASH_BYTES", 2**16):
            loss = fused(kind, local, targets, own, **how)
        with Collectives() as backward:
            ours = torch.autograd.grad(loss, local)
        calls += [forward.calls, backward.calls] if kind == "logprobs" else []
        leaves64 = wide(full)
        wanted = whole(kind, case, leaves64, targets, tuple(x.double() for x in taught))
        theirs = [wanted, *shards(list(torch.autograd.grad(wanted, leaves64)))]
        found = [relative(a, b) for a, b in zip([loss, *ours], theirs, strict=True)]
        errors.append(max(found) * (1.0 if case.dtype == torch.float64 else 1e-6))
    errors += list(at_the_edges())
    return max(errors), calls


def at_the_edges() -> Iterator[float]:
    """A shard that is -inf as a whole, a NaN row without a target, the shapes 0 and 1; penalties."""
    for tokens, dead, scale in ((7, 0, 1.0), (7, 1, 1.0), (1, 0, 1e30), (0, 1, 1.0)):
        case = Case(tokens=tokens, vocabulary=40, bias=True)
        leaves, targets = case.tensors()
        with torch.no_grad():
            leaves[0].mul_(scale)
            leaves[2].zero_()[20 * dead : 20 * dead + 20] = -INF
        targets = targets % 20 + 20 * (1 - dead)
        targets[3:4] = -100
        wanted = case.logprobs(leaves, targets)
        theirs = shards(list(torch.autograd.grad((wanted[0] + wanted[1]).sum(), leaves)))
        local = shards(leaves)
        with torch.no_grad():
            local[0][targets == -100] = math.nan
        how: Any = {"bias": local[2], "tp_group": dist.group.WORLD}
        found = fused_linear_logprobs(local[0], local[1], targets, **how)
        loss = fused_linear_cross_entropy(local[0], local[1], targets, **how)
        ours = torch.autograd.grad((found.logp + found.entropy).sum(), local)
        yield from map(relative, (*found[:2], loss, *ours), (*wanted[:2], -wanted[0].sum(), *theirs))
    case = Case(vocabulary=100, ignored=0.3)
    full, targets = case.tensors()
    local, z, counts = shards(full), case.logits(full), targets != -100
    options: Any = {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": "mean", "tp_group": dist.group.WORLD}
    loss = fused_linear_cross_entropy(local[0], local[1], targets, **options)
    expected = F.cross_entropy(z, targets, label_smoothing=0.1)
    expected = expected + 0.01 * (z.logsumexp(-1).square() * counts).sum() / counts.sum()
    yield relative(loss, expected)
    yield relative(*(torch.autograd.grad(x, y[0])[0] for x, y in ((loss, local), (expected, full))))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_share_the_vocabulary_equal_one(world: int) -> None:
    for worst, calls in run_ranks(over_ranks, world):
        assert worst < 1e-11
        assert calls == [{"_allgather_base_": 1}, {"allreduce_": 1}] * (2 * len(RANK_CASES))


def with_a_dtensor() -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    errors, case = [], Case(tokens=6, vocabulary=40)
    (leaves, targets), taught = case.tensors(), case.teacher()
    for (name, whole_hidden, group), kind in itertools.product(
        (("tp", False, None), ("x", True, None), ("x", False, dist.group.WORLD)), ("nll", "logprobs")
    ):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(name,))
        weight = distribute_tensor(leaves[1].detach(), mesh, [Shard(0)]).requires_grad_()
        hidden: Any = leaves[0].detach().clone()
        hidden = distribute_tensor(hidden, mesh, [Replicate()]) if whole_hidden else hidden
        hidden.requires_grad_()
        fused(kind, [hidden, weight], targets, taught, tp_group=group).backward()
        wanted = torch.autograd.grad(whole(kind, case, leaves, targets, taught), leaves)
        for leaf, gradient in zip((hidden, weight), wanted, strict=True):
            found: Any = leaf.grad
            errors.append(relative(found.full_tensor() if hasattr(found, "full_tensor") else found, gradient))
    return errors


def test_a_distributed_weight_gives_the_numbers_of_one_process() -> None:
    for errors in run_ranks(with_a_dtensor, 2):
        assert len(errors) == 12
        assert max(errors) < 1e-12


def unequal() -> None:
    weight = torch.randn(50 + dist.get_rank(), 8)
    fused_linear_logprobs(torch.randn(4, 8), weight, torch.arange(4), tp_group=dist.group.WORLD)


def test_unequal_shards_are_refused() -> None:
    with pytest.raises(RankError, match=r"hold \[50, 51\] rows of the head's weight, wanted the same number"):
        run_ranks(unequal, 2)
