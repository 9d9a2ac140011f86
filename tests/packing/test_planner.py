import itertools
import json
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_thd.alignment import Alignment
from lightning_thd.packing import Cost, LengthSummary, PackPlanner, Packs, Sequences, balance

from .shapes import draw


def run_epoch(planner: PackPlanner, epoch: int, dp: int) -> dict[int, list[tuple[int, int]]]:
    """Tokens of each sequence used in an epoch: {index: list of (start, stop)}, checking each step's form."""
    used = {}
    for k in range(len(planner)):
        plan = planner.step(epoch, k, dp)
        by_rank = plan.spans_by_rank()
        assert len(by_rank) == dp
        assert {len(rank) for rank in by_rank} == {plan.num_microbatches}
        for spans in itertools.chain(*by_rank):
            for index, start, stop in zip(spans.index, spans.start, spans.stop, strict=True):
                used.setdefault(int(index), []).append((int(start), int(stop)))
    return used


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=80),
    batch=st.sampled_from([Packs(4), Packs(8), Sequences(7), Sequences(1), Sequences(500)]),
    oversize=st.sampled_from(["drop", "truncate", "split", "own_pack"]),
    align=st.sampled_from([None, Alignment(sequence_multiple=4, total_multiple=16)]),
    dp=st.sampled_from([1, 2, 4]),
    window=st.integers(1, 100),
)
def test_an_epoch_holds_every_token_once_below_the_cap(
    lengths: object, batch: Packs | Sequences, oversize: str, align: Alignment | None, dp: int, window: int
) -> None:
    capacity = 36
    limit = 36 if align is None else 32
    if not any(n > 0 and (n <= limit or oversize != "drop") for n in lengths):
        return
    planner = PackPlanner(
        lengths, capacity, global_batch=batch, oversize=oversize, align=align, window=window, seed=3
    )

    for epoch in (0, 1):
        used = run_epoch(planner, epoch, dp)
        for i, length in enumerate(lengths):
            pieces = sorted(used.get(i, []))
            tokens = min(length, limit) if oversize == "truncate" else length
            tokens = 0 if oversize == "drop" and length > limit else tokens
            assert [n for piece in pieces for n in range(*piece)] == list(range(tokens))

    for k in range(len(planner)):
        for spans in itertools.chain(*planner.step(0, k, dp).spans_by_rank()):
            padded = sum(n if align is None else align.padded_length(n) for n in spans.lengths.tolist())
            slots = padded if align is None else align.padded_total(padded)
            assert slots <= capacity or (oversize == "own_pack" and len(spans) == 1)


@pytest.mark.parametrize("batch", [Packs(8), Sequences(50)])
def test_a_step_is_a_pure_function(batch: Packs | Sequences) -> None:
    """Any order of asking, another planner, a pickled one: the same plan."""

    def plan(planner: PackPlanner, k: int) -> tuple[list[int], list[int]]:
        step = planner.step(np.int64(1), k, 4)
        return step.spans.index.tolist(), step.offsets.tolist()

    lengths = draw("chat", 700)
    planner = PackPlanner(lengths, 8192, global_batch=batch, window=64)
    forward = [plan(planner, k) for k in range(len(planner))]
    for k in range(len(planner)):  # another number of ranks: the same sequences in every step
        sets = [sorted(planner.step(1, k, dp).spans.index.tolist()) for dp in (1, 2, 4, 8)]
        assert sets[0] == sets[1] == sets[2] == sets[3]
    backward = [plan(planner, k) for k in reversed(range(len(planner)))][::-1]
    cost = Cost(linear=np.int64(12 * 4096), quadratic=1)
    numpys = {"global_batch": type(batch)(np.int64(batch.n)), "cost": cost}
    others = [
        PackPlanner(lengths.astype(np.uint16), 8192, global_batch=batch, window=64),
        PackPlanner(lengths.tolist(), 8192, global_batch=batch, window=64, counts=planner.counts),
        pickle.loads(pickle.dumps(planner)),
        PackPlanner(lengths, np.int64(8192), window=np.int64(64), **numpys),
    ]
    assert forward == backward
    for other in others:
        assert other.fingerprint() == planner.fingerprint()
        assert forward == [plan(other, k) for k in range(len(planner))]


def test_counts_what_happens_to_oversize_sequences() -> None:
    lengths = [5, 20, 8, 17]
    for oversize, name in (("truncate", "truncated"), ("split", "split"), ("own_pack", "own_pack")):
        planner = PackPlanner(lengths, 8, global_batch=Sequences(4), oversize=oversize)
        plan = planner.step(0, 0, 1)
        lost = 21 if name == "truncated" else 0
        assert (planner.entries.counts[name], planner.entries.counts["tokens_lost"]) == (2, lost)
        assert plan.real_tokens == sum(lengths) - lost
        assert plan.sequences == 4

    lengths = np.where(np.arange(1_000) % 3 == 0, 9_000, 10)
    planner = PackPlanner(lengths, 8192, global_batch=Sequences(100), oversize="drop")
    assert planner.entries.counts["dropped"] == 334
    assert planner.entries.counts["tokens_lost"] == 334 * 9_000

    steps = [planner.step(0, k, 2) for k in range(len(planner))]
    assert [step.sequences for step in steps] == [100] * 6 + [66]  # exactly n, although some are left out
    assert sorted(np.concatenate([s.spans.index for s in steps])) == [i for i in range(1_000) if i % 3]

    plan = PackPlanner([20], 8, global_batch=Sequences(1), oversize="split").step(0, 0, 1)
    assert plan.spans.start.tolist() == [0, 8, 16]
    assert plan.spans.stop.tolist() == [8, 16, 20]
    assert plan.spans.continued.tolist() == [True, True, False]


def test_a_scheduler_of_ones_own_takes_the_place_of_balance() -> None:
    seen = []

    def backwards(
        lengths: object, capacity: int, *, dp: int, cost: Cost
    ) -> list[list[npt.NDArray[np.int64]]]:
        seen.append((lengths.tolist(), capacity))
        return [rank[::-1] for rank in balance(lengths, capacity, dp=dp, cost=cost)]

    align = Alignment(sequence_multiple=4, total_multiple=16)
    planner = PackPlanner([5, 9], 40, global_batch=Sequences(2), scheduler=backwards, align=align)
    assert run_epoch(planner, 0, 2).keys() == {0, 1}
    assert (sorted(seen[0][0]), seen[0][1]) == ([8, 12], 32)
    plain = PackPlanner([5, 9], 40, global_batch=Sequences(2), align=align)
    assert planner.fingerprint() != plain.fingerprint()


def test_steps_of_sequences_do_not_depend_on_what_they_are_padded_to() -> None:
    lengths = draw("chat", 400)
    align = Alignment.for_(cp=2, tp=2, sequence_parallel=True)
    planner = PackPlanner(lengths, 8192, global_batch=Sequences(40))
    other = PackPlanner(lengths, 8192, global_batch=Sequences(40), align=align)
    assert other.resume(planner.state(3, 7)) == (3, 7)
    assert sorted(planner.step(3, 7, 4).spans.index) == sorted(other.step(3, 7, 2).spans.index)
    tight = PackPlanner([*lengths, 8191], 8191, global_batch=Sequences(40))
    with pytest.raises(ValueError, match="multiples was None, is"):
        PackPlanner([*lengths, 8191], 8191, global_batch=Sequences(40), align=align, oversize="drop").resume(
            tight.state(0, 0)
        )


BILLION = 10**9 + 5


class Virtual:
    """A billion lengths that nobody holds."""

    def __init__(self, count: int, *, summary: LengthSummary | None = None) -> None:
        self.count = count
        self.largest_read = 0
        if summary is not None:
            self.summary = summary

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, positions: npt.NDArray[np.int64]) -> object:
        self.largest_read = max(self.largest_read, len(positions))
        return positions % 997 + 1


def test_virtual_lengths_are_planned_without_being_read() -> None:
    summary = LengthSummary(count=BILLION, total=499 * BILLION, shortest=1, longest=997, digest="known")
    lengths = Virtual(BILLION, summary=summary)
    planner = PackPlanner(lengths, 8192, global_batch=Sequences(512))
    assert len(planner) == -(-(BILLION) // 512)
    last = planner.step(0, len(planner) - 1, 8)
    assert last.sequences == BILLION % 512
    assert lengths.largest_read <= 512
    assert planner.settings["lengths"] == "known"


def test_the_tail_of_an_epoch_is_spread_over_all_ranks_or_dropped_and_counted() -> None:
    # Nine sequences in three packs, eight wanted: eight microbatches run, none over the cap, one double.
    plan = PackPlanner([4] * 9, 12, global_batch=Packs(8)).step(0, 0, 4)
    assert plan.num_microbatches == 2
    assert sorted(len(m) for rank in plan.indices_by_rank() for m in rank) == [1] * 7 + [2]
    for batch in (Packs(4), Sequences(64)):
        planner = PackPlanner(draw("chat", 300), 8192, global_batch=batch, window=50, tail="drop")
        for epoch in (0, 1):
            ran = sum(planner.step(epoch, k, 1).sequences for k in range(len(planner)))
            assert ran + planner.tail_dropped(epoch) == 300 > ran


CHANGES = {
    "capacity": {"capacity": 4096},
    "global_batch": {"global_batch": Sequences(41)},
    "seed": {"seed": 1},
    "oversize": {"oversize": "drop"},
    "tail": {"tail": "drop"},
    "window": {"window": 10},
    "multiples": {"align": Alignment(sequence_multiple=2, total_multiple=2), "global_batch": Packs(8)},
    "cost": {"cost": Cost(linear=1, quadratic=1)},
    "lengths": {"lengths": [10] * 399 + [11]},
    "sequences": {"lengths": [10] * 401},
    "schedule": {"schedule": [0] * 400, "global_batch": Packs(8)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_of_changed_settings_is_refused_by_name(name: str) -> None:
    settings = {"lengths": [10] * 400, "capacity": 8192, "global_batch": Sequences(40)}
    planner = PackPlanner(**settings)
    state = json.loads(json.dumps(planner.state(0, 3)))
    assert PackPlanner(**settings).resume(state) == (0, 3)
    with pytest.raises(ValueError, match=rf"other data or settings \(.*{name} was .*, is .*Restore the old"):
        PackPlanner(**settings | CHANGES[name]).resume(state)


def schedule(numbers: list[float], lengths: tuple[int, ...] = (4, 3, 2, 5, 8), **rest: Any) -> PackPlanner:
    return PackPlanner(list(lengths), 8, **{"global_batch": Packs(2), "schedule": numbers, **rest})


def packs_of(planner: PackPlanner, epoch: int, dp: int = 1) -> list[list[tuple[int, ...]]]:
    steps = [planner.step(epoch, k, dp).indices_by_rank() for k in range(len(planner))]
    return [sorted(tuple(sorted(m.tolist())) for rank in step for m in rank) for step in steps]


def test_packs_of_a_schedule_are_the_ones_given_in_their_order_every_epoch() -> None:
    planner = schedule([7, 0, 0, 1, 9])
    assert packs_of(planner, 0) == packs_of(planner, 1) == [[(1, 2), (3,)], [(0,), (4,)]]
    assert packs_of(planner, 0, dp=2) == packs_of(planner, 0)
    assert schedule([0, 1], lengths=(9, 3), oversize="own_pack").entries.counts["own_pack"] == 1
    empty = schedule([0, 0, 1, 2], lengths=(4, 0, 3, 0), global_batch=Packs(1))
    assert packs_of(empty, 0) == [[(0,)], [(2,)]]


def changed(value: int, at: int | slice) -> Any:
    lengths = np.array([5, 3, 4, 4])
    planner = PackPlanner(lengths, 8, global_batch=Packs(1))
    lengths[at] = value
    return planner.step(0, 0, 1)


class Faulty:
    """Lengths that answer wrongly."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, positions: object) -> list[int]:
        return [1, 2]


SMALL = {"lengths": [5, 3, 4], "capacity": 8, "global_batch": Packs(2)}
THREE = PackPlanner([5, 3, 4, 4], 8, global_batch=Packs(3))
FIVE = (9, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"capacity": 0}, "capacity=0; wanted 1 or more"),
        ({"global_batch": 8}, r"global_batch=8: pass Packs\(n\) or Sequences\(n\)"),
        ({"window": 0}, "window=0; wanted 1 or more"),
        ({"oversize": "cut"}, "'cut'; wanted one of error, drop"),
        ({"lengths": []}, "lengths is empty: there is no sequence"),
        ({"lengths": [5, 9]}, "Sequence 1 has 9 tokens but at most 8 fit a pack. Set oversize="),
        ({"lengths": [5, -1]}, "Sequence 1 has -1 tokens"),
        ({"lengths": [5.0]}, "holds float64"),
        ({"lengths": 7}, "lengths is a int. Pass an array of ints"),
        ({"lengths": Faulty()}, r"lengths\[...\] answered 3 positions with int64"),
        ({"lengths": [9, 20], "oversize": "drop"}, "None of the 2 sequences is left.*2 are longer than the"),
        ({"global_batch": Sequences(9), "tail": "drop"}, "is more than the 3 in"),
        ({"global_batch": Packs(9), "tail": "drop"}, "is more than the 2 .*Set tail='pad'"),
        ({"scheduler": balance}, r"A scheduler cannot serve Packs\(n=2\)"),
        ({"schedule": [0, 1, 2], "global_batch": Sequences(2)}, r"A schedule cannot serve Sequences\(n=2\)"),
        ({"loss_tokens": [1]}, "loss_tokens has 1 counts for 3 sequences"),
        ({"align": Alignment(total_multiple=16)}, "capacity=8 is below total_multiple=16.*Raise capacity"),
        ({"counts": np.array([7, 7], np.uint32)}, "counts has 2 windows but there are 1"),
        (lambda: Packs(0), r"Packs.n=0; wanted .* Pass Packs\("),
        (lambda: Sequences(True), r"Sequences.n is a bool.*wanted .* Pass Sequences\("),
        (lambda: THREE.step(0, 1, 1), "Step 1 of epoch 0 was requested, but epochs have 1 steps"),
        (lambda: THREE.step(-1, 0, 1), "Step 0 of epoch -1"),
        (lambda: THREE.step(0, 0, 2), r"Packs\(n=3\) cannot be shared by dp=2 ranks. Pass a multiple"),
        (lambda: THREE.step(0, 0, 3).microbatches(3), r"rank=3 was asked of a plan for dp=3. Pass a rank in"),
        (lambda: THREE.state(0, 2), "step=2; wanted at most 1"),
        (lambda: THREE.resume({"epoch": 0}), "seed was None, is 0"),
        (lambda: changed(8, slice(4)), "Window 0 has 4 packs, but 2 were counted. The lengths changed"),
        (lambda: changed(9, 2), "The lengths changed: sequence 2 is empty or too long. Make a new planner"),
        (lambda: schedule([0, 1]), r"int64 \(2,\) for 5 sequences; wanted one number"),
        (lambda: schedule([0.0, 1, 2, 3, 4]), "schedule is float64"),
        (lambda: schedule([0, 1, -2, 3, 4]), "wanted one number >= 0 each"),
        (lambda: schedule([0, 3, 3, 3, 4]), "Microbatch 3 of the schedule takes 10 slots, but 8 of a pack"),
        (lambda: schedule([0, 1, 2, 3, 4], oversize="split"), "changes sequences that the schedule"),
        (lambda: schedule([0] * 5, lengths=FIVE, oversize="own_pack"), "Microbatch 0 .* takes 13"),
    ],
)
def test_says_what_is_wrong(given: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        given() if callable(given) else PackPlanner(**SMALL | given)


def test_a_planner_of_one_source_shares_nothing() -> None:
    planner = PackPlanner([5, 3, 4, 4], 8, global_batch=Packs(2))
    rows = np.array([2, 0, 3])
    assert planner.held(rows).tolist() == planner.source_of(rows).tolist() == [0, 0, 0]
    assert not planner.shares(rows)
    assert (planner.names, planner.epochs_alike, planner.sharing) == ((), True, None)
    assert planner.step(0, 0, 2).degree_table.tolist() == [[1], [1]]
