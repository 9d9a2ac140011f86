"""Ranks, stages and microbatches -> the order in which every rank runs forward and backward passes.

All ranks run forward passes in the same order, and backward passes too. So messages between two ranks are
needed in the order in which they were sent, without a tag. Ranks differ in the warm-up, the number of forward
passes before forward and backward alternate. The schedules are 1F1B ("one forward, one backward",
PipeDream-Flush, arXiv:2006.09503) and interleaved 1F1B (Megatron-LM, arXiv:2104.04473).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from lightning_thd._checks import whole_number

_MOST_PASSES = 1 << 23  # forward passes of all ranks in a step; planning so many takes minutes
ScheduleName: TypeAlias = Literal["1f1b", "interleaved"]
# (stage, microbatch) -> time of the forward pass; the backward pass counts as twice as long
Work: TypeAlias = Callable[[int, int], float]


class Op(NamedTuple):
    """A forward or backward pass of one microbatch through one stage."""

    forward: bool
    microbatch: int
    chunk: int  # which of the rank's stages, from 0 in order of depth


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The passes that every rank of a pipeline runs in one optimizer step, in order."""

    ranks: int  # p
    chunks: int  # stages per rank, v; a rank's chunk c is stage ``c * p + rank``
    microbatches: int  # n
    programs: tuple[tuple[Op, ...], ...]  # the ``2 n v`` passes of each rank
    bubble: float = 0.0  # share of the step that ranks wait if all passes of a kind take equally long


def make_schedule(ranks: int, microbatches: int, *, chunks: int = 1) -> Schedule:
    """Make the schedule of a pipeline's step for any number of microbatches."""
    _check_sizes(ranks=ranks, microbatches=microbatches, chunks=chunks)
    forwards = _visits(ranks, microbatches, range(chunks))
    backwards = _visits(ranks, microbatches, range(chunks)[::-1])
    total = len(forwards)

    # Megatron-LM's warm-up suffices unless chunks > 1 and n is not a multiple of p; then the last group of
    # microbatches is short (see ``_visits``). The order with all forward passes first always works.
    for extra in range(total + 1):
        warm_ups = [min(total, _warm_up(rank, ranks, chunks) + extra) for rank in range(ranks)]
        programs = tuple(_program(forwards, backwards, warm_up) for warm_up in warm_ups)
        schedule = Schedule(ranks=ranks, chunks=chunks, microbatches=microbatches, programs=programs)
        lines = timeline(schedule, lambda stage, microbatch: 1.0)
        if lines is not None:
            busy = 3.0 * total  # time of a rank; a backward pass takes twice as long as a forward pass
            step = max(line[-1].end for line in lines)
            return replace(schedule, bubble=1.0 - busy / step)

    raise AssertionError("a schedule with all forward passes first must work")


def _check_sizes(**sizes: int) -> None:
    for name, number in sizes.items():
        whole_number(number, name, least=1)
    advice = "It is the product of all sizes; lower one."
    whole_number(math.prod(sizes.values()), "passes", most=_MOST_PASSES, advice=advice)


def _visits(ranks: int, microbatches: int, chunks: Sequence[int]) -> list[tuple[int, int]]:
    """List a rank's (microbatch, chunk) pairs: groups of p microbatches visit all chunks one by one."""
    if len(chunks) == 1:
        return [(m, chunks[0]) for m in range(microbatches)]
    groups = [range(i, min(i + ranks, microbatches)) for i in range(0, microbatches, ranks)]
    return [(m, chunk) for group in groups for chunk in chunks for m in group]


def _warm_up(rank: int, ranks: int, chunks: int) -> int:
    """Return how many forward passes come before forward and backward alternate, as in Megatron-LM."""
    ranks_behind = ranks - rank - 1
    if chunks == 1:
        return ranks_behind
    return 2 * ranks_behind + (chunks - 1) * ranks


def _program(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], warm_up: int
) -> tuple[Op, ...]:
    """Order a rank's passes: first ``warm_up`` forward passes, then forward and backward in turn."""
    run_forward = [Op(True, *visit) for visit in forwards]
    run_backward = [Op(False, *visit) for visit in backwards]
    steady = [op for pair in zip(run_forward[warm_up:], run_backward, strict=False) for op in pair]
    return (*run_forward[:warm_up], *steady, *run_backward[len(run_forward) - warm_up :])


class Timed(NamedTuple):
    """The start and end of a pass in a simulated schedule, in the unit of the given work."""

    op: Op
    start: float
    end: float


def timeline(schedule: Schedule, work: Work) -> list[list[Timed]] | None:
    """Simulate a step; return when passes start and end, or None if ranks wait for each other forever."""
    p = schedule.ranks
    last_stage = p * schedule.chunks - 1
    done: dict[tuple[bool, int, int], float] = {}  # (forward, stage, microbatch) -> when the pass ended
    lines: list[list[Timed]] = [[] for _ in range(p)]
    ended = [0] * p  # how many passes of each rank have ended
    progressed = True
    while progressed:
        progressed = False
        for rank, program in enumerate(schedule.programs):
            while ended[rank] < len(program):
                op = program[ended[rank]]
                stage = op.chunk * p + rank
                needs = _needs(op, stage, last_stage)
                if any(need not in done for need in needs):
                    break

                cost = work(stage, op.microbatch) * (1.0 if op.forward else 2.0)
                free = lines[rank][-1].end if lines[rank] else 0.0
                start = max([free, *(done[need] for need in needs)])
                lines[rank].append(Timed(op, start, start + cost))
                done[op.forward, stage, op.microbatch] = start + cost
                ended[rank] += 1
                progressed = True
    if ended != [len(program) for program in schedule.programs]:
        return None
    return lines


def _needs(op: Op, stage: int, last_stage: int) -> list[tuple[bool, int, int]]:
    """Return the passes (forward, stage, microbatch) that have to end before a pass begins."""
    if op.forward:
        return [] if stage == 0 else [(True, stage - 1, op.microbatch)]
    forward_here = (True, stage, op.microbatch)
    if stage == last_stage:
        return [forward_here]
    return [forward_here, (False, stage + 1, op.microbatch)]


def expected_bubble(ranks: int, microbatches: int, *, chunks: int = 1) -> float:
    """Compute the share of a step's time that ranks wait if all passes of a kind take equally long.

    For p ranks, n microbatches and v chunks it is ``(p - 1) / (v n + p - 1)``; Megatron-LM, section 2.2,
    divides by ``v n``. If v > 1 and n is not a multiple of p, ranks wait longer.
    """
    return make_schedule(ranks, microbatches, chunks=chunks).bubble
