"""Padded groups: a permutation and back, for any causal function of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_thd.models.padded_groups import plan_groups, plan_static_group, run_grouped

LENGTHS = st.lists(st.integers(0, 200), min_size=1, max_size=30).filter(sum)


def running_sum(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.cumsum(1) if bias is None else (x + bias).cumsum(1)


@given(lengths=LENGTHS)
def test_a_causal_function_on_groups_is_the_function_on_every_sequence(lengths: list[int]) -> None:
    slots = sum(lengths)
    x = torch.arange(slots * 2, dtype=torch.float64).view(1, slots, 2).requires_grad_()
    groups = plan_groups(lengths, torch.device("cpu"))
    out = run_grouped(running_sum, (x,), {}, groups, slots)
    want = torch.cat([part.cumsum(1) for part in x.split(lengths, 1)], 1)
    assert torch.equal(out, want)
    weights = torch.randn_like(want)
    assert torch.allclose(*(torch.autograd.grad((y * weights).sum(), x)[0] for y in (out, want)))


@given(lengths=LENGTHS)
def test_padding_is_bounded_and_groups_are_few(lengths: list[int]) -> None:
    groups = plan_groups(lengths, torch.device("cpu"))
    real = [int((source < sum(lengths)).sum()) for source in groups.sources]
    assert sum(real) == sum(lengths)
    for source, count in zip(groups.sources, real, strict=True):
        assert source.shape[1] <= 32 or count >= source.numel() * 2 / 3
    assert len(groups.sources) <= 8  # log of 200 / 32 to the base 1.5, and one for the short ones


def test_worked_example() -> None:
    groups = plan_groups([2, 3], torch.device("cpu"))
    assert [source.tolist() for source in groups.sources] == [[[2, 3, 4], [0, 1, 5]]]
    assert groups.back.tolist() == [3, 4, 0, 1, 2]


def test_per_token_arguments_are_regrouped_wherever_they_stand() -> None:
    x, bias = torch.ones(1, 5, 1), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).view(1, 5, 1)
    groups = plan_groups([2, 3], torch.device("cpu"))
    want = torch.tensor([2.0, 5.0, 4.0, 9.0, 15.0]).view(1, 5, 1)
    assert torch.equal(run_grouped(running_sum, (x,), {"bias": bias}, groups, 5), want)
    pair = run_grouped(lambda x, both: (running_sum(x, both[0]), both[1]), (x, (bias, None)), {}, groups, 5)
    assert torch.equal(pair[0], want)
    assert pair[1] is None


def test_final_states_are_not_mistaken_for_tokens() -> None:
    groups = plan_groups([2, 3], torch.device("cpu"))
    x = torch.ones(1, 5, 1)
    out, state = run_grouped(lambda x: (x, torch.zeros(2, 3, 1)), (x,), {}, groups, 5)
    assert torch.equal(out, x)
    assert state is None


@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [64, 1], [0, 3, 0]])
def test_edges(lengths: list[int]) -> None:
    x = torch.randn(1, sum(lengths), 3)
    groups = plan_groups(lengths, torch.device("cpu"))
    assert torch.equal(run_grouped(lambda x: x, (x,), {}, groups, sum(lengths)), x)


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8), spare=st.integers(0, 4))
def test_a_group_of_fixed_size_does_what_fitted_groups_do(lengths: list[int], spare: int) -> None:
    slots, longest = sum(lengths), max(lengths) + spare
    if slots == 0 or len(lengths) * longest > 32 * slots:
        return
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    groups = plan_static_group(offsets, longest, slots)
    assert [tuple(source.shape) for source in groups.sources] == [(len(lengths), longest)]
    x = torch.randn(1, slots, 2)
    want = run_grouped(running_sum, (x,), {}, plan_groups(lengths, torch.device("cpu")), slots)
    assert torch.allclose(run_grouped(running_sum, (x,), {}, groups, slots), want)


def test_a_group_of_fixed_size_worked_example_and_limit() -> None:
    groups = plan_static_group(torch.tensor([0, 2, 5], dtype=torch.int32), 4, 5)
    assert groups.sources[0].tolist() == [[0, 1, 5, 5], [2, 3, 4, 5]]
    assert groups.back.tolist() == [0, 1, 4, 5, 6]
    with pytest.raises(
        ValueError, match=r"would run 2 sequences padded to 100 for 5 tokens. Install the fused"
    ):
        plan_static_group(torch.tensor([0, 2, 5], dtype=torch.int32), 100, 5)
