"""The same on a CUDA device: products leave the tensor cores in fp32, and nothing may wait for the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_thd.loss import fused_linear_cross_entropy, fused_linear_logprobs, static_shapes
from tests.device_reads import ON_GPU, no_waiting
from tests.loss.oracles import Case, relative, wide
from tests.loss.test_fused import KINDS, fused, whole

pytestmark = ON_GPU
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def on_device(case: Case) -> tuple[list[Tensor], Tensor]:
    leaves, targets = case.tensors()
    return [leaf.detach().cuda().requires_grad_() for leaf in leaves], targets.cuda()


@pytest.mark.parametrize(("kind", "softcap"), [("nll", None), *((kind, 20.0) for kind in KINDS)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_values_and_gradients(dtype: torch.dtype, kind: str, softcap: float | None) -> None:
    size: Any = {"tokens": 300, "width": 128, "vocabulary": 9000 if kind == "nll" else 1000}
    case = Case(**size, dtype=dtype, bias=True, ignored=0.3, softcap=softcap)
    leaves, targets = on_device(case)
    taught = tuple(x.cuda() for x in case.teacher())
    loss = fused(kind, leaves, targets, taught, **case.kwargs(leaves))
    leaves64 = wide(leaves)
    expected = whole(kind, case, leaves64, targets, tuple(x.double() for x in taught))
    assert relative(loss, expected) < max(1e-2 if dtype.itemsize == 2 else 0.0, TOLERANCE[dtype])
    theirs = torch.autograd.grad(expected / case.tokens, leaves64)
    for a, b in zip(torch.autograd.grad(loss / case.tokens, leaves), theirs, strict=True):
        assert relative(a, b) < TOLERANCE[dtype]


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
    other, new_targets = on_device(replace(case, seed=9, ignored=0.6))
    with torch.no_grad():
        for leaf, value in zip(leaves, other, strict=True):
            leaf.copy_(value)
        targets.copy_(new_targets)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(captured, step(), strict=True):
        torch.testing.assert_close(a, b)


def test_scoring_costs_tiles_alone() -> None:
    hidden, weight = (torch.randn(n, 512, device="cuda", dtype=torch.bfloat16) for n in (4096, 100_000))
    targets = torch.randint(0, 100_000, (4096,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        fused_linear_logprobs(hidden, weight, targets)
    assert torch.cuda.max_memory_allocated() - before < 400 * 2**20  # the logits would take 1.6 GB
