from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.loss.oracles import Case, relative, wide
from tests.ranks import RankError, run_ranks

CASES = [
    Case(vocabulary=100),
    Case(vocabulary=100, dtype=torch.float32, ignored=0.4, softcap=5.0, temperature=0.7),
    Case(vocabulary=100, bias=True, ignored=0.02),
    Case(vocabulary=100, valid_vocab_size=30),  # the last ranks hold padding alone
]


_NAMES = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
}


class _Counted(TorchDispatchMode):
    """Counts collectives by phase and name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.phase = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[f"{self.phase} {_NAMES.get(func._opname, func._opname)}"] += 1
        return func(*args, **(kwargs or {}))


def _shards(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """The hidden states whole, and this rank's rows of weight and bias."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = [leaves[0], *(leaf.chunk(ranks)[rank] for leaf in leaves[1:])]
    return [part.detach().clone().requires_grad_() for part in parts]


def run_case(case: Case, chunk: Any) -> tuple[float, dict[str, int]]:
    """Largest relative error of outputs and gradients on this rank, and the collectives of both passes."""
    from lightning_thd.loss import fused_linear_logprobs

    counted = _Counted()
    full, targets = case.tensors()
    local = _shards(full)
    counted.phase = "forward"
    with counted:
        results = fused_linear_logprobs(
            *local[:2], targets, tp_group=dist.group.WORLD, chunk=chunk, **case.kwargs(local)
        )
    upstream = torch.randn(3, case.tokens, generator=torch.Generator().manual_seed(3)).double()
    counted.phase = "backward"
    with counted:
        sum((upstream[i] * results[i]).sum() for i in range(3)).backward()  # type: ignore[union-attr]
    leaves64 = wide(full)
    expected = case.logprobs(leaves64, targets)
    sum((upstream[i] * expected[i]).sum() for i in range(3)).backward()  # type: ignore[union-attr]
    errors = [relative(a, b) for a, b in zip(results, expected, strict=True)]
    gradients = [leaf.grad for leaf in leaves64]
    wanted = _shards([gradient for gradient in gradients if gradient is not None])
    errors += [relative(leaf.grad, b) for leaf, b in zip(local, wanted, strict=True) if leaf.grad is not None]
    assert len(errors) == 3 + len(full)
    return max(errors), dict(counted.calls)


def run_all(world: int) -> list[tuple[float, dict[str, int]]]:
    return [run_case(case, chunk) for case in CASES for chunk in ("auto", 3)]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_equal_to_one_rank_with_one_collective_forward_and_one_backward(world: int) -> None:
    for found in run_ranks(run_all, world, world):
        for case, (error, calls) in zip([c for c in CASES for _ in range(2)], found, strict=True):
            assert error < (1e-5 if case.dtype == torch.float32 else 1e-11)
            assert calls == {"forward all_gather": 1, "backward all_reduce": 1}


def run_loss() -> tuple[float, float]:
    from torch.nn import functional as F

    from lightning_thd.loss import fused_linear_cross_entropy

    case = Case(vocabulary=100, ignored=0.3)
    full, targets = case.tensors()
    local = _shards(full)
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": "mean"}
    loss = fused_linear_cross_entropy(local[0], local[1], targets, tp_group=dist.group.WORLD, **options)
    loss.backward()
    z = case.logits(full)
    expected = F.cross_entropy(z, targets, label_smoothing=0.1)
    expected = (
        expected + 0.01 * (z.logsumexp(-1).square() * (targets != -100)).sum() / (targets != -100).sum()
    )
    expected.backward()
    assert full[0].grad is not None
    assert local[0].grad is not None
    return relative(loss, expected), relative(local[0].grad, full[0].grad)


def test_the_scalar_loss_over_ranks() -> None:
    for errors in run_ranks(run_loss, 2):
        assert max(errors) < 1e-12


def unequal() -> None:
    from lightning_thd.loss import fused_linear_logprobs

    rows = 50 + dist.get_rank()
    fused_linear_logprobs(torch.randn(4, 8), torch.randn(rows, 8), torch.arange(4), tp_group=dist.group.WORLD)


def test_unequal_shards_are_refused() -> None:
    with pytest.raises(RankError, match=r"hold \[50, 51\] rows of the head's weight, wanted the same number"):
        run_ranks(unequal, 2)
