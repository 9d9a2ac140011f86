import itertools
import pickle

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_thd.alignment import Alignment
from lightning_thd.packing import Cost, LengthSummary, PackPlanner, Packs, Sequences, balance, pack_lengths

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


def expected_tokens(length: int, limit: int | None, oversize: str) -> int:
    if oversize == "truncate":
        return min(length, limit)
    if oversize == "drop" and length > limit:
        return 0
    return length


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
    capacity, limit = 36, 36 if align is None else 32
    if not any(n > 0 and (n <= limit or oversize != "drop") for n in lengths):
        return
    planner = PackPlanner(
        lengths, capacity, global_batch=batch, oversize=oversize, align=align, window=window, seed=3
    )
    for epoch in (0, 1):
        used = run_epoch(planner, epoch, dp)
        for i, length in enumerate(lengths):
            pieces = sorted(used.get(i, []))
            tokens = expected_tokens(length, limit, oversize)
            assert [n for piece in pieces for n in range(*piece)] == list(range(tokens))
    for k in range(len(planner)):
        for spans in itertools.chain(*planner.step(0, k, dp).spans_by_rank()):
            padded = sum(n if align is None else align.padded_length(n) for n in spans.lengths.tolist())
            slots = padded if align is None else align.padded_total(padded)
            assert slots <= capacity or (oversize == "own_pack" and len(spans) == 1)


@pytest.mark.parametrize("batch", [Packs(8), Sequences(50)])
def test_another_dp_gives_the_same_sequences_in_every_step(batch: Packs | Sequences) -> None:
    planner = PackPlanner(draw("chat", 700), 8192, global_batch=batch, window=64, seed=5)
    for k in range(len(planner)):
        sets = [sorted(planner.step(2, k, dp).spans.index.tolist()) for dp in (1, 2, 4, 8)]
        assert sets[0] == sets[1] == sets[2] == sets[3]


@pytest.mark.parametrize("batch", [Packs(8), Sequences(50)])
def test_a_step_is_a_pure_function(batch: Packs | Sequences) -> None:
    """Any order of asking, another planner, a pickled one: the same plan."""

    def plan(planner: PackPlanner, k: int) -> tuple[list[int], list[int]]:
        step = planner.step(1, k, 4)
        return step.spans.index.tolist(), step.offsets.tolist()

    lengths = draw("chat", 700)
    planner = PackPlanner(lengths, 8192, global_batch=batch, window=64)
    forward = [plan(planner, k) for k in range(len(planner))]
    backward = [plan(planner, k) for k in reversed(range(len(planner)))][::-1]
    others = [
        PackPlanner(lengths.astype(np.uint16), 8192, global_batch=batch, window=64),
        PackPlanner(lengths.tolist(), 8192, global_batch=batch, window=64, counts=planner.counts),
        pickle.loads(pickle.dumps(planner)),
    ]
    assert forward == backward
    for other in others:
        assert other.fingerprint() == planner.fingerprint()
        assert forward == [plan(other, k) for k in range(len(planner))]


def test_sequences_gives_exactly_n_and_the_rest_last() -> None:
    planner = PackPlanner(draw("long", 1_000), 8192, global_batch=Sequences(300))
    assert [planner.step(0, k, 8).sequences for k in range(len(planner))] == [300, 300, 300, 100]
    dropped = PackPlanner(draw("long", 1_000), 8192, global_batch=Sequences(300), tail="drop")
    assert [dropped.step(0, k, 8).sequences for k in range(len(dropped))] == [300, 300, 300]
    assert [dropped.tail_dropped(epoch) for epoch in (0, 1)] == [100, 100]
    assert planner.tail_dropped(0) == 0


def test_sequences_n_is_exact_although_some_are_left_out() -> None:
    lengths = np.where(np.arange(1_000) % 3 == 0, 9_000, 10)
    planner = PackPlanner(lengths, 8192, global_batch=Sequences(100), oversize="drop")
    assert planner.entries.counts["dropped"] == 334
    assert planner.entries.counts["tokens_lost"] == 334 * 9_000
    steps = [planner.step(0, k, 2) for k in range(len(planner))]
    assert [step.sequences for step in steps] == [100] * 6 + [66]
    assert sorted(np.concatenate([s.spans.index for s in steps])) == [i for i in range(1_000) if i % 3]


def test_packs_are_those_of_best_fit_inside_each_window() -> None:
    lengths = draw("long", 1_000)
    planner = PackPlanner(lengths, 8192, global_batch=Packs(1), window=1_000)
    assert len(planner) == planner.num_packs == len(pack_lengths(lengths, 8192))
    totals = sorted(planner.step(0, k, 1).real_tokens for k in range(len(planner)))
    assert totals == sorted(pack_lengths(lengths, 8192).totals(lengths).tolist())


def test_the_tail_of_packs_is_spread_over_all_ranks() -> None:
    """Nine sequences in three packs, eight wanted: eight microbatches run, none over the cap, one double."""
    planner = PackPlanner([4] * 9, 12, global_batch=Packs(8))
    assert len(planner) == 1
    plan = planner.step(0, 0, 4)
    assert plan.num_microbatches == 2
    assert sorted(len(m) for rank in plan.indices_by_rank() for m in rank) == [1] * 7 + [2]


def test_dropping_the_tail_of_packs_counts_its_sequences() -> None:
    lengths = draw("chat", 300)
    planner = PackPlanner(lengths, 8192, global_batch=Packs(4), window=50, tail="drop")
    assert planner.num_packs % 4
    for epoch in (0, 1):
        ran = sum(planner.step(epoch, k, 1).sequences for k in range(len(planner)))
        assert ran + planner.tail_dropped(epoch) == 300


def test_counts_what_happens_to_oversize_sequences() -> None:
    lengths = [5, 20, 8, 17]
    for oversize, name in (("truncate", "truncated"), ("split", "split"), ("own_pack", "own_pack")):
        planner = PackPlanner(lengths, 8, global_batch=Sequences(4), oversize=oversize)
        plan = planner.step(0, 0, 1)
        assert getattr(plan, name) == planner.entries.counts[name] == 2
        lost = 21 if name == "truncated" else 0
        assert plan.truncated_tokens == planner.entries.counts["tokens_lost"] == lost
        assert plan.real_tokens == sum(lengths) - plan.truncated_tokens
        assert plan.sequences == 4
    plan = PackPlanner([20], 8, global_batch=Sequences(1), oversize="split").step(0, 0, 1)
    assert plan.spans.start.tolist() == [0, 8, 16]
    assert plan.spans.stop.tolist() == [8, 16, 20]
    assert plan.spans.continued.tolist() == [True, True, False]


def test_plans_report_work_and_imbalance() -> None:
    plan = PackPlanner([4, 2, 2], 8, global_batch=Sequences(3), cost=Cost(linear=1, quadratic=0)).step(
        0, 0, 2
    )
    assert plan.work.tolist() == [[4.0], [4.0]]
    assert plan.imbalance == 1.0
    uneven = PackPlanner([4, 2], 8, global_batch=Sequences(2), cost=Cost(linear=1, quadratic=0)).step(0, 0, 2)
    assert uneven.imbalance == pytest.approx(4 / 3)


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
    assert (
        planner.fingerprint() != PackPlanner([5, 9], 40, global_batch=Sequences(2), align=align).fingerprint()
    )


def test_state_leads_back_to_the_step_on_any_number_of_ranks() -> None:
    lengths = draw("chat", 400)
    planner = PackPlanner(lengths, 8192, global_batch=Sequences(40))
    state = pickle.loads(pickle.dumps(planner.state(3, 7)))
    later = PackPlanner(lengths.tolist(), 8192, global_batch=Sequences(40))
    assert later.resume(state) == (3, 7)
    assert sorted(planner.step(3, 7, 2).spans.index) == sorted(later.step(3, 7, 4).spans.index)


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


FORTY = Sequences(40)
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
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_setting_is_refused_by_name(name: str) -> None:
    def make(
        lengths: object = (10,) * 400,
        capacity: int = 8192,
        global_batch: Packs | Sequences = FORTY,
        **rest: object,
    ) -> PackPlanner:
        return PackPlanner(list(lengths), capacity, global_batch=global_batch, **rest)

    state = make().state(0, 3)
    with pytest.raises(ValueError, match=rf"other data or settings \(.*{name} was .*, is .*Restore the old"):
        make(**CHANGES[name]).resume(state)


BILLION = 10**9 + 5


class Virtual:
    """A billion lengths that nobody holds."""

    def __init__(self, count: int, *, summary: LengthSummary | None = None) -> None:
        self.count, self.largest_read = count, 0
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "capacity=0; wanted 1 or more"),
        ({"global_batch": 8}, r"global_batch=8: pass Packs\(n\) or Sequences\(n\)"),
        ({"window": 0}, "window=0; wanted 1 or more"),
        ({"oversize": "cut"}, "'cut'; wanted one of error, drop"),
        ({"tail": "keep"}, "'keep'; wanted one of pad, drop"),
        ({"lengths": []}, "lengths is empty: there is no sequence"),
        ({"lengths": [5, 9]}, "Sequence 1 has 9 tokens but at most 8 fit a pack. Set oversize="),
        ({"lengths": [5, -1]}, "Sequence 1 has -1 tokens"),
        ({"lengths": [5.0]}, "holds float64"),
        ({"lengths": 7}, "lengths is a int. Pass an array of ints"),
        ({"lengths": [9, 20], "oversize": "drop"}, "None of the 2 sequences is left.*2 are longer than the"),
        ({"lengths": [0, 0]}, "None of the 2 sequences is left: 2 are empty"),
        ({"global_batch": Sequences(9), "tail": "drop"}, "has 3 sequences, too few for one step of"),
        ({"global_batch": Packs(9), "tail": "drop"}, "has 2 packs, too few for one step.*Set tail='pad'"),
        ({"scheduler": balance}, r"A scheduler cannot serve Packs\(n=2\)"),
        ({"schedule": [0, 1, 2], "global_batch": Sequences(2)}, r"A schedule cannot serve Sequences\(n=2\)"),
        ({"loss_tokens": [1]}, "loss_tokens has 1 counts but there are 3 sequences"),
        ({"align": Alignment(total_multiple=16)}, "capacity=8 is below total_multiple=16.*Raise capacity to"),
        ({"counts": np.array([7, 7], np.uint32)}, "counts has 2 windows but there are 1"),
    ],
)
def test_says_what_is_wrong(arguments: dict[str, object], message: str) -> None:
    arguments = {"lengths": [5, 3, 4], "capacity": 8, "global_batch": Packs(2)} | arguments
    with pytest.raises(ValueError, match=message):
        PackPlanner(arguments.pop("lengths"), arguments.pop("capacity"), **arguments)


def test_says_what_is_wrong_with_a_request() -> None:
    planner = PackPlanner([5, 3, 4, 4], 8, global_batch=Packs(3))
    with pytest.raises(IndexError, match="Step 1 of epoch 0 was asked of epochs of 1 steps"):
        planner.step(0, 1, 1)
    with pytest.raises(IndexError, match="Step 0 of epoch -1"):
        planner.step(-1, 0, 1)
    with pytest.raises(ValueError, match="dp=0; wanted 1 or more"):
        planner.step(0, 0, 0)
    with pytest.raises(ValueError, match=r"Packs\(n=3\) cannot be shared by dp=2 ranks.*Use Packs\(4\)"):
        planner.step(0, 0, 2)
    with pytest.raises(ValueError, match=r"rank=3 was asked of a plan for dp=3. Pass a rank in \[0, 3\)"):
        planner.step(0, 0, 3).microbatches(3)
    with pytest.raises(ValueError, match="step=2; wanted at most 1"):
        planner.state(0, 2)


def test_changed_lengths_are_noticed() -> None:
    lengths = np.array([5, 3, 4, 4])
    planner = PackPlanner(lengths, 8, global_batch=Packs(1))
    lengths[:] = [8, 8, 8, 8]
    with pytest.raises(ValueError, match=r"Window 0 has 4 packs, but 2 were counted. The lengths changed"):
        planner.step(0, 0, 1)
    lengths[2] = 9
    with pytest.raises(ValueError, match="The lengths changed since the planner was made: sequence 2"):
        planner.step(0, 0, 1)
