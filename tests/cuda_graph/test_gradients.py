"""Gradients of a captured backward: those of eager under autocast, one set of memory, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_thd import THDBatch
from lightning_thd.callbacks.cuda_graph import GraphedStep, make_buckets
from lightning_thd.cuda_graph.pair import GradientBuffers, GraphPair, Turn
from lightning_thd.cuda_graph.recording import Recording, RecordingBackend
from tests.cuda_graph.support import BUCKETS, gradients, graphed, in_graph, random_batch, worst
from tests.tiny import tiny_llama


class Island(nn.Module):
    """Matrix products in bf16 around one in fp32, as routers of experts and rotary embeddings have it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.a, self.b = nn.Embedding(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.router = nn.Linear(64, 8)

    def forward(self, batch: THDBatch) -> Tensor:
        x = self.a(self.table(batch.input_ids))
        with torch.autocast("cpu", enabled=False):
            share = self.router(x.float()).softmax(-1)
        y = self.b(x) * share.sum(-1, keepdim=True) + share[:, :1]
        losses = y.float().square().mean(-1)
        return torch.where(batch.targets != -100, losses, 0.0).sum() * batch.loss_scale


def test_an_island_of_fp32_under_autocast_has_the_gradients_of_eager() -> None:
    """Lightning runs backward outside of autocast; captured inside of it, gradients were off by 1e-3."""
    module = Island()
    batch = random_batch(3, count=6)
    used = sum(batch.lengths)
    buckets = make_buckets((6,), slots=used, max_seqlen=used)
    step = GraphedStep(lambda m, b: m(b), module, buckets=buckets, backend=RecordingBackend(), require=True)

    def run(call: Callable[[], Tensor]) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = call()
        return [x.clone() for x in gradients(module, loss)]

    wanted = run(lambda: module(batch))
    found = run(lambda: step(batch))
    assert step.stats.replays == 1
    assert worst(found, wanted) == 0.0


class Keeping(RecordingBackend):
    """Keeps the tapes it records: forward, backward, forward, ..."""

    def __init__(self) -> None:
        super().__init__()
        self.tapes: list[Recording] = []

    def capture(self, function: Callable[[], Any]) -> Any:
        tape, result = super().capture(function)
        self.tapes.append(tape)
        return tape, result


def written(tape: Recording) -> set[int]:
    """Addresses that a tape's copies into gradient buffers write to."""
    copies = (call for call in tape.calls if call.function is torch.ops.aten.copy_.default)
    return {call.args[0].untyped_storage().data_ptr() for call in copies}


def test_buckets_share_one_set_of_gradients() -> None:
    """The formula: n buckets keep G bytes of gradients between replays, not n G."""
    model, backend = tiny_llama(torch.float64), Keeping()
    step = graphed(model, backend=backend)
    assert len(BUCKETS) == 2
    for seed in range(6):
        batch = random_batch(seed, count=2 + seed, longest=12)
        found = [x.clone() for x in gradients(model, step(batch))]
        assert worst(found, gradients(model, in_graph(model, batch))) == 0.0
    first, second = (written(tape) for tape in backend.tapes[1::2])
    assert first == second
    assert len(first) == len(list(model.parameters()))
    buffers = step._shared._buffers
    assert buffers.nbytes == sum(p.nbytes for p in model.parameters())


def test_frozen_and_unused_parameters_have_no_buffer() -> None:
    w, unused = (torch.ones(2, requires_grad=True) for _ in range(2))
    buffers = GradientBuffers(2)
    pair = GraphPair(RecordingBackend(), lambda: (w * w).sum(), [w, unused], Turn(), buffers)
    pair([w, unused]).backward()
    assert buffers.nbytes == w.nbytes
    assert unused.grad is None


@pytest.mark.filterwarnings("ignore:Sparse")  # torch's own advice, in some versions
def test_gradients_of_other_kinds_keep_their_own_memory() -> None:
    table = torch.ones(5, 2, requires_grad=True)
    buffers = GradientBuffers(1)
    index = torch.tensor([1, 1, 3])
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), torch.ones(2, 2), (5, 2), check_invariants=True)
    assert buffers.keep(0, table, sparse) is sparse
    assert buffers.nbytes == 0
    dense = torch.autograd.grad(table[index].sum(), table)[0]
    assert buffers.keep(0, table, dense).tolist() == dense.tolist()
