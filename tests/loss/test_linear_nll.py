from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_thd.loss import (
    fused_linear_cross_entropy,
    fused_linear_distillation,
    fused_linear_logprobs,
)
from lightning_thd.loss.linear_logprobs import linear_logprobs
from lightning_thd.loss.linear_nll import linear_nll
from lightning_thd.loss.prepare import Call, rows_with_target
from lightning_thd.loss.tiles.nll import Penalties
from tests.device_reads import RefuseDeviceReads
from tests.loss.oracles import Case, relative, wide

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def oracle(
    case: Case,
    leaves: list[Tensor],
    targets: Tensor,
    *,
    smoothing: float,
    z_loss: float,
    weights: Tensor | None,
    mean: bool,
) -> Tensor:
    z = case.logits(leaves)
    loss = F.cross_entropy(z, targets, reduction="none", label_smoothing=smoothing)
    loss = loss + z_loss * z.logsumexp(-1).square() * (targets != -100)
    total = (loss if weights is None else loss * weights.double()).sum()
    return total / (targets != -100).sum().clamp_min(1) if mean else total


GRID = list(
    itertools.product(
        (False, True), (0.0, 0.02, 0.5, 1.1), (None, 90), (0.0, 0.1), (0.0, 0.01), (False, True), ("auto", 7)
    )
)


@pytest.mark.parametrize("one_in", [19, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("mean", [False, True])
def test_value_and_gradients(dtype: torch.dtype, softcap: float | None, mean: bool, one_in: int) -> None:
    first = 4 * (dtype == torch.float64) + 2 * (softcap is None) + mean  # others of the grid each time
    for bias, ignored, valid, smoothing, z_loss, weighted, chunk in GRID[first % one_in :: one_in]:
        case = Case(
            dtype=dtype, bias=bias, ignored=ignored, valid_vocab_size=valid, softcap=softcap,
            temperature=0.7, logit_scale=1.3,
        )  # fmt: skip
        leaves, targets = case.tensors()
        weights = torch.rand(case.tokens, dtype=dtype) if weighted else None
        if weights is not None:
            weights[::5] = 0.0
        options: dict[str, Any] = {
            "label_smoothing": smoothing,
            "z_loss": z_loss,
            "token_weights": weights,
            "reduction": "mean" if mean else "sum",
            "chunk": chunk,
            **case.kwargs(leaves),
        }
        loss = fused_linear_cross_entropy(leaves[0], leaves[1], targets, **options)
        ours = torch.autograd.grad(loss * 3.0, leaves)
        leaves64 = wide(leaves)
        kwargs: dict[str, Any] = {"smoothing": smoothing, "z_loss": z_loss, "weights": weights, "mean": mean}
        expected = oracle(case, leaves64, targets, **kwargs)
        theirs = torch.autograd.grad(expected * 3.0, leaves64)
        with torch.no_grad():  # the path without gradients is another one
            plain = fused_linear_cross_entropy(leaves[0], leaves[1], targets, **options)
        for a, b in zip([loss, plain, *ours], [expected, expected, *theirs], strict=True):
            assert relative(a, b) < TOLERANCE[dtype], (case, options)


def test_a_frozen_weight_and_a_frozen_backbone() -> None:
    leaves, targets = Case().tensors()
    full = torch.autograd.grad(fused_linear_cross_entropy(leaves[0], leaves[1], targets), leaves)
    for index in (0, 1):
        frozen = [leaf.detach().requires_grad_(i == index) for i, leaf in enumerate(leaves)]
        fused_linear_cross_entropy(frozen[0], frozen[1], targets).backward()
        assert frozen[1 - index].grad is None
        torch.testing.assert_close(frozen[index].grad, full[index])


def test_a_retained_graph_can_be_used_again() -> None:
    leaves, targets = Case(bias=True).tensors()
    loss = fused_linear_cross_entropy(leaves[0], leaves[1], targets, bias=leaves[2])
    first = torch.autograd.grad(loss * 2.0, leaves, retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(loss * 5.0, leaves)
    for a, b, c in zip(kept, first, second, strict=True):
        assert torch.equal(a, b)  # what was handed out is the caller's
        torch.testing.assert_close(a * 2.5, c)


@pytest.mark.parametrize("name", ["cross_entropy", "logprobs", "distillation"])
def test_a_loss_inside_a_checkpoint_has_the_same_gradients(name: str) -> None:
    """torch.utils.checkpoint hands a function's saved tensors out a single time."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 8, dtype=torch.float64), torch.randn(11, 8, dtype=torch.float64)
    targets = torch.randint(0, 11, (9,))

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        if name == "cross_entropy":
            return fused_linear_cross_entropy(hidden, weight, targets)
        if name == "logprobs":
            return sum(x.sum() for x in fused_linear_logprobs(hidden, weight, targets) if x is not None)
        teacher = {"teacher_hidden": hidden.detach(), "teacher_weight": 2 * weight.detach()}
        return fused_linear_distillation(hidden, weight, targets, **teacher)

    found = []
    for reentrant in (None, False, True):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        if reentrant is None:
            loss(*leaves).backward()
        else:
            checkpoint(loss, *leaves, use_reentrant=reentrant).backward()
        found.append([leaf.grad for leaf in leaves])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_double_backward_is_refused() -> None:
    leaves, targets = Case().tensors()
    loss = fused_linear_cross_entropy(leaves[0], leaves[1], targets)
    with pytest.raises(RuntimeError, match=r"fused_linear_cross_entropy was .*create_graph=True"):
        torch.autograd.grad(loss, leaves, create_graph=True)


def test_nothing_of_the_caller_is_overwritten() -> None:
    leaves, targets = Case(bias=True, ignored=0.3).tensors()
    held = [*leaves, targets]
    versions = [tensor._version for tensor in held]
    loss = fused_linear_cross_entropy(leaves[0], leaves[1], targets, bias=leaves[2])
    (loss * 2).backward()
    assert [tensor._version for tensor in held] == versions


class _Products(torch.utils._python_dispatch.TorchDispatchMode):
    """How many matrix products ran."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "mm" in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


def test_gradients_are_made_in_the_forward_pass() -> None:
    leaves, targets = Case(softcap=3.0).tensors()
    with _Products() as forward:
        loss = fused_linear_cross_entropy(leaves[0], leaves[1], targets, softcap=3.0)
    with _Products() as backward:
        loss.backward()
    assert forward.count == 3
    assert backward.count == 0
    assert leaves[0].grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    case = Case(dtype=dtype, width=64, vocabulary=300, tokens=700)
    leaves, targets = case.tensors()
    kwargs: dict[str, Any] = case.kwargs(leaves)
    loss = fused_linear_cross_entropy(leaves[0], leaves[1], targets, reduction="mean", chunk=64, **kwargs)
    ours = torch.autograd.grad(loss, leaves)
    leaves64 = wide(leaves)
    expected = F.cross_entropy(case.logits(leaves64), targets)
    theirs = torch.autograd.grad(expected, leaves64)
    low = F.cross_entropy(F.linear(leaves[0], leaves[1]).float(), targets)
    naive = torch.autograd.grad(low, leaves)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=2e-3)
    for a, b, c in zip(ours, theirs, naive, strict=True):
        assert a.dtype == dtype
        # eleven tiles of rows add to the weight's gradient in bf16, so twice the error of one product
        assert relative(a, b) < max(2.0 * relative(c, b), 2e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reduction": "none"}, r"reduction is 'none', wanted 'sum' or 'mean'.*logp"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0, wanted at least 0 and below 1"),
        ({"z_loss": -1.0}, "z_loss=-1.0; wanted a finite number of 0.0 or more"),
        ({"token_weights": torch.ones(3)}, r"token_weights is \[3\], wanted one a token"),
        ({"temperature": 0.0}, "temperature=0.0"),
    ],
)
def test_messages(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fused_linear_cross_entropy(torch.randn(4, 16), torch.randn(101, 16), torch.arange(4), **changes)


def test_meta_tensors_give_shapes() -> None:
    leaves, targets = Case(bias=True).tensors()
    meta = [leaf.detach().to("meta").requires_grad_() for leaf in leaves]
    loss = fused_linear_cross_entropy(meta[0], meta[1], targets.to("meta"), bias=meta[2])
    loss.backward()
    assert loss.shape == ()
    assert [leaf.grad.shape for leaf in meta if leaf.grad is not None] == [leaf.shape for leaf in leaves]


@pytest.mark.parametrize("at_most", [2, 3, 5])
def test_a_number_of_loss_tokens_known_on_the_host_is_not_read(at_most: int) -> None:
    targets = torch.full((40,), -100)
    targets[3], targets[7] = 5, 6
    with RefuseDeviceReads():
        rows, kept, counts = rows_with_target(targets, -100, at_most=at_most)
    assert rows is not None
    assert counts is not None
    assert counts.tolist() == [True, True, *[False] * (at_most - 2)]
    assert kept.tolist() == [5, 6, *[-100] * (at_most - 2)]
    assert rows[:2].tolist() == [3, 7]
    with pytest.raises(RuntimeError, match="more targets count than the 1"):
        rows_with_target(targets, -100, at_most=1)


def test_rows_that_fill_up_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_thd.loss.prepare._WAITS", {"cpu"})
    leaves, targets = Case(ignored=0.5).tensors()
    count = 16  # CPUs multiply the rows of an incomplete block of 8 by other code, which rounds otherwise
    targets = targets.masked_fill((targets != -100).cumsum(0) > count, -100)
    assert int((targets != -100).sum()) == count
    call = Call(hidden=leaves[0], weight=leaves[1], targets=targets)
    found = []
    for loss_tokens in (None, count, count + 8):
        given = replace(call, loss_tokens=loss_tokens)
        loss = linear_nll(given, Penalties(), token_weights=None)
        logp = linear_logprobs(given, entropy=False).logp
        found.append((loss, logp, *torch.autograd.grad(loss + logp.square().sum(), leaves)))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
