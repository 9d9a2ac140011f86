"""Distillation without logits, against whole logits, TRL's GKD, and over ranks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from lightning_thd.loss import fused_linear_distillation, static_shapes
from tests.loss.oracles import Case, Largest, relative, wide
from tests.ranks import run_ranks

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}
KINDS = ["kl", "reverse_kl", "jsd"]


def divergence(z: Tensor, teacher: Tensor, kind: str, temperature: float, beta: float) -> Tensor:
    """From whole logits, by the definition."""
    q, p = ((x / temperature).softmax(-1) for x in (z, teacher))

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(a > 0, a * (a.log() - b.log()), 0.0).sum(-1)

    m = beta * p + (1 - beta) * q
    return {"kl": kl(p, q), "reverse_kl": kl(q, p), "jsd": beta * kl(p, m) + (1 - beta) * kl(q, m)}[kind]


def teacher_of(case: Case, width: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    hidden = torch.randn(case.tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(case.vocabulary, width, generator=generator, dtype=torch.float64) * 0.5
    return hidden.to(case.dtype), weight.to(case.dtype)


GRID = list(
    itertools.product(
        (False, True), (0.02, 0.5), (None, 90), (None, 5.0), (1.0, 0.3), ("auto", 7), ["sum", "mean"]
    )
)


@pytest.mark.parametrize("one_in", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradients(dtype: torch.dtype, kind: Any, one_in: int) -> None:
    first = 3 * (dtype == torch.float64) + KINDS.index(kind)  # others of the grid each time
    for bias, ignored, valid, softcap, alpha, chunk, reduction in GRID[first % one_in :: one_in]:
        case = Case(
            dtype=dtype, bias=bias, ignored=ignored, valid_vocab_size=valid, softcap=softcap, logit_scale=1.3
        )
        leaves, targets = case.tensors()
        teacher_hidden, teacher_weight = teacher_of(case)
        weights = torch.rand(case.tokens, dtype=dtype)
        options: dict[str, Any] = {**case.kwargs(leaves), "temperature": 1.7}
        loss = fused_linear_distillation(
            leaves[0],
            leaves[1],
            targets,
            teacher_hidden=teacher_hidden,
            teacher_weight=teacher_weight,
            kind=kind,
            alpha=alpha,
            beta=0.3,
            token_weights=weights,
            chunk=chunk,
            reduction=reduction,  # type: ignore[arg-type]
            teacher_softcap=4.0,
            **options,
        )
        ours = torch.autograd.grad(loss * 3.0, leaves)
        leaves64 = wide(leaves)
        z = case.logits(leaves64)
        taught = (teacher_hidden.double() @ teacher_weight.double().T)[:, :valid]
        taught = 4.0 * torch.tanh(taught / 4.0)
        counts = targets != -100
        soft = divergence(z, taught, kind, 1.7, 0.3)
        hard = F.cross_entropy(z, targets, reduction="none")
        per_token = torch.where(counts, alpha * soft + (1 - alpha) * hard, 0.0) * weights.double()
        expected = per_token.sum() / (counts.sum() if reduction == "mean" else 1)
        theirs = torch.autograd.grad(expected * 3.0, leaves64)
        for a, b in zip([loss, *ours], [expected, *theirs], strict=True):
            assert relative(a, b) < TOLERANCE[dtype], (case, alpha, chunk, reduction)


@pytest.mark.parametrize(("kind", "beta"), [("kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.5), ("jsd", 0.2)])
@pytest.mark.filterwarnings("ignore")
def test_equal_to_trl(kind: Any, beta: float) -> None:
    trainer = pytest.importorskip("trl.experimental.gkd").GKDTrainer
    case = Case(ignored=0.3)
    leaves, targets = case.tensors()
    teacher_hidden, teacher_weight = teacher_of(case)
    ours = fused_linear_distillation(
        leaves[0],
        leaves[1],
        targets,
        teacher_hidden=teacher_hidden,
        teacher_weight=teacher_weight,
        kind=kind,
        temperature=0.9,
        reduction="mean",
        **({"beta": beta} if kind == "jsd" else {}),
    )
    logits = (leaves[0] @ leaves[1].T)[None], (teacher_hidden @ teacher_weight.T)[None]
    theirs = trainer.generalized_jsd_loss(*logits, labels=targets[None], beta=beta, temperature=0.9)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=0)
    for a, b in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("static", [False, True])
def test_minus_infinity_and_nan_where_nothing_counts(kind: Any, static: bool) -> None:
    case = Case(bias=True, ignored=0.02, tokens=200)
    leaves, targets = case.tensors()
    assert (targets == -100).any()
    teacher_hidden, teacher_weight = teacher_of(case)
    dead = torch.zeros(case.vocabulary, dtype=torch.float64)
    dead[:60] = -math.inf
    with torch.no_grad():
        leaves[2].copy_(dead)
    targets = torch.where(targets >= 0, targets % 41 + 60, targets)

    def run(hidden: Tensor, taught: Tensor) -> tuple[Tensor, ...]:
        with static_shapes() if static else torch.enable_grad():
            loss = fused_linear_distillation(
                hidden,
                leaves[1],
                targets,
                bias=leaves[2],
                teacher_hidden=taught,
                teacher_weight=teacher_weight,
                teacher_bias=dead,
                kind=kind,
                alpha=0.5,
            )
            return loss, *torch.autograd.grad(loss, (hidden, leaves[1]))

    clean = run(leaves[0], teacher_hidden)
    poisoned = [
        torch.where((targets == -100)[:, None], math.nan, x) for x in (leaves[0].detach(), teacher_hidden)
    ]
    found = run(poisoned[0].requires_grad_(), poisoned[1])
    assert all(x.isfinite().all() for x in clean)
    torch.testing.assert_close(found, clean)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_and_autocast(dtype: torch.dtype, kind: Any) -> None:
    case = Case(dtype=dtype, width=64, vocabulary=300, tokens=200)
    leaves, targets = case.tensors()
    with torch.no_grad():
        leaves[1].mul_(0.1)
    teacher_hidden, teacher_weight = teacher_of(case, width=32)
    leaves64 = wide(leaves)
    taught = teacher_hidden.double() @ teacher_weight.double().T
    expected = divergence(leaves64[0] @ leaves64[1].T, taught, kind, 1.0, 0.5).mean()
    theirs = torch.autograd.grad(expected, leaves64)
    runs = [(leaves, torch.enable_grad())]
    if dtype == torch.bfloat16:
        runs.append(
            ([x.detach().float().requires_grad_() for x in leaves], torch.autocast("cpu", dtype=dtype))
        )  # type: ignore[arg-type]
    for own, context in runs:
        with context:
            loss = fused_linear_distillation(
                own[0],
                own[1],
                targets,
                teacher_hidden=teacher_hidden,
                teacher_weight=teacher_weight,
                kind=kind,
                reduction="mean",
            )
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
        for a, b in zip(torch.autograd.grad(loss * 2.0**10, own), theirs, strict=True):
            assert relative(a, b * 2.0**10) < 2e-2


def over_ranks() -> float:
    """Largest relative error of losses and gradients on this rank."""
    group, rank = dist.group.WORLD, dist.get_rank()
    case = Case(vocabulary=100, tokens=52, bias=True, ignored=0.3)
    full, targets = case.tensors()
    taught = teacher_of(case)
    worst = 0.0
    for kind in KINDS:
        leaves = [x.detach().requires_grad_() for x in full]
        z = leaves[0] @ leaves[1].T + leaves[2]
        wanted = divergence(z, taught[0] @ taught[1].T, kind, 1.0, 0.5)[targets != -100].sum()
        expected = torch.autograd.grad(wanted, leaves)
        local = [full[0].detach(), *(x.detach().chunk(2)[rank] for x in full[1:])]
        local = [x.clone().requires_grad_() for x in local]
        loss = fused_linear_distillation(
            local[0],
            local[1],
            targets,
            bias=local[2],
            teacher_hidden=taught[0],
            chunk=20,
            kind=kind,  # type: ignore[arg-type]
            teacher_weight=taught[1].chunk(2)[rank],
            tp_group=group,
        )
        ours = torch.autograd.grad(loss, local)
        theirs = (expected[0], *(x.chunk(2)[rank] for x in expected[1:]))
        worst = max(
            [worst, relative(loss, wanted), *(relative(a, b) for a, b in zip(ours, theirs, strict=True))]
        )
    return worst


def test_two_ranks_that_share_the_vocabulary() -> None:
    for worst in run_ranks(over_ranks, 2):
        assert worst < 1e-11


def test_no_logits_of_either_are_made() -> None:
    case = Case(tokens=4096, width=8, vocabulary=6000, dtype=torch.float32)
    leaves, targets = case.tensors()
    taught = teacher_of(case)
    with Largest() as seen:
        fused_linear_distillation(
            leaves[0], leaves[1], targets, teacher_hidden=taught[0], teacher_weight=taught[1], chunk=256
        ).backward()
    assert 0 < seen.largest <= 256 * 6000 * 4


GOOD: dict[str, Any] = {
    "hidden": torch.randn(4, 16),
    "weight": torch.randn(101, 16),
    "targets": torch.arange(4),
    "teacher_hidden": torch.randn(4, 8),
    "teacher_weight": torch.randn(101, 8),
}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"kind": "js"}, "kind is 'js', wanted one of kl, reverse_kl, jsd"),
    ({"alpha": 1.5}, "alpha is 1.5 and beta 0.5, wanted alpha from 0 to 1"),
    ({"beta": 1.0}, "its ends the mixture is kind='kl'"),
    ({"reduction": "none"}, "reduction is 'none'"),
    ({"teacher_weight": torch.randn(100, 8)}, r"100 rows beside.*need valid_vocab_size"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_messages(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fused_linear_distillation(**{**GOOD, **changes})


def test_vocabularies_padded_differently() -> None:
    case = Case(valid_vocab_size=90)
    leaves, targets = case.tensors()
    hidden, weight = teacher_of(case)
    more = {"teacher_hidden": hidden, "valid_vocab_size": 90}
    losses = [
        fused_linear_distillation(leaves[0], leaves[1], targets, teacher_weight=w, **more)  # type: ignore[arg-type]
        for w in (weight, weight[:95], weight[:90])
    ]
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(losses[0], losses[2])
