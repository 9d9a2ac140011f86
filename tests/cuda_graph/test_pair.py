"""A pair of graphs behind one autograd.Function: gradients, turns, copies, and stand-ins for parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_thd.cuda_graph.pair import GradientBuffers, GraphPair, StandIns, Turn
from lightning_thd.cuda_graph.recording import RecordingBackend


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def make(turn: Turn | None = None, *, x: Tensor | None = None) -> tuple[GraphPair, Tensor, list[Tensor]]:
    """``{"loss": sum(x w), "seen": [w squared, x]}`` with ``unused`` left out of it."""
    x = torch.ones(2, dtype=torch.float64) if x is None else x
    w, unused = leaf(2.0, 3.0), leaf(1.0)

    def function() -> dict[str, Any]:
        return {"loss": (x * w).sum(), "seen": [w.square(), x * 1.0, None]}

    return (
        GraphPair(RecordingBackend(), function, [w, unused], turn or Turn(), GradientBuffers(2)),
        x,
        [w, unused],
    )


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


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.b.weight = self.a.weight
        self.a.weight.mark = "kept"  # type: ignore[attr-defined]
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)


def test_stand_ins_share_memory_but_no_history_and_go_away() -> None:
    module = Tied()
    weight, frozen = module.a.weight, module.frozen
    stand_ins = StandIns(module, [weight])

    def body() -> None:
        with stand_ins.in_place():
            look()
            raise KeyError

    def look() -> None:
        assert module.a.weight is module.b.weight is stand_ins.leaves[0]
        assert module.a.weight is not weight
        assert module.a.weight.data_ptr() == weight.data_ptr()
        assert module.a.weight.mark == "kept"
        assert module.frozen is frozen
        module.b(module.a(torch.ones(1, 2))).sum().backward()

    with pytest.raises(KeyError):
        body()
    assert module.a.weight is module.b.weight is weight
    assert weight.grad is None
    assert stand_ins.leaves[0].grad is not None


def test_a_capture_meets_no_node_that_accumulates_a_parameters_gradient() -> None:
    """DDP keeps those nodes, made on another stream than the capture's, which breaks it on a GPU."""
    module = nn.Linear(2, 1)
    kept = [p.expand_as(p).grad_fn.next_functions[0][0] for p in module.parameters()]  # type: ignore[union-attr]
    stand_ins = StandIns(module, list(module.parameters()))
    seen = []

    def function() -> Tensor:
        with stand_ins.in_place():
            loss = module(torch.ones(3, 2)).sum()
        stack = [loss.grad_fn]
        while stack:
            node = stack.pop()
            if node is not None:
                seen.append(node)
                stack += [parent for parent, _ in node.next_functions]
        return loss

    pair = GraphPair(RecordingBackend(), function, stand_ins.leaves, Turn(), GradientBuffers(2))
    assert len(seen) > 3
    assert not set(kept) & set(seen)
    pair(list(module.parameters())).backward()
    assert module.weight.grad is not None
    assert module.weight.grad.tolist() == [[3.0, 3.0]]
