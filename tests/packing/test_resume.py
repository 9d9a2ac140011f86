import json

import pytest

from lightning_thd.packing.resume import fingerprint, make_state, read_state

SETTINGS = {"seed": 4, "capacity": 8, "multiples": [1, 1]}


def test_a_state_survives_json() -> None:
    state = json.loads(json.dumps(make_state(SETTINGS, epoch=2, step=5, num_steps=9)))
    assert read_state(SETTINGS, state) == (2, 5)
    assert (state["seed"], state["fingerprint"]) == (4, fingerprint(SETTINGS))


def test_order_of_settings_does_not_matter() -> None:
    assert fingerprint(SETTINGS) == fingerprint(dict(reversed(SETTINGS.items())))
    assert fingerprint(SETTINGS) != fingerprint(SETTINGS | {"seed": 5})


def test_an_epoch_may_be_over() -> None:
    assert read_state(SETTINGS, make_state(SETTINGS, epoch=0, step=9, num_steps=9)) == (0, 9)


@pytest.mark.parametrize(("epoch", "step"), [(-1, 0), (0, -1), (0, 10)])
def test_refuses_positions_outside(epoch: int, step: int) -> None:
    with pytest.raises(ValueError, match=rf"epoch={epoch}, step={step} is no position in epochs of 9 steps"):
        make_state(SETTINGS, epoch=epoch, step=step, num_steps=9)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "The state has no epoch, fingerprint, step; it holds nothing"),
        ({"epoch": 0, "sampler": 1}, "has no fingerprint, step; it holds epoch, sampler"),
        ({"epoch": 0, "step": 1, "fingerprint": "abc"}, "seed was None, is 4"),
        ({"epoch": 0, "step": 1, "fingerprint": "abc", "settings": SETTINGS}, "fingerprint was abc, is"),
    ],
)
def test_refuses_what_is_no_state_of_these_settings(state: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_state(SETTINGS, state)
