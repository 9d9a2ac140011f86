"""Three steps on any layout of ranks give the parameters of one process that saw every sequence alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, TypeAlias

import pytest
import torch

from lightning_thd import Packs, Sequences
from tests.ranks import run_ranks
from tests.strategies.jobs import STEPS, Layout, Run, family_model, train, train_all, train_by_hand
from tests.tiny import largest_error

Compare: TypeAlias = Callable[..., None]

# fp64: other orders of the same sums. fp32: eps=1e-5 keeps AdamW from amplifying rounding.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
WAYS = [
    {"context_parallel_layout": layout, "context_parallel_communication": communication}
    for layout, communication in (
        *product(["dual_chunk", "contiguous"], ["all_gather", "ulysses"]),
        *product(["dual_chunk", "contiguous", "striped"], ["needed", "ring"]),
        ("striped", "all_gather"),
    )
]
ALL_FAMILIES = ["qwen3", "mistral", "qwen3_moe", "lfm2"]  # dense, windowed, experts, hybrid


@pytest.fixture
def compare(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Run jobs on ranks and compare them with one process.

    ``pytest -m slow -o junit_family=xunit1 --junit-xml=FILE`` keeps the errors found.
    """

    def run(*runs: Run) -> None:
        ranks = run_ranks(train_all, runs[0][1].world, runs)
        for i, job in enumerate(runs):
            record_property(str(job[-1]), check(*job, [results[i] for results in ranks]))

    return run


def check(
    family: str, layout: Layout, step: Packs | Sequences, dtype: torch.dtype, found: list[dict[str, Any]]
) -> float:
    expected = train_by_hand(family, layout, step, dtype)
    before = dict(family_model(family, dtype).named_parameters())
    unmoved = [name for name, value in before.items() if torch.equal(expected["params"][name], value)]
    assert unmoved == []

    errors = [largest_error(rank["params"], expected["params"]) for rank in found]
    assert max(errors) < TOLERANCE[dtype]
    for rank in found:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE[dtype])
        assert rank["steps"] == STEPS

    tokens = [rank["real_tokens"] for rank in found]
    assert len(set(tokens[0])) > 1  # unequal packs, one after the other
    assert layout.dp == 1 or tokens[0] != tokens[-1]  # and side by side
    assert len({len(of_rank) for of_rank in tokens}) == 1
    if isinstance(step, Sequences):  # Lightning keeps logs in fp32
        assert found[0]["logged"] == pytest.approx(expected["losses"][-1], rel=1e-6)
        assert found[0]["microbatches"] > STEPS  # several a step, or nothing was accumulated

    return max(errors)


FOURS = [("qwen3_moe", Layout(cp=2, tp=2), Sequences(12))]
PAIRS = [
    ("qwen3", Layout(dp=2, options={"data_parallel_replicas": 2}), Sequences(24)),
    ("lfm2", Layout(strategy="thd_ddp", cp=2, options=WAYS[2]), Packs(2)),
    ("lfm2", Layout(tp=2), Packs(2)),
]


@pytest.mark.parametrize("runs", [PAIRS, FOURS], ids=["2", "4"])
def test_parameters_equal_one_process(compare: Compare, runs: list[Any]) -> None:
    compare(*[(*run, torch.float64) for run in runs])


@pytest.mark.slow
@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("cp", [1, 2])
def test_sequence_parallel(compare: Compare, family: str, cp: int) -> None:
    layout = Layout(cp=cp, tp=2, options={"sequence_parallel": True})
    compare((family, layout, Sequences(12), torch.float64), (family, layout, Packs(2), torch.float32))


MESHES = [
    Layout(dp=4),
    Layout(cp=4),
    Layout(tp=4),
    Layout(dp=2, cp=2),
    Layout(dp=2, tp=2),
    Layout(cp=2, tp=2),
    Layout(dp=2, cp=2, tp=2),
]
REPLICAS = [
    Layout(dp=2, options={"data_parallel_replicas": 2}),
    Layout(dp=2, cp=2, options={"data_parallel_replicas": 2}),
    Layout(dp=2, tp=2, options={"data_parallel_replicas": 2}),
    Layout(dp=2, options={"reshard_after_forward": False}),
]
EVERY = [replace(at, options=way) for at in MESHES for way in (WAYS if at.cp > 1 else [{}])]


def name_of(at: Layout) -> str:
    return "-".join([f"dp{at.dp}cp{at.cp}tp{at.tp}", *map(str, at.options.values())])


@pytest.mark.slow
@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("layout", EVERY, ids=name_of)
def test_every_layout(compare: Compare, layout: Layout, family: str) -> None:
    # With Sequences several microbatches a step come of the capacity, with Packs of Lightning's accumulation.
    steps = (Sequences(12 * layout.dp), Packs(2 * layout.dp))
    compare(*product([family], [layout], steps, TOLERANCE))


@pytest.mark.slow
@pytest.mark.parametrize("layout", REPLICAS, ids=name_of)
def test_replicas(compare: Compare, layout: Layout) -> None:
    compare(("qwen3_moe", layout, Sequences(12 * layout.dp), torch.float64))


@pytest.mark.slow
def test_ddp_with_context_parallelism_and_its_options(compare: Compare) -> None:
    compare(("qwen3", Layout(strategy="thd_ddp", dp=2, cp=2), Sequences(12), torch.float64))
    for option in ("gradient_as_bucket_view", "find_unused_parameters"):
        layout = Layout(strategy="thd_ddp", dp=2, options={option: True})
        compare(*product(["qwen3"], [layout], [Sequences(24), Packs(4)], [torch.float64]))


@pytest.mark.slow
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("family", ["gemma3", "bamba", "qwen3_5"])
def test_families_that_compute_in_fp32_whatever_they_are_given(family: str, cp: int) -> None:
    layout = Layout(strategy="thd_ddp", cp=cp)
    expected = train_by_hand(family, layout, Sequences(12))
    ranks = run_ranks(train, cp, family, layout, Sequences(12))
    # Norms, states and gates of these families are cast to fp32 inside, and rounded there.
    assert largest_error(ranks[0]["params"], expected["params"]) < 2e-4


def in_both_precisions(layout: Layout) -> list[dict[str, Any]]:
    ways = ({"precision": way} for way in ("32-true", "bf16-mixed"))
    return [train("qwen3", layout, Sequences(12), torch.float32, way) for way in ways]


@pytest.mark.parametrize(
    "layout", [Layout(dp=2), pytest.param(Layout(cp=2, tp=2), marks=pytest.mark.slow)], ids=["2", "4"]
)
def test_products_in_bf16_and_weights_in_fp32(layout: Layout) -> None:
    for exact, mixed in run_ranks(in_both_precisions, layout.world, layout):
        assert all(value.dtype == torch.float32 for value in mixed["params"].values())
        # bf16 keeps 8 bits: the mean of some 70 losses near 4 agrees to a few parts in 1000.
        assert mixed["losses"] == pytest.approx(exact["losses"], rel=1e-2)
        assert mixed["losses"] != exact["losses"]
