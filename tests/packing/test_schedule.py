import pytest

from lightning_thd.packing import PackPlanner, Packs


def plan(
    schedule: list[float],
    lengths: tuple[int, ...] = (4, 3, 2, 5, 8),
    capacity: int = 8,
    n: int = 2,
    **rest: object,
) -> PackPlanner:
    return PackPlanner(list(lengths), capacity, global_batch=Packs(n), schedule=schedule, **rest)


def packs_of(planner: PackPlanner, epoch: int, dp: int = 1) -> list[list[tuple[int, ...]]]:
    found = []
    for k in range(len(planner)):
        step = planner.step(epoch, k, dp)
        found.append(sorted(tuple(sorted(m.tolist())) for rank in step.indices_by_rank() for m in rank))
    return found


def test_packs_are_the_ones_given_in_their_order_every_epoch() -> None:
    planner = plan([7, 0, 0, 1, 9])
    assert planner.num_packs == 4
    assert packs_of(planner, 0) == packs_of(planner, 1) == [[(1, 2), (3,)], [(0,), (4,)]]
    assert packs_of(planner, 0, dp=2) == packs_of(planner, 0)


def test_a_long_sequence_may_have_its_own_pack() -> None:
    planner = plan([0, 1], lengths=(9, 3), oversize="own_pack")
    assert planner.step(0, 0, 1).own_pack == 1


def test_another_schedule_is_another_plan() -> None:
    states = [plan(schedule).state(0, 1) for schedule in ([0, 1, 2, 3, 4], [0, 0, 2, 3, 4], [4, 3, 2, 1, 0])]
    assert len({state["fingerprint"] for state in states}) == 3
    with pytest.raises(ValueError, match=r"schedule was .* is "):
        plan([0, 1, 2, 3, 4]).resume(states[1])


@pytest.mark.parametrize(
    ("schedule", "rest", "message"),
    [
        ([0, 1], {}, r"shape \(2,\).*for 5 sequences. Pass one microbatch number a sequence"),
        ([0.0, 1, 2, 3, 4], {}, "type float64"),
        ([0, 1, -2, 3, 4], {}, "each at least 0"),
        ([0, 3, 3, 3, 4], {}, "Microbatch 3 of the schedule takes 10 slots, but 8 of a pack are usable"),
        ([0, 1, 2, 3, 4], {"oversize": "split"}, "oversize='split' changes sequences that the schedule"),
        ([0, 0, 0, 0, 0], {"lengths": (9, 1, 1, 1, 1), "oversize": "own_pack"}, "Microbatch 0 .* takes 13"),
    ],
)
def test_says_what_is_wrong(schedule: list[float], rest: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(schedule, **rest)


def test_empty_sequences_stay_out() -> None:
    assert packs_of(plan([0, 0, 1, 2], lengths=(4, 0, 3, 0), n=1), 0) == [[(0,)], [(2,)]]
