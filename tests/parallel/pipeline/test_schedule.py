"""Schedules: every pass once, in an order that cannot hang, with the formulas' bubble and memory."""

from __future__ import annotations

import pytest

from benchmarks.pipeline import bubble_fraction
from lightning_thd.parallel.pipeline import expected_bubble, make_schedule
from lightning_thd.parallel.pipeline.schedule import Op, timeline

SHAPES = [(p, n, v) for p in (1, 2, 3, 4, 8) for n in (1, 2, 3, 4, 7, 8, 12, 16) for v in (1, 2, 3)]


def equal(stage: int, microbatch: int) -> float:
    return 1.0


@pytest.mark.parametrize(("p", "n", "v"), SHAPES)
def test_every_pass_runs_once_and_none_waits_for_ever(p: int, n: int, v: int) -> None:
    schedule = make_schedule(p, n, chunks=v)
    assert timeline(schedule, equal) is not None
    expected = {Op(forward, m, c) for forward in (True, False) for m in range(n) for c in range(v)}
    for program in schedule.programs:
        assert len(program) == len(expected)
        assert set(program) == expected
    # Channels carry no tags: every rank sends and receives in the same order.
    for forward in (True, False):
        orders = {tuple(op for op in program if op.forward is forward) for program in schedule.programs}
        assert len(orders) == 1
    # Ranks compare errors after the first pass of each chunk: none waits then for another's backward pass.
    for program in schedule.programs:
        forwards = [op.forward for op in program].index(False)
        assert {Op(True, 0, c) for c in range(v)} <= set(program[:forwards])


def test_two_ranks_by_hand() -> None:
    first, second = make_schedule(2, 2).programs
    assert first == (Op(True, 0, 0), Op(True, 1, 0), Op(False, 0, 0), Op(False, 1, 0))
    assert second == (Op(True, 0, 0), Op(False, 0, 0), Op(True, 1, 0), Op(False, 1, 0))


@pytest.mark.parametrize(
    ("p", "n", "v"), [(2, 8, 1), (4, 8, 1), (4, 32, 1), (8, 64, 1), (2, 8, 2), (4, 16, 2)]
)
def test_the_bubble_of_equal_microbatches_is_the_formula(p: int, n: int, v: int) -> None:
    bubble = bubble_fraction(make_schedule(p, n, chunks=v), equal)
    assert bubble == pytest.approx(expected_bubble(p, n, chunks=v), rel=0.05)
    assert bubble == pytest.approx((p - 1) / (v * n + p - 1))


@pytest.mark.parametrize(("p", "n", "v"), [(4, 6, 2), (3, 4, 3), (2, 1, 2), (4, 6, 1), (4, 8, 2)])
def test_the_bubble_is_also_that_of_a_short_last_group(p: int, n: int, v: int) -> None:
    schedule = make_schedule(p, n, chunks=v)
    assert schedule.bubble == pytest.approx(bubble_fraction(schedule, equal))
    assert expected_bubble(p, n, chunks=v) == pytest.approx(schedule.bubble)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks"), [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1024, 2**14, 2)]
)
def test_numbers_that_are_refused(ranks: int, microbatches: int, chunks: int) -> None:
    with pytest.raises(ValueError, match="=0; wanted 1 or more|passes=33554432; wanted at most"):
        make_schedule(ranks, microbatches, chunks=chunks)
