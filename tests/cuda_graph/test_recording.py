"""The recording backend does what a CUDA graph does: the same operators on the same memory, and no reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_thd.callbacks.cuda_graph import CaptureError
from lightning_thd.cuda_graph.recording import RecordingBackend
from tests.ranks import run_ranks

X = torch.arange(6.0)
MASK = X > 2
COUNTS = torch.tensor([1, 2])


def test_a_replay_reads_present_values_and_writes_where_the_capture_did() -> None:
    x = torch.ones(3)
    total = torch.zeros(3)

    def function() -> Tensor:
        total.add_(x)
        return (x * 2).view(3, 1)[1:]

    graph, out = RecordingBackend().capture(function)
    address = out.data_ptr()
    x.fill_(5.0)
    graph.replay()
    assert out.flatten().tolist() == [10.0, 10.0]
    assert total.tolist() == [6.0] * 3
    assert out.data_ptr() == address


def test_random_operators_draw_anew() -> None:
    graph, out = RecordingBackend().capture(lambda: torch.dropout(torch.ones(64), 0.5, True))
    before = out.clone()
    graph.replay()
    assert not torch.equal(out, before)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: X.sum().item(), r"\.item\(\) reads a value back"),
        (lambda: X.tolist(), r"\.tolist\(\) reads"),
        (lambda: X.numpy(), r"\.numpy\(\) reads"),
        (lambda: X.cpu(), r"\.cpu\(\) reads"),
        (lambda: 1 if X.sum() > 0 else 2, "a branch on a tensor reads"),
        (lambda: int(X[0]), r"int\(\) of a tensor reads"),
        (lambda: float(X[0]), r"float\(\) of a tensor reads"),
        (lambda: [1, 2, 3][COUNTS[0]], "used as an index of Python reads"),
        (lambda: torch.equal(X, X), "torch.equal reads"),
        (lambda: X.nonzero(), r"nonzero\(\) makes a shape that depends on values"),
        (lambda: torch.where(MASK), r"nonzero\(\) makes a shape"),
        (lambda: X[MASK], "indexing with a boolean mask makes a shape"),
        (lambda: X.masked_select(MASK), "masked_select makes a shape"),
        (lambda: X.unique(), r"unique\(\) makes a shape"),
        (lambda: COUNTS.bincount(), r"bincount\(\) makes a shape"),
        (lambda: torch.repeat_interleave(COUNTS), "repeat_interleave without output_size makes a shape"),
        (lambda: torch.tensor([1.0]) + X, r"torch.tensor\(...\) copies host values"),
        (lambda: torch.as_tensor([1.0]) + X, r"torch.as_tensor\(...\) copies host values"),
        (lambda: torch.asarray([1.0]) + X, r"torch.asarray\(...\) copies host values"),
        (lambda: X.new_tensor([1.0]) + X, r"new_tensor\(...\) copies host values"),
        (lambda: X.view(2, 3)[:, [0, 2]], "indexing with a list copies host values"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused_with_the_line(function: Callable[[], Any], message: str) -> None:
    with pytest.raises(CaptureError, match=rf"test_recording.py:\d+ in <lambda>: .*{message}"):
        RecordingBackend().capture(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda: torch.repeat_interleave(COUNTS, output_size=3),
        lambda: torch.where(MASK, X, 0.0),
        lambda: X.masked_fill(MASK, 0.0),
        lambda: X.index_select(0, COUNTS),
        lambda: X.clone().index_put_((MASK,), torch.zeros(())),
        lambda: torch.full((2,), 3.0) + torch.arange(2),
        lambda: torch.as_tensor(X),
    ],
)
def test_what_a_graph_can_hold_is_recorded(function: Callable[[], Tensor]) -> None:
    expected = function()
    graph, out = RecordingBackend().capture(function)
    graph.replay()
    assert torch.equal(out, expected)


def collectives() -> list[list[float]]:
    """Every collective of context and tensor parallelism, captured on ones and replayed on other values."""
    import torch.distributed as dist

    from lightning_thd.parallel import exchange

    group: Any = dist.group.WORLD
    rank = dist.get_rank()
    x = torch.ones(4, 2)

    def function() -> Tensor:
        parts = [
            exchange.all_gather_rows(x, group),
            exchange.gather_same(x, group, dim=0),
            exchange.sum_ranks(x, group).repeat(2, 1),
            exchange.rows_to_heads(x.view(4, 2, 1), group).flatten(1).repeat(1, 2),
        ]
        return torch.stack(parts)

    graph, out = RecordingBackend().capture(function)
    x.copy_(torch.arange(8.0).view(4, 2) + 10 * rank)
    graph.replay()
    assert torch.equal(out, function())
    sums: list[list[float]] = out[:, 0].tolist()
    return sums


def test_collectives_run_again() -> None:
    first, second = run_ranks(collectives, 2)
    assert first == [[0.0, 1.0], [0.0, 1.0], [10.0, 12.0], [0.0, 0.0]]
    assert second == [[0.0, 1.0], [0.0, 1.0], [10.0, 12.0], [1.0, 1.0]]
