"""Gradients of a captured backward: those of eager under autocast, one set of memory, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.callbacks.cuda_graph import GraphedStep, make_buckets
from lightning_thd.cuda_graph import graphed_step
from lightning_thd.cuda_graph.pair import GradientBuffers, GraphPair, ReadyOrder, Turn
from lightning_thd.cuda_graph.recording import Recording, RecordingBackend
from tests.cuda_graph.support import BUCKETS, gradients, graphed, in_graph, random_batch, worst
from tests.ranks import run_ranks
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


def test_pieces_end_where_their_size_is_reached() -> None:
    marks: list[int] = []
    order = ReadyOrder(lambda: marks.append(len(order.pieces)), piece_bytes=10)
    for index, size in ((4, 8), (2, 8), (7, 16), (1, 4)):
        order.ready(index, torch.empty(size, dtype=torch.uint8))
    assert order.pieces == [[4, 2], [7], [1]]
    assert marks == [1, 2]


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().sum()


def test_gradients_arrive_in_order_while_the_backward_goes_on() -> None:
    torch.manual_seed(0)
    module, backend = Tower(), Keeping()
    leaves, x = list(module.parameters()), torch.randn(3, 4, dtype=torch.float64)
    twins = [p.detach().clone().requires_grad_() for p in leaves]
    named = dict(zip((name for name, _ in module.named_parameters()), twins, strict=True))
    pair = GraphPair(
        backend,
        lambda: torch.func.functional_call(module, named, (x,)),
        twins,
        Turn(),
        GradientBuffers(len(twins)),
        piece_bytes=1,
    )
    assert len(pair.pieces) == len(leaves)
    backward, seen = backend.tapes[1], []
    given_up = pair(leaves)  # a forward alone runs nothing of the backward
    assert backward.position == 0
    assert not any(bool(x.any()) for x in pair.grad_outputs)
    del given_up
    for index, leaf in enumerate(leaves):
        leaf.register_post_accumulate_grad_hook(lambda _, i=index: seen.append((i // 2, backward.position)))
    for _ in range(2):  # a second backward adds up
        seen.clear()
        pair(leaves).backward()
        assert [layer for layer, _ in seen] == [4, 4, 3, 3, 2, 2, 1, 1, 0, 0]
        positions = [position for _, position in seen]
        assert positions == sorted(positions)
        assert positions[0] < len(backward.calls) / 3
        assert positions[-1] == len(backward.calls)
    wanted = torch.autograd.grad(module(x), leaves)
    for leaf, gradient in zip(leaves, wanted, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, 2 * gradient)


def overlapped() -> tuple[list[float], float, int]:
    """Where the backward stood whenever DDP reduced a bucket, and how far gradients are from eager's."""
    graphed_step.PIECE_BYTES = 1  # type: ignore[misc]
    model, twin, backend = tiny_llama(torch.float64), tiny_llama(torch.float64), Keeping()
    wrapped, eager = (DistributedDataParallel(m, bucket_cap_mb=0.001) for m in (model, twin))
    step = graphed(wrapped, backend=backend)
    shares: list[float] = []

    def hook(state, bucket):  # DDP wants its own class here, and no text
        running = [t for t in backend.tapes[1::2] if 0 < t.position < len(t.calls)]
        shares.extend(t.position / len(t.calls) for t in running)
        return allreduce_hook(None, bucket)

    wrapped.register_comm_hook(None, hook)
    error = 0.0
    for seed in range(4):
        batch = random_batch(seed, count=4)
        for module, call in ((model, step), (twin, lambda b: causal_lm_loss(eager, b))):
            module.zero_grad()
            call(batch).backward()
        found, wanted = ([p.grad for p in m.parameters()] for m in (model, twin))
        error = max(error, worst(found, wanted))  # type: ignore[arg-type]
    return shares, error, step.stats.replays


@pytest.mark.slow
def test_ddp_reduces_while_the_backward_is_replayed() -> None:
    for shares, error, replays in run_ranks(overlapped, 2):
        assert replays == 4
        assert error < 1e-12
        assert len(shares) > 8  # several buckets a step, before the backward's end
        assert min(shares) < 0.5
