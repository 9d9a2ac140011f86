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
from lightning_thd.loss.arguments import LossArgs
from lightning_thd.loss.linear_logprobs import linear_logprobs
from lightning_thd.loss.linear_nll import linear_nll
from lightning_thd.loss.tiles import logits
from lightning_thd.loss.tiles.nll import Penalties
from tests.loss.oracles import Case, Largest, relative, wide
from tests.ranks import RankError, run_ranks

INF = math.inf
DIVERGENCES = ("kl", "reverse_kl", "jsd")
KINDS = ("nll", "logprobs", *DIVERGENCES)
# fp32 sums of a hundred terms; fp64 is there to find wrong formulas
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}


def divergence(z: Tensor, teacher: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """The divergence of every token from the logits of student and teacher."""
    q = z.softmax(-1)
    p = teacher.softmax(-1)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(a > 0, a * (a.log() - b.log()), 0.0).sum(-1)

    if kind == "kl":
        return kl(p, q)
    if kind == "reverse_kl":
        return kl(q, p)
    middle = beta * p + (1 - beta) * q
    return beta * kl(p, middle) + (1 - beta) * kl(q, middle)


def fused(
    kind: str, leaves: list[Any], targets: Tensor, teacher: tuple[Tensor, Tensor], **options: Any
) -> Tensor:
    """Compute one number that depends on all outputs of a fused loss."""
    options = {"bias": leaves[2] if len(leaves) > 2 else None, **options}
    if kind == "nll":
        return fused_linear_cross_entropy(leaves[0], leaves[1], targets, **options)
    if kind == "logprobs":
        result = fused_linear_logprobs(leaves[0], leaves[1], targets, **options)
        return (result.logp - 0.3 * result.entropy + 0.1 * result.lse).sum()
    options |= {"teacher_hidden": teacher[0], "teacher_weight": teacher[1], "kind": kind}
    return fused_linear_distillation(leaves[0], leaves[1], targets, **options)


def whole(
    kind: str, case: Case, leaves: list[Tensor], targets: Tensor, teacher: tuple[Tensor, Tensor]
) -> Tensor:
    """Compute the same number as ``fused`` from all logits, in fp32 or fp64."""
    logp, entropy, lse = case.logprobs(leaves, targets)
    if kind == "nll":
        return -logp.sum()
    if kind == "logprobs":
        return (logp - 0.3 * entropy + 0.1 * lse).sum()

    z = case.logits(leaves)
    teacher_z = (teacher[0] @ teacher[1].T / case.temperature)[:, : case.valid_vocab_size]
    if z.itemsize < 4:
        z = z.float()
    if teacher_z.itemsize < 4:
        teacher_z = teacher_z.float()
    return divergence(z, teacher_z, kind)[targets != -100].sum()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(
    ("dtype", "use"),
    [(torch.float32, (0, 1, 2)), *((torch.float64, use) for use in ((0,), (1,), (2,), (0, 1, 2)))],
)
def test_log_probabilities(dtype: torch.dtype, softcap: float | None, use: tuple[int, ...]) -> None:
    """Outputs, and gradients of any of them, equal those of all logits, over options of the head."""
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
    gradients = torch.autograd.grad(sum((upstream[i] * results[i]).sum() for i in use), leaves)

    leaves64 = wide(leaves)
    exact = case.logprobs(leaves64, targets)
    total = sum((upstream[i].double() * exact[i]).sum() for i in use)
    exact_gradients = torch.autograd.grad(total, leaves64)

    for a, b in zip([*results, *gradients], [*exact, *exact_gradients], strict=True):
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
    """Shapes that no tile divides, and tiles of any number of rows and columns, change nothing."""
    tile_bytes = 7 * 5 * 16 if widest == 7 else logits._CPU_BYTES
    columns = mock.patch.object(logits, "_CPU_COLUMNS", widest)
    with columns, mock.patch.object(logits, "_CPU_BYTES", tile_bytes):
        check_logprobs(Case(**settings, bias=True), chunk=chunk)


# bias, share of ignored targets, valid_vocab_size, label_smoothing, z_loss, weighted, chunk
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
    """Loss and gradient equal those of all logits, over a part of the grid (the whole if slow)."""
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
        gradients = torch.autograd.grad(loss * 3.0, leaves)
        with torch.no_grad():  # the path without gradients is another one
            evaluated = fused_linear_cross_entropy(leaves[0], leaves[1], targets, **options)

        leaves64 = wide(leaves)
        has_target = targets != -100
        z = case.logits(leaves64)
        losses = F.cross_entropy(z, targets, reduction="none", label_smoothing=smoothing)
        losses = losses + z_loss * z.logsumexp(-1).square() * has_target
        if weighted:
            losses = losses * weights.double()
        expected = losses.sum()
        if mean:
            expected = expected / has_target.sum().clamp_min(1)
        exact_gradients = torch.autograd.grad(expected * 3.0, leaves64)

        ours = [loss, evaluated, *gradients]
        for a, b in zip(ours, [expected, expected, *exact_gradients], strict=True):
            assert relative(a, b) < TOLERANCE[dtype] / 2, (case, options)


# bias, share of ignored targets, valid_vocab_size, softcap, alpha, chunk, reduction
GRID = list(
    itertools.product(
        (False, True), (0.02, 0.5), (None, 90), (None, 5.0), (1.0, 0.3), ("auto", 7), ["sum", "mean"]
    )
)


@pytest.mark.parametrize("one_in", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_distillation(dtype: torch.dtype, kind: Any, one_in: int) -> None:
    """Loss and gradient equal those of both models' logits, over a part of the grid (the whole if slow)."""
    first = 3 * (dtype == torch.float64) + DIVERGENCES.index(kind)
    for bias, ignored, valid, softcap, alpha, chunk, reduction in GRID[first % one_in :: one_in]:
        case = Case(
            dtype=dtype, bias=bias, ignored=ignored, valid_vocab_size=valid, softcap=softcap, logit_scale=1.3
        )
        leaves, targets = case.tensors()
        teacher = case.teacher()
        weights = torch.rand(case.tokens, dtype=dtype)
        options: dict[str, Any] = {
            **case.kwargs(leaves),
            "alpha": alpha,
            "beta": 0.3,
            "temperature": 1.7,
            "teacher_softcap": 4.0,
            "token_weights": weights,
            "reduction": reduction,
            "chunk": chunk,
        }
        loss = fused(kind, leaves, targets, teacher, **options)
        gradients = torch.autograd.grad(loss * 3.0, leaves)

        leaves64 = wide(leaves)
        has_target = targets != -100
        z = case.logits(leaves64)
        teacher_z = (teacher[0].double() @ teacher[1].double().T)[:, :valid]
        soft = divergence(z / 1.7, 4.0 * torch.tanh(teacher_z / 4.0) / 1.7, kind, 0.3)
        losses = alpha * soft + (1 - alpha) * F.cross_entropy(z, targets, reduction="none")
        expected = (torch.where(has_target, losses, 0.0) * weights.double()).sum()
        if reduction == "mean":
            expected = expected / has_target.sum()
        exact_gradients = torch.autograd.grad(expected * 3.0, leaves64)

        for a, b in zip([loss, *gradients], [expected, *exact_gradients], strict=True):
            assert relative(a, b) < TOLERANCE[dtype], (case, options)

    if valid is not None:  # a teacher whose vocabulary is padded differently
        other = fused(kind, leaves, targets, (teacher[0], teacher[1][:95]), **options)
        torch.testing.assert_close(other, loss)


@pytest.mark.parametrize("columns", [32, 2048])
@pytest.mark.parametrize("kind", ["reverse_kl", "jsd"])
def test_divergences_keep_fp32_if_one_token_is_nearly_certain(
    kind: Any, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The g of such a token and the sum of ``e^s g`` are nearly equal; their difference is the gradient."""
    monkeypatch.setattr(logits, "_CPU_COLUMNS", columns)  # of a tile
    torch.manual_seed(0)
    vocabulary = 101
    rows = 6
    student = torch.randn(rows, vocabulary)
    student[:, 40] = torch.linspace(5.0, 17.0, rows)
    teacher = torch.randn(rows, vocabulary)
    whole_vocabulary = torch.eye(vocabulary)  # a head whose hidden states are logits

    leaf = student.clone().requires_grad_()
    loss = fused_linear_distillation(
        leaf,
        whole_vocabulary,
        torch.zeros(rows, dtype=torch.int64),
        teacher_hidden=teacher,
        teacher_weight=whole_vocabulary,
        kind=kind,
    )
    (dx,) = torch.autograd.grad(loss, leaf)

    leaf64 = student.double().requires_grad_()
    (expected,) = torch.autograd.grad(divergence(leaf64, teacher.double(), kind).sum(), leaf64)
    errors = (dx.double() - expected).abs().amax(1) / expected.abs().amax(1)
    # A logit of 17 has a rounding of 1e-6, and so has each probability.
    assert float(errors.max()) < 5e-6, errors


def test_rows_select_tokens_in_their_order() -> None:
    """``rows=``, as indices or as a mask, gives the values and gradients of these rows of all."""
    leaves, targets = Case(ignored=0.3).tensors()
    of_all = fused_linear_logprobs(leaves[0], leaves[1], targets)
    mask = torch.zeros(len(targets), dtype=torch.bool)
    mask[[3, 7, 50]] = True
    for rows in (torch.tensor([7, 3, 3, 50]), mask):
        of_rows = fused_linear_logprobs(leaves[0], leaves[1], targets, rows=rows)
        for values, values_of_all in zip(of_rows, of_all, strict=True):
            torch.testing.assert_close(values, values_of_all[rows])

        gradients = torch.autograd.grad(of_rows.logp.sum(), leaves)
        expected = torch.autograd.grad(of_all.logp[rows].sum(), leaves, retain_graph=True)
        torch.testing.assert_close(gradients, expected)


def test_a_number_of_loss_tokens_known_on_the_host_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upper bound of the targets gives the same bits; too low a bound is refused."""
    monkeypatch.setattr("lightning_thd.loss.arguments._WAITS", {"cpu"})
    leaves, targets = Case(ignored=0.5).tensors()
    count = 16  # CPUs multiply the rows of an incomplete block of 8 by other code, which rounds otherwise
    targets = targets.masked_fill((targets != -100).cumsum(0) > count, -100)
    arguments = LossArgs(hidden=leaves[0], weight=leaves[1], targets=targets)
    results = []

    for loss_tokens in (None, count, count + 8):
        with_bound = replace(arguments, loss_tokens=loss_tokens)
        loss = linear_nll(with_bound, Penalties(), token_weights=None)
        logp = linear_logprobs(with_bound, entropy=False).logp
        results.append((loss, logp, *torch.autograd.grad(loss + logp.square().sum(), leaves)))

    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="more targets count than the 15"):
        linear_nll(replace(arguments, loss_tokens=15), Penalties(), token_weights=None)


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_that_are_kept_checkpointed_frozen_or_differentiated_twice(kind: str) -> None:
    """A kept graph gives its gradients again, scaled; checkpoints give them too, and frozen leaves none."""
    case = Case(bias=True, ignored=0.3)
    leaves, targets = case.tensors()
    teacher = case.teacher()
    versions = [tensor._version for tensor in (*leaves, targets)]
    loss = fused(kind, leaves, targets, teacher)
    gradients = torch.autograd.grad(loss, leaves, retain_graph=True)
    copies = [gradient.clone() for gradient in gradients]

    scaled = torch.autograd.grad(loss * 5.0, leaves, retain_graph=True)
    for a, b in zip(scaled, copies, strict=True):
        torch.testing.assert_close(a, b * 5.0)
    torch.testing.assert_close(list(gradients), copies, rtol=0, atol=0)  # they are the caller's
    assert versions == [tensor._version for tensor in (*leaves, targets)]
    with pytest.raises(RuntimeError, match=r"fused_linear_\w+ was .*create_graph=True.*keeps no logits"):
        torch.autograd.grad(loss, leaves, create_graph=True)

    for reentrant in (False, True):  # torch.utils.checkpoint hands saved tensors out a single time
        checkpointed = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        run = partial(lambda *arguments: fused(kind, list(arguments), targets, teacher))
        checkpoint(run, *checkpointed, use_reentrant=reentrant).backward()
        torch.testing.assert_close([leaf.grad for leaf in checkpointed], copies, rtol=0, atol=0)

    for trained in range(3):
        frozen = [leaf.detach().requires_grad_(i == trained) for i, leaf in enumerate(leaves)]
        fused(kind, frozen, targets, teacher).backward()
        expected = [copies[i] if i == trained else None for i in range(3)]
        torch.testing.assert_close([leaf.grad for leaf in frozen], expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize("kind", KINDS)
def test_inside_a_compiled_function(kind: str) -> None:
    """A fused loss between compiled operators has the gradients of the eager function."""
    case = Case(dtype=torch.float32, ignored=0.4)
    leaves, targets = case.tensors()
    teacher = case.teacher()

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return fused(kind, [hidden * 2.0, weight], targets, teacher) * 1.5

    compiled = torch.compile(loss, backend="aot_eager")
    gradients = torch.autograd.grad(compiled(*leaves), leaves)
    torch.testing.assert_close(gradients, torch.autograd.grad(loss(*leaves), leaves))


@pytest.mark.parametrize("kind", KINDS)
def test_no_logits_are_made(kind: str) -> None:
    """No tensor is larger than two tiles of 256 rows, and no product is computed twice."""
    case = Case(tokens=4096, width=8, vocabulary=6000, dtype=torch.float32)
    leaves, targets = case.tensors()
    teacher = case.teacher()
    with Largest() as tensors:
        fused(kind, leaves, targets, teacher, chunk=256).backward()
    assert 0 < tensors.largest <= 256 * 6000 * 4 * 2  # the logits would take 98 MB

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        fused(kind, leaves, targets, teacher)
    assert counter.get_total_flops() <= 2 * 4096 * 6000 * (8 + teacher[0].shape[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision_gradients(kind: str, dtype: torch.dtype, autocast: bool) -> None:
    """Gradients in bf16 and fp16 are as near to fp64 as those of all logits in the same dtype."""
    case = Case(dtype=dtype, width=64, vocabulary=300, tokens=700)
    leaves, targets = case.tensors()
    teacher = case.teacher(32)
    with torch.no_grad():
        leaves[1].mul_(0.3)
    scale = 2.0**10 / case.tokens  # small gradients would underflow in fp16

    leaves64 = wide(leaves)
    exact = whole(kind, case, leaves64, targets, tuple(x.double() for x in teacher))
    exact_gradients = torch.autograd.grad(exact * scale, leaves64)
    rounded_gradients = torch.autograd.grad(whole(kind, case, leaves, targets, teacher) * scale, leaves)
    if autocast:
        leaves = [x.detach().float().requires_grad_() for x in leaves]
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        loss = fused(kind, leaves, targets, teacher, chunk=64)
        gradients = torch.autograd.grad(loss * scale, leaves)

    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    for a, b, c in zip(gradients, exact_gradients, rounded_gradients, strict=True):
        assert a.dtype == leaves[0].dtype
        assert relative(a, b) < max(2.0 * relative(c, b), 2e-3)  # eleven tiles of rows, each rounded


def test_bf16_is_exact_to_a_hundredth_where_a_rounded_product_is_not() -> None:
    """Log-probabilities from bf16 inputs do not round the logits to bf16, as a product in torch does."""
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
    """The weight's gradient, added up over 64 tiles, is as near to fp64 as that of a single product."""
    case = Case(tokens=64 * chunk, vocabulary=vocabulary, dtype=torch.bfloat16)
    leaves, targets = case.tensors()
    leaves64 = wide(leaves)
    loss = fused_linear_cross_entropy(leaves[0], leaves[1], targets, chunk=chunk)
    gradient = torch.autograd.grad(loss, leaves[1])[0]
    loss = F.cross_entropy(F.linear(*leaves).float(), targets, reduction="sum")
    rounded = torch.autograd.grad(loss, leaves[1])[0]
    loss = F.cross_entropy(F.linear(*leaves64), targets, reduction="sum")
    exact = torch.autograd.grad(loss, leaves64[1])[0]

    assert gradient.dtype == torch.bfloat16
    assert gradient.untyped_storage().nbytes() == gradient.numel() * 2
    # One product over all tokens is added up in fp32, too; rounding once a tile gave 2 to 9 times its error.
    assert relative(gradient, exact) < 1.2 * relative(rounded, exact)


def test_an_impossible_target_costs_infinity_with_a_finite_gradient() -> None:
    """A target whose logit is -inf gives the loss and the gradient of torch's cross entropy."""
    leaves, targets = Case(tokens=5, bias=True).tensors()
    with torch.no_grad():
        leaves[2][targets[2]] = -INF
    torchs = F.cross_entropy(F.linear(*leaves), targets, reduction="sum")
    torchs_gradients = torch.autograd.grad(torchs, leaves)
    for loss in (
        fused_linear_cross_entropy(leaves[0], leaves[1], targets, bias=leaves[2]),
        -fused_linear_logprobs(leaves[0], leaves[1], targets, bias=leaves[2]).logp.sum(),
    ):
        assert loss.item() == torchs.item() == INF
        torch.testing.assert_close(torch.autograd.grad(loss, leaves), torchs_gradients)


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
    """Empty and tiny shapes, huge values, dead columns and poisoned ignored rows equal all logits."""
    case = Case(tokens=tokens, width=4, vocabulary=vocabulary, bias=True, seed=seed)
    leaves, targets = case.tensors()
    with torch.no_grad():
        leaves[0].mul_(scale)
        leaves[2].zero_()
        if dead != "none":
            num_dead = vocabulary // 2 if dead == "first tile" else vocabulary - 1
            leaves[2][:num_dead] = -INF
        if dead in ("first tile", "all but one"):
            targets = torch.full_like(targets, vocabulary - 1)
        if ignored != "none":
            mask = torch.arange(tokens) % (1 if ignored == "all" else 3) == 0
            targets[mask] = -100
            leaves[0][mask] = poison

    with static_shapes() if static else torch.enable_grad():
        result = fused_linear_logprobs(leaves[0], leaves[1], targets, bias=leaves[2], chunk=chunk)
        loss = fused_linear_cross_entropy(leaves[0], leaves[1], targets, bias=leaves[2], chunk=chunk)
    clean = [leaves[0].detach().nan_to_num(0.0, 0.0).requires_grad_(), *leaves[1:]]
    logp, entropy, _ = case.logprobs(clean, targets)
    torch.testing.assert_close((result.logp, result.entropy, loss), (logp, entropy, -logp.sum()))

    if loss.isfinite():
        gradients = torch.autograd.grad(loss + result.entropy.sum(), leaves)
        expected = torch.autograd.grad(-logp.sum() + entropy.sum(), clean)
        for a, b in zip(gradients, expected, strict=True):
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
    options = {}
    if kind in DIVERGENCES:
        options["teacher_bias"] = torch.where(torch.arange(vocabulary) == 1, -INF, leaves[2].detach())
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
    leaves, targets = case.tensors()
    teacher_hidden, teacher_weight = case.teacher()
    with torch.no_grad():
        leaves[2].zero_()[:60] = -INF
    targets = torch.where(targets >= 0, targets % 41 + 60, targets)
    weights = (torch.arange(case.tokens) % 3).double()
    counts = (targets != -100) & ((weights > 0) | (kind == "logprobs"))

    def run(hidden: Tensor, teacher_hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, and the gradients of hidden states and weight."""
        options: dict[str, Any] = {}
        if kind in DIVERGENCES:
            options |= {"teacher_bias": leaves[2].detach(), "alpha": 0.5}
        if kind != "logprobs":
            options["token_weights"] = weights[rows]
        teacher = (teacher_hidden, teacher_weight)
        loss = fused(kind, [hidden, *leaves[1:]], targets[rows], teacher, **options)
        of_hidden, of_weight = torch.autograd.grad(loss, (hidden, leaves[1]))
        return loss, of_hidden, of_weight

    hidden = leaves[0].detach()
    expected = run(hidden[counts].requires_grad_(), teacher_hidden[counts], counts.nonzero().squeeze(1))
    poisoned = torch.where(counts[:, None], hidden, poison).requires_grad_()
    poisoned_teacher = torch.where(counts[:, None], teacher_hidden, poison)
    with static_shapes() if static else torch.enable_grad():
        loss, of_hidden, of_weight = run(poisoned, poisoned_teacher, torch.arange(case.tokens))
    torch.testing.assert_close((loss, of_hidden[counts], of_weight), expected)
    assert not of_hidden[~counts].any()
    assert expected[2].isfinite().all()


# ---- Ranks that share the vocabulary

RANK_CASES = [
    Case(vocabulary=100),
    Case(vocabulary=100, dtype=torch.float32, ignored=0.4, softcap=5.0, temperature=0.7),
    Case(vocabulary=100, bias=True, ignored=0.02),
    Case(vocabulary=100, valid_vocab_size=30, tokens=300),  # the last ranks hold padding alone
]


class Collectives(TorchDispatchMode):
    """Counts the collectives that run inside it, by the names of their operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[func._opname] += 1
        return func(*args, **(kwargs or {}))


def shards(leaves: list[Tensor]) -> list[Tensor]:
    """The hidden states whole, and this rank's rows of weight and bias."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    parts = [leaves[0], *(leaf.chunk(ranks)[rank] for leaf in leaves[1:])]
    return [part.detach().clone().requires_grad_() for part in parts]


def over_ranks() -> tuple[float, list[Counter[str]]]:
    """Return the largest error here, and the collectives of log-probabilities in both passes."""
    errors = []
    calls = []
    for case, kind, chunk in itertools.product(RANK_CASES, KINDS, ("auto", 20)):
        full, targets = case.tensors()
        local = shards(full)
        teacher = case.teacher()
        local_teacher = (teacher[0], teacher[1].chunk(dist.get_world_size())[dist.get_rank()])
        options: dict[str, Any] = {**case.kwargs(local), "tp_group": dist.group.WORLD, "chunk": chunk}
        with Collectives() as forward, mock.patch("lightning_thd.loss.linear_nll._CPU_STASH_BYTES", 2**16):
            loss = fused(kind, local, targets, local_teacher, **options)
        with Collectives() as backward:
            gradients = torch.autograd.grad(loss, local)
        if kind == "logprobs":
            calls += [forward.calls, backward.calls]

        leaves64 = wide(full)
        exact = whole(kind, case, leaves64, targets, tuple(x.double() for x in teacher))
        exact_gradients = shards(list(torch.autograd.grad(exact, leaves64)))
        worst = max(map(relative, [loss, *gradients], [exact, *exact_gradients]))
        if case.dtype != torch.float64:
            worst *= 1e-6  # compared with the bound of fp64
        errors.append(worst)
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
        logp, entropy, _ = case.logprobs(leaves, targets)
        exact_gradients = shards(list(torch.autograd.grad((logp + entropy).sum(), leaves)))

        local = shards(leaves)
        with torch.no_grad():
            local[0][targets == -100] = math.nan
        shared: Any = {"bias": local[2], "tp_group": dist.group.WORLD}
        result = fused_linear_logprobs(local[0], local[1], targets, **shared)
        loss = fused_linear_cross_entropy(local[0], local[1], targets, **shared)
        gradients = torch.autograd.grad((result.logp + result.entropy).sum(), local)
        ours = (result.logp, result.entropy, loss, *gradients)
        yield from map(relative, ours, (logp, entropy, -logp.sum(), *exact_gradients))

    case = Case(vocabulary=100, ignored=0.3)
    full, targets = case.tensors()
    local = shards(full)
    options: Any = {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": "mean", "tp_group": dist.group.WORLD}
    loss = fused_linear_cross_entropy(local[0], local[1], targets, **options)
    z = case.logits(full)
    has_target = targets != -100
    expected = F.cross_entropy(z, targets, label_smoothing=0.1)
    expected = expected + 0.01 * (z.logsumexp(-1).square() * has_target).sum() / has_target.sum()
    yield relative(loss, expected)
    gradient = torch.autograd.grad(loss, local[0])[0]
    yield relative(gradient, torch.autograd.grad(expected, full[0])[0])


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_share_the_vocabulary_equal_one(world: int) -> None:
    """Every rank gets the losses and its part of the gradients of one process, by two collectives."""
    for worst, calls in run_ranks(over_ranks, world):
        assert worst < 1e-11
        assert calls == [{"_allgather_base_": 1}, {"allreduce_": 1}] * (2 * len(RANK_CASES))


def with_a_dtensor() -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    errors = []
    case = Case(tokens=6, vocabulary=40)
    leaves, targets = case.tensors()
    teacher = case.teacher()
    # (name of the mesh's axis, whether the hidden states are a DTensor too, tp_group)
    layouts = (("tp", False, None), ("x", True, None), ("x", False, dist.group.WORLD))
    for (name, is_distributed, group), kind in itertools.product(layouts, ("nll", "logprobs")):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(name,))
        weight = distribute_tensor(leaves[1].detach(), mesh, [Shard(0)]).requires_grad_()
        hidden: Any = leaves[0].detach().clone()
        if is_distributed:
            hidden = distribute_tensor(hidden, mesh, [Replicate()])
        hidden.requires_grad_()
        fused(kind, [hidden, weight], targets, teacher, tp_group=group).backward()

        expected = torch.autograd.grad(whole(kind, case, leaves, targets, teacher), leaves)
        for leaf, expected_gradient in zip((hidden, weight), expected, strict=True):
            gradient: Any = leaf.grad
            if hasattr(gradient, "full_tensor"):
                gradient = gradient.full_tensor()
            errors.append(relative(gradient, expected_gradient))
    return errors


def test_a_distributed_weight_gives_the_numbers_of_one_process() -> None:
    """A weight that is a DTensor over ranks has the gradients of a plain one."""
    for errors in run_ranks(with_a_dtensor, 2):
        assert len(errors) == 12
        assert max(errors) < 1e-12


def unequal() -> None:
    weight = torch.randn(50 + dist.get_rank(), 8)
    fused_linear_logprobs(torch.randn(4, 8), weight, torch.arange(4), tp_group=dist.group.WORLD)


def test_unequal_shards_are_refused() -> None:
    """Ranks with different numbers of rows of the head are refused, with these numbers."""
    with pytest.raises(RankError, match=r"hold \[50, 51\] rows of the head's weight, wanted the same number"):
        run_ranks(unequal, 2)
