"""The same on a CUDA device: products leave the tensor cores in fp32, and nothing may wait for the host."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
from torch import Tensor

from lightning_thd.loss import fused_linear_cross_entropy, fused_linear_logprobs, static_shapes
from tests.device_reads import no_waiting
from tests.loss.oracles import Case, relative, wide

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@pytest.fixture(autouse=True)
def full_precision() -> Generator[None]:
    """TF32 would round fp32 products to 10 bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def on_device(case: Case) -> tuple[list[Tensor], Tensor]:
    leaves, targets = case.tensors()
    return [leaf.detach().cuda().requires_grad_() for leaf in leaves], targets.cuda()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_values_and_gradients(dtype: torch.dtype) -> None:
    case = Case(tokens=300, width=128, vocabulary=1000, dtype=dtype, bias=True, ignored=0.3, softcap=20.0)
    leaves, targets = on_device(case)
    results = fused_linear_logprobs(leaves[0], leaves[1], targets, **case.kwargs(leaves))  # type: ignore[arg-type]
    scalar = fused_linear_cross_entropy(leaves[0], leaves[1], targets, **case.kwargs(leaves))  # type: ignore[arg-type]
    leaves64 = wide(leaves)
    expected = case.logprobs(leaves64, targets)
    for a, b in zip(results, expected, strict=True):
        assert (a.double() - b).abs().max() < 1e-2
    assert relative(scalar, -expected[0].sum()) < 1e-5
    ours = torch.autograd.grad(results.logp.mean() - 0.1 * results.entropy.mean(), leaves)
    theirs = torch.autograd.grad(expected[0].mean() - 0.1 * expected[1].mean(), leaves64, retain_graph=True)
    for a, b in zip(ours, theirs, strict=True):
        assert relative(a, b) < TOLERANCE[dtype]
    for a, b in zip(
        torch.autograd.grad(scalar, leaves), torch.autograd.grad(-expected[0].sum(), leaves64), strict=True
    ):
        assert relative(a, b) < TOLERANCE[dtype]


def test_runs_are_bit_equal_under_deterministic_algorithms() -> None:
    leaves, targets = on_device(
        Case(dtype=torch.bfloat16, tokens=500, width=128, vocabulary=1000, ignored=0.3)
    )
    runs = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in range(2):
            results = fused_linear_logprobs(leaves[0], leaves[1], targets)
            loss = fused_linear_cross_entropy(leaves[0], leaves[1], targets)
            total = results.logp.sum() + results.entropy.sum() + loss
            runs.append([*results, *torch.autograd.grad(total, leaves)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_with_static_shapes_nothing_waits_and_a_graph_replays_on_other_values() -> None:
    case = Case(dtype=torch.bfloat16, tokens=256, width=128, vocabulary=1000, ignored=0.3)
    leaves, targets = on_device(case)

    def step() -> tuple[Tensor, ...]:
        with static_shapes():
            loss = fused_linear_cross_entropy(leaves[0], leaves[1], targets)
            entropy = fused_linear_logprobs(leaves[0], leaves[1], targets).entropy
            # Detached: a graph that outlives the capture would keep nodes of the capture's stream.
            return loss.detach(), *torch.autograd.grad(loss + entropy.sum(), leaves)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    with no_waiting():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    other, new_targets = on_device(Case(**{**vars_of(case), "seed": 9, "ignored": 0.6}))
    with torch.no_grad():
        for leaf, value in zip(leaves, other, strict=True):
            leaf.copy_(value)
        targets.copy_(new_targets)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(captured, step(), strict=True):
        torch.testing.assert_close(a, b)


def vars_of(case: Case) -> dict[str, object]:
    return {name: getattr(case, name) for name in case.__dataclass_fields__}


def test_scoring_costs_tiles_alone() -> None:
    hidden = torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(100_000, 512, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, 100_000, (4096,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        fused_linear_logprobs(hidden, weight, targets)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 400 * 2**20  # the logits would take 1.6 GB
