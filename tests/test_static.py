"""Trial runs and recorded steps are marked for as long as they last, also one inside another."""

from __future__ import annotations

from lightning_thd._static import only_looking, shapes_are_static, static_shapes, trial_runs


def test_a_trial_inside_a_trial_leaves_the_outer_one_a_trial() -> None:
    # ``info_nce`` runs its first pass as a trial, also inside the trial of a capture.
    counted: list[str] = []
    hook = only_looking(counted.append)
    with trial_runs():
        with trial_runs():
            hook("inner trial")
        hook("outer trial")
    hook("training")
    assert counted == ["training"], "a hook counted a trial run, or missed a training run"


def test_a_recording_inside_a_recording_leaves_the_outer_one_recorded() -> None:
    with static_shapes():
        with static_shapes():
            assert shapes_are_static()
        assert shapes_are_static(), "the end of the inner recording ended the outer one"
    assert not shapes_are_static()
