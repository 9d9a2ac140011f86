import json

import pytest

from lightning_thd.packing import PackPlanner, Sequences

PLANNER = PackPlanner([3] * 9, 8, global_batch=Sequences(1), seed=4)


def test_a_state_survives_json() -> None:
    state = json.loads(json.dumps(PLANNER.state(2, 5)))
    assert PLANNER.resume(state) == (2, 5)
    assert (state["seed"], state["fingerprint"]) == (4, PLANNER.fingerprint())
    assert PLANNER.resume(PLANNER.state(0, 9)) == (0, 9)  # an epoch may be over


@pytest.mark.parametrize(("epoch", "step"), [(-1, 0), (0, -1), (0, 10)])
def test_refuses_positions_outside(epoch: int, step: int) -> None:
    with pytest.raises(ValueError, match=r"(epoch|step)=-?\d+; wanted"):
        PLANNER.state(epoch, step)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "The state has no epoch, fingerprint, step; it holds nothing"),
        ({"epoch": 0, "sampler": 1}, "has no fingerprint, step; it holds epoch, sampler"),
        ({"epoch": 0, "step": 1, "fingerprint": "abc"}, "seed was None, is 4"),
        ({**PLANNER.state(0, 1), "fingerprint": "abc"}, "fingerprint was abc, is"),
    ],
)
def test_refuses_what_is_no_state_of_these_settings(state: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PLANNER.resume(state)
