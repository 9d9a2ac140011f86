"""Twenty steps of every family on every layout of stages give what one process gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from lightning_thd import Sequences
from tests.ranks import run_ranks
from tests.strategies.jobs import INTERLEAVED, Layout, check_stages, train, train_by_hand
from tests.wide import nothing_narrower

STEPS = 20
OPTIONS = {"max_steps": STEPS}
LAYOUTS = {
    2: [Layout(pp=2), Layout(pp=2, options=INTERLEAVED)],
    4: [
        Layout(pp=4),
        Layout(pp=2, dp=2),
        Layout(pp=2, cp=2),
        Layout(pp=2, tp=2),
        Layout(pp=2, dp=2, options=INTERLEAVED),
        Layout(pp=2, tp=2, options={"sequence_parallel": True}),
    ],
}
FAMILIES = ["llama@4", "qwen3_moe@4", "lfm2@4", "qwen3@4t", "gemma3@4t"]


def step_of(layout: Layout) -> Sequences:
    return Sequences(10 * layout.pp * layout.dp)  # no fewer microbatches than ranks


def train_in_turn(family: str, layouts: Sequence[Layout]) -> list[dict[str, Any]]:
    with nothing_narrower():
        return [train(family, layout, step_of(layout), trainer_options=OPTIONS) for layout in layouts]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world", [2, 4])
def test_twenty_steps_on_every_layout(
    family: str, world: int, record_property: Callable[[str, object], None]
) -> None:
    layouts = LAYOUTS[world]
    results = run_ranks(train_in_turn, world, family, layouts, timeout_s=1_500.0)
    for i, layout in enumerate(layouts):
        with nothing_narrower():
            expected = train_by_hand(family, layout, step_of(layout), steps=STEPS)
        name = f"{family} pp{layout.pp} dp{layout.dp} cp{layout.cp} tp{layout.tp} {layout.options}"
        record_property(name, check_stages([rank[i] for rank in results], expected))


@pytest.mark.slow
def test_twenty_steps_of_a_hybrid_that_computes_in_fp32(
    record_property: Callable[[str, object], None],
) -> None:
    # Rounding grows hundredfold in twenty steps, so it is the same packs on one process that are compared.
    layout = Layout(pp=4)
    results = run_ranks(train, 4, "qwen3_5@4", layout, step_of(layout), torch.float64, OPTIONS)
    (expected,) = run_ranks(train, 1, "qwen3_5@4", Layout(), step_of(layout), torch.float64, OPTIONS)
    record_property("qwen3_5@4 pp4", check_stages(results, expected, 1e-6))
