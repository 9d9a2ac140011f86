"""Faults at the edges of floating point: -inf columns, NaN rows without a target, sums of many tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from lightning_thd.loss import (
    fused_linear_cross_entropy,
    fused_linear_distillation,
    fused_linear_logprobs,
    static_shapes,
)
from tests.loss.oracles import relative
from tests.ranks import run_ranks

INF = math.inf


def leaves_and_targets(
    tokens: int, vocabulary: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 4, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(vocabulary, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, max(1, vocabulary), (tokens,), generator=generator)
    bias = torch.zeros(vocabulary, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)], targets


def by_logits(leaves: list[Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies from all logits; zeros where ignored, p log p = 0 where p = 0."""
    z = leaves[0] @ leaves[1].T + leaves[2]
    counts = targets != -100
    z = torch.where(counts[:, None], z, 0.0)
    log_p = z.log_softmax(-1)
    logp = log_p.gather(1, targets.clamp_min(0)[:, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p.clamp_min(-1e300)).sum(-1)
    return torch.where(counts, logp, 0.0), torch.where(counts, entropy, 0.0)


def test_an_impossible_target_costs_infinity_with_a_finite_gradient() -> None:
    leaves, targets = leaves_and_targets(5, 40)
    with torch.no_grad():
        leaves[2][targets[2]] = -INF
    for loss in (
        fused_linear_cross_entropy(leaves[0], leaves[1], targets, bias=leaves[2]),
        -fused_linear_logprobs(leaves[0], leaves[1], targets, bias=leaves[2]).logp.sum(),
    ):
        theirs = F.cross_entropy(F.linear(*leaves), targets, reduction="sum")
        assert loss.item() == theirs.item() == INF
        for a, b in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(theirs, leaves), strict=True):
            torch.testing.assert_close(a, b)


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
    leaves, targets = leaves_and_targets(tokens, vocabulary, scale=scale, seed=seed)
    with torch.no_grad():
        if dead != "none":
            leaves[2][: vocabulary // 2 if dead == "first tile" else vocabulary - 1] = -INF
        if dead in ("first tile", "all but one"):
            targets = torch.full_like(targets, vocabulary - 1)
        if ignored != "none" and tokens:
            mask = torch.ones(tokens, dtype=torch.bool) if ignored == "all" else torch.arange(tokens) % 3 == 0
            targets[mask] = -100
            poisoned = leaves[0].detach().clone()
            poisoned[mask] = poison
            leaves[0] = poisoned.requires_grad_()
    clean = [leaves[0].detach().nan_to_num(0.0, 0.0).requires_grad_(), *leaves[1:]]
    wanted = by_logits(clean, targets)
    with static_shapes() if static else torch.enable_grad():
        found = fused_linear_logprobs(leaves[0], leaves[1], targets, bias=leaves[2], chunk=chunk)
        loss = fused_linear_cross_entropy(leaves[0], leaves[1], targets, bias=leaves[2], chunk=chunk)
    torch.testing.assert_close(found.logp, wanted[0])
    torch.testing.assert_close(found.entropy, wanted[1])
    torch.testing.assert_close(loss, -wanted[0].sum())
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
def test_a_pack_without_any_target_gives_zeros(
    dtype: torch.dtype, tokens: int, vocabulary: int, memory_of_nan: None
) -> None:
    """No product runs: gradients must not be what stood in memory."""
    leaves, _ = leaves_and_targets(tokens, vocabulary, dtype=dtype)
    targets = torch.full((tokens,), -100)
    found = fused_linear_logprobs(leaves[0], leaves[1], targets, bias=leaves[2])
    teacher = {"teacher_hidden": leaves[0].detach(), "teacher_weight": leaves[1].detach()}
    for total in (
        found.logp.sum() + found.entropy.sum() + found.lse.sum(),
        fused_linear_cross_entropy(leaves[0], leaves[1], targets, bias=leaves[2], reduction="mean"),
        fused_linear_distillation(leaves[0], leaves[1], targets, bias=leaves[2], **teacher),
    ):
        assert total.item() == 0.0
        for gradient in torch.autograd.grad(total, leaves):
            assert not gradient.any()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("poison", [math.nan, INF])
def test_rows_of_weight_zero_touch_nothing(static: bool, poison: float) -> None:
    leaves, targets = leaves_and_targets(40, 30)
    weights = (torch.arange(40) % 3).double()
    kept = weights > 0
    clean = [leaves[0].detach()[kept].requires_grad_(), leaves[1]]
    poisoned = leaves[0].detach().clone()
    poisoned[~kept] = poison
    poisoned.requires_grad_()
    teacher = torch.randn(40, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    bias = torch.zeros(30, dtype=torch.float64)
    bias[3] = -INF  # an infinite divergence where nothing counts

    def losses(hidden: Tensor, rows: Tensor) -> list[Tensor]:
        given: dict[str, Any] = {"token_weights": weights[rows]}
        loss = fused_linear_cross_entropy(hidden, leaves[1], targets[rows], **given)
        taught = {"teacher_hidden": teacher[rows], "teacher_weight": leaves[1].detach()}
        jsd = fused_linear_distillation(hidden, leaves[1], targets[rows], kind="jsd", **taught, **given)
        kl = fused_linear_distillation(
            hidden, leaves[1], targets[rows], teacher_bias=bias, alpha=0.5, **taught, **given
        )
        return [loss, jsd, kl]

    with static_shapes() if static else torch.enable_grad():
        ours = losses(poisoned, torch.arange(40))
    for a, b in zip(ours, losses(clean[0], kept.nonzero().squeeze(1)), strict=True):
        torch.testing.assert_close(a, b)
        found = torch.autograd.grad(a, (poisoned, leaves[1]))
        wanted = torch.autograd.grad(b, clean)
        torch.testing.assert_close(found[0][kept], wanted[0])
        assert not found[0][~kept].any()
        torch.testing.assert_close(found[1], wanted[1])


@pytest.mark.parametrize(("vocabulary", "chunk"), [(300, 64), (4500, 16), (5000, 1)])
def test_bf16_gradients_of_the_weight_are_summed_in_fp32(vocabulary: int, chunk: int) -> None:
    torch.manual_seed(0)
    tokens = 64 * chunk
    hidden = torch.randn(tokens, 16).bfloat16()
    weight = torch.randn(vocabulary, 16).bfloat16().requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))
    fused_linear_cross_entropy(hidden, weight, targets, chunk=chunk).backward()
    wide = weight.detach().double().requires_grad_()
    F.cross_entropy(hidden.double() @ wide.T, targets, reduction="sum").backward()
    assert weight.grad is not None
    assert wide.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad.is_contiguous()
    assert weight.grad.untyped_storage().nbytes() == weight.numel() * 2
    naive = weight.detach().clone().requires_grad_()
    F.cross_entropy(F.linear(hidden, naive).float(), targets, reduction="sum").backward()
    assert naive.grad is not None
    # One product over all tokens is added up in fp32, too; rounding once a tile gave 2 to 9 times its error.
    assert relative(weight.grad, wide.grad) < 1.2 * relative(naive.grad, wide.grad)


def on_two_ranks() -> float:
    """A shard that is -inf as a whole, a sharded NaN row, and the shapes 0 and 1; largest error here."""
    group, rank = dist.group.WORLD, dist.get_rank()
    worst = 0.0
    for tokens, dead, scale in ((7, 0, 1.0), (7, 1, 1.0), (1, 0, 1e30), (0, 1, 1.0)):
        leaves, targets = leaves_and_targets(tokens, 40, scale=scale)
        with torch.no_grad():
            leaves[2][20 * dead : 20 * dead + 20] = -INF
            targets = targets % 20 + 20 * (1 - dead)
            if tokens == 7:
                targets[3] = -100
        wanted = by_logits(leaves, targets)
        expected = torch.autograd.grad((wanted[0] + wanted[1]).sum(), leaves)
        poisoned = leaves[0].detach().clone()
        poisoned[targets == -100] = math.nan
        local = [poisoned, *(x.detach().chunk(2)[rank].clone() for x in leaves[1:])]
        local = [x.requires_grad_() for x in local]
        found = fused_linear_logprobs(local[0], local[1], targets, bias=local[2], tp_group=group)
        ours = torch.autograd.grad((found.logp + found.entropy).sum(), local)
        loss = fused_linear_cross_entropy(local[0], local[1], targets, bias=local[2], tp_group=group)
        theirs = [expected[0], *(x.chunk(2)[rank] for x in expected[1:])]
        pairs = [(found.logp, wanted[0]), (found.entropy, wanted[1]), (loss, -wanted[0].sum())]
        pairs += list(zip(ours, (x.nan_to_num(0.0) for x in theirs), strict=True))
        worst = max([worst, *(relative(a, b) for a, b in pairs)])
    return worst


def test_two_ranks_of_which_one_holds_minus_infinity_alone() -> None:
    for worst in run_ranks(on_two_ranks, 2):
        assert worst < 1e-10


def with_a_dtensor() -> tuple[float, ...]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    errors = []
    leaves, targets = leaves_and_targets(6, 40)
    expected = torch.autograd.grad(by_logits(leaves, targets)[0].sum(), leaves[:2])
    group = dist.group.WORLD
    for names, hidden_too, named in (("tp", False, False), ("x", True, False), ("x", False, True)):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(names,))
        weight = distribute_tensor(leaves[1].detach(), mesh, [Shard(0)]).requires_grad_()
        hidden: Any = leaves[0].detach().clone()
        if hidden_too:
            hidden = distribute_tensor(hidden, mesh, [Replicate()])
        hidden.requires_grad_()
        for function in (
            fused_linear_cross_entropy,
            lambda *a, **k: -fused_linear_logprobs(*a, **k).logp.sum(),
        ):
            hidden.grad = weight.grad = None
            function(hidden, weight, targets, tp_group=group if named else None).backward()  # type: ignore[operator]
            for leaf, wanted in zip((hidden, weight), expected, strict=True):
                found: Any = leaf.grad
                found = found.full_tensor() if hasattr(found, "full_tensor") else found
                errors.append(relative(found, -wanted))
    return tuple(errors)


def test_a_distributed_weight_gives_the_numbers_of_one_process() -> None:
    for errors in run_ranks(with_a_dtensor, 2):
        assert len(errors) == 12
        assert max(errors) < 1e-12
