"""Recurrent layers on shared prefixes run every slot once, from the state of its branch point."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.models.families import recurrent
from lightning_thd.models.passing.adopt import run_delta_rule, scan_state_space
from lightning_thd.models.passing.branches import Branches, cut_at_branches
from tests.loss.test_prefixes import tree
from tests.models.families import build_in_double
from tests.models.passing import oracle
from tests.models.passing.test_scan import run, tensors, weights

KINDS = ("convolution", "state_space", "delta", "kimi")
# Every turn of an agent repeats all turns before it; the answers branch at different depths.
TURNS = [{"input_ids": list(range(3, 3 + n))} for n in (4, 7, 9, 20)]
ANSWERS = [{"input_ids": [*range(3, 3 + n), 50 + n]} for n in (1, 2, 8, 20)]


def batches() -> list[THDBatch]:
    samples = [*(tree(seed) for seed in range(4)), TURNS, TURNS + ANSWERS]
    return [THDBatch.collate(each, share_prefixes=True, pad_to=99) for each in samples]


def paths(batch: THDBatch) -> list[list[int]]:
    """Return the slots of every leaf's path, the pad's included."""
    prefixes = batch.prefixes
    return [x.tolist() for x in torch.split(prefixes.keys, list(prefixes.key_lengths))]


@pytest.mark.parametrize("batch", batches())
def test_a_tree_is_cut_only_where_sequences_branch(batch: THDBatch) -> None:
    prefixes = batch.prefixes
    stretches = cut_at_branches(prefixes.query_lengths, prefixes.branches)
    before = {b: a for path in paths(batch) for a, b in zip([-1, *path], path, strict=False)}
    after = {a: [b for b, other in before.items() if other == a] for a in before}
    # A stretch begins at a root, or where a slot goes on in several slots, or not in the next one.
    begins = [b for b, a in before.items() if a < 0 or len(after[a]) > 1 or b != a + 1]
    assert stretches.first.tolist() == sorted(begins)
    ends = (stretches.first + stretches.lengths - 1).tolist()
    for first, parent, level in zip(*map(np.ndarray.tolist, (stretches[0], *stretches[2:])), strict=True):
        assert (ends[parent] if parent >= 0 else -1) == before[first]
        assert level == (stretches.levels[parent] + 1 if parent >= 0 else 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", batches())
def test_outputs_and_gradients_are_those_of_whole_paths(kind: str, batch: THDBatch) -> None:
    slots = batch.input_ids.shape[0]
    t = {name: x.requires_grad_() for name, x in tensors(kind, slots).items()}
    by_slot = {name for name, x in t.items() if x.shape[0] == slots}

    # The oracle runs the whole path of every leaf alone, and keeps the leaf's own slots.
    expected = []
    for path, num_slots in zip(paths(batch), batch.prefixes.query_lengths, strict=True):
        alone = {name: x[path] if name in by_slot else x for name, x in t.items()}
        expected.append(run(kind, alone, None)[-num_slots:])
    want = torch.cat(expected)
    gradients = torch.autograd.grad((want * weights(want)).sum(), list(t.values()))

    out = run(kind, t, Branches(batch.boundaries))
    actual = torch.autograd.grad((out * weights(out)).sum(), list(t.values()))
    torch.testing.assert_close(out, want, rtol=0, atol=1e-9)
    torch.testing.assert_close(actual, gradients, rtol=1e-9, atol=1e-9)


def test_a_scan_runs_every_slot_once_and_keeps_one_state_a_branch() -> None:
    """48 answers of 4 tokens to a prompt of 96 are 288 slots, not 4,800."""
    prompt = list(range(3, 99))
    rows = [{"input_ids": [*prompt, *(100 + 4 * i + k for k in range(4))]} for i in range(48)]
    batch = THDBatch.collate(rows, share_prefixes=True)
    run_slots = []
    entered = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        run_slots.append(args[0].shape[0] * args[0].shape[1])
        state = kwargs["initial_states"]
        if state is not None:
            entered.append(state)
        return oracle.state_space(*args, **kwargs)

    t = {name: x.requires_grad_() for name, x in tensors("state_space", 288).items()}
    out = scan_state_space(
        counted,
        Branches(batch.boundaries),
        *(t["x"][None], t["dt"][None], t["decay"], t["b"][None], t["c"][None]),
        chunk_size=4,
    )
    out.sum().backward()
    assert sum(run_slots) == 288
    (states,) = entered
    assert len(states) == 48
    assert torch.equal(states, states[:1].expand_as(states))  # the prompt's


@pytest.mark.parametrize(
    ("family", "carries"), [("qwen3_next", True), ("mamba2", True), ("lfm2", True), ("mamba", False)]
)
def test_layers_carry_states_where_they_can(
    family: str, carries: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("run_carried", "run_unfolded"):
        original = getattr(recurrent, name)

        def noted(*args: Any, name: str = name, original: Any = original) -> Any:
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(recurrent, name, noted)
    causal_lm_loss(build_in_double(family), THDBatch.collate(TURNS, share_prefixes=True))
    assert set(calls) == {"run_carried" if carries else "run_unfolded"}


def test_a_state_that_a_layer_passes_itself_is_refused() -> None:
    x = torch.zeros(1, 20, 2, 3)
    carrier = Branches(THDBatch.collate(TURNS, share_prefixes=True).boundaries)
    with pytest.raises(
        ValueError, match="prefixes passes initial_state to its kernel. Set share_prefixes=False"
    ):
        run_delta_rule(oracle.delta_rule, carrier, x, x, x, x, x, initial_state=torch.zeros(1))
