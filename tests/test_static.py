"""Trial runs and recorded steps are marked for as long as they last, also one inside another."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from lightning_thd._static import in_backward, only_looking, shapes_are_static, static_shapes, trial_runs


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


def test_only_what_autograd_runs_is_in_backward() -> None:
    answers: list[bool] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        answers.append(in_backward())
        return x.sin()

    loss = checkpoint(layer, torch.ones(2, requires_grad=True), use_reentrant=False).sum()
    loss.backward()
    assert answers == [False, True], "the forward pass and its recomputation in backward were not told apart"
    assert not in_backward(), "backward has ended"
