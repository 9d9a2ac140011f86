"""Gradients of a captured backward: those of eager under autocast, one set of memory, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_thd import THDBatch
from lightning_thd.callbacks.cuda_graph import GraphedStep, make_buckets
from lightning_thd.cuda_graph.capture import GradientBuffers, GraphPair, Turn
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
    held = [x for x in step._shared._buffers._held if x is not None]
    assert sum(x.nbytes for x in held) == sum(p.nbytes for p in model.parameters())


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def make() -> tuple[GraphPair, Tensor, list[Tensor]]:
    """``{"loss": sum(x w), "seen": [w squared, x]}`` with ``unused`` left out of it."""
    x = torch.ones(2, dtype=torch.float64)
    w, unused = leaf(2.0, 3.0), leaf(1.0)

    def function() -> dict[str, Any]:
        return {"loss": (x * w).sum(), "seen": [w.square(), x * 1.0, None]}

    pair = GraphPair(RecordingBackend(), function, [w, unused], Turn(), GradientBuffers(2))
    return pair, x, [w, unused]


def test_outputs_keep_their_nesting_and_gradients_go_to_what_was_used() -> None:
    pair, x, leaves = make()
    for values in ((1.0, 5.0), (-2.0, 0.5)):
        x.copy_(torch.tensor(values))
        for one in leaves:
            one.grad = None
        found = pair(leaves)
        assert float(found["loss"].detach()) == 2 * values[0] + 3 * values[1]
        assert found["seen"][0].tolist() == [4.0, 9.0]
        assert found["seen"][1].tolist() == list(values)
        assert found["seen"][2] is None
        assert not found["seen"][1].requires_grad
        (found["loss"] + found["seen"][0].sum()).backward()
        w, unused = leaves
        assert w.grad is not None
        assert w.grad.tolist() == [values[0] + 4.0, values[1] + 6.0]
        assert unused.grad is None


def test_outputs_and_gradients_are_copies_that_later_replays_leave_alone() -> None:
    pair, x, leaves = make()
    first = pair(leaves)
    (gradient,) = torch.autograd.grad(first["loss"], leaves[:1])
    x.fill_(7.0)
    second = pair(leaves)
    torch.autograd.grad(second["loss"], leaves[:1])
    assert float(first["loss"].detach()) == 5.0
    assert gradient.tolist() == [1.0, 1.0]
