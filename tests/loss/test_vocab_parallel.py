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
    Case(vocabulary=100, bias=True, rank=3, ignored=0.02),
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


def _shards(case: Case, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's rows of the weight, the bias and the LoRA; the rest whole."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = {0} | ({3} if case.bias and case.rank else {2} if case.rank else set())
    return [
        leaf.detach().clone().requires_grad_()
        if i in whole
        else leaf.detach().chunk(ranks)[rank].clone().requires_grad_()
        for i, leaf in enumerate(leaves)
    ]


def run_case(case: Case, chunk: Any, sequence_parallel: bool) -> tuple[float, dict[str, int]]:
    """Largest relative error of outputs and gradients on this rank, and the collectives of both passes."""
    from lightning_thd.loss import fused_linear_logprobs

    counted = _Counted()
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    full, targets = case.tensors()
    local = _shards(case, full)
    if sequence_parallel:
        local[0] = full[0].detach().chunk(ranks)[rank].clone().requires_grad_()
    counted.phase = "forward"
    with counted:
        results = fused_linear_logprobs(
            local[0], local[1], targets, tp_group=group, chunk=chunk, sequence_parallel=sequence_parallel,
            **case.kwargs(local),  # type: ignore[arg-type]
        )  # fmt: skip
    upstream = torch.randn(3, case.tokens, generator=torch.Generator().manual_seed(3)).double()
    counted.phase = "backward"
    with counted:
        sum((upstream[i] * results[i]).sum() for i in range(3)).backward()  # type: ignore[union-attr]
    leaves64 = wide(full)
    expected = case.logprobs(leaves64, targets)
    sum((upstream[i] * expected[i]).sum() for i in range(3)).backward()  # type: ignore[union-attr]
    errors = [relative(a, b) for a, b in zip(results, expected, strict=True)]
    gradients = [leaf.grad for leaf in leaves64]
    wanted = _shards(case, [gradient for gradient in gradients if gradient is not None])
    if sequence_parallel:
        assert gradients[0] is not None
        wanted[0] = gradients[0].chunk(ranks)[rank]
    errors += [relative(leaf.grad, b) for leaf, b in zip(local, wanted, strict=True) if leaf.grad is not None]
    assert len(errors) == 3 + len(full)
    return max(errors), dict(counted.calls)


def run_all(world: int) -> list[tuple[float, dict[str, int]]]:
    found = [run_case(case, chunk, False) for case in CASES for chunk in ("auto", 3)]
    even = Case(tokens=52, vocabulary=100, ignored=0.4)
    found.append(run_case(even, 5, True))
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_equal_to_one_rank_with_one_collective_forward_and_one_backward(world: int) -> None:
    for found in run_ranks(run_all, world, world):
        *plain, sequence_parallel = found
        for case, (error, calls) in zip([c for c in CASES for _ in range(2)], plain, strict=True):
            assert error < (1e-5 if case.dtype == torch.float32 else 1e-11)
            assert calls == {"forward all_gather": 1, "backward all_reduce": 1}
        error, calls = sequence_parallel
        assert error < 1e-11
        assert calls == {"forward all_gather": 2, "backward reduce_scatter": 1}


def run_loss() -> tuple[float, float]:
    from torch.nn import functional as F

    from lightning_thd.loss import fused_linear_cross_entropy

    case = Case(vocabulary=100, ignored=0.3)
    full, targets = case.tensors()
    local = _shards(case, full)
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
