"""The choice of buckets against brute force and the published distribution; the command line."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_thd.callbacks.cuda_graph import GraphCosts
from lightning_thd.cli import main
from lightning_thd.cuda_graph.buckets import Layout
from lightning_thd.cuda_graph.graph_choice import (
    best_sequences,
    expected_cost,
    needed_sequences,
    plan_for,
    plan_graphs,
    sample_layouts,
)
from lightning_thd.packing import PackPlanner, Packs, Sequences


@settings(max_examples=60, deadline=None)
@given(
    needs=st.lists(st.integers(1, 30), min_size=1, max_size=25),
    count=st.integers(1, 3),
    graph=st.floats(0.1, 1.2),
    per_sequence=st.floats(0.0, 0.1),
)
def test_the_choice_is_the_best_of_all(
    needs: list[int], count: int, graph: float, per_sequence: float
) -> None:
    costs, sample = GraphCosts(graph=graph, per_sequence=per_sequence), np.array(needs)

    def by_hand(sequences: tuple[int, ...]) -> float:
        total = 0.0
        for n in needs:
            fitting = [s for s in sequences if s >= n]
            total += graph + per_sequence * min(fitting) if fitting else 1.0
        return total / len(needs)

    best = min(by_hand(c) for k in range(count + 1) for c in combinations(sorted(set(needs)), k))
    found = best_sequences(sample, count, costs)
    assert expected_cost(sample, found, costs) == pytest.approx(by_hand(found))
    # A further bucket has to save half a per cent of an eager step.
    assert by_hand(found) <= best + 0.005 * count + 1e-12


def test_needs_count_the_dummies_of_the_tail() -> None:
    layouts = [Layout(90, 5, 30), Layout(100, 5, 30), Layout(10, 1, 10), Layout(101, 1, 30)]
    assert needed_sequences(layouts, 100, 30).tolist() == [6, 5, 4]


@pytest.mark.parametrize("batch", [Packs(4), Sequences(40)])
def test_layouts_are_those_the_planner_will_make(batch: Packs | Sequences) -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 900)
    planner = PackPlanner(lengths, 256, global_batch=batch)
    found = sample_layouts(planner, dp=2)
    all_of_them = {
        Layout.of(spans.lengths.tolist())
        for k in range(len(planner))
        for rank in planner.step(0, k, 2).spans_by_rank()
        for spans in rank
    }
    assert len(found) > 30
    assert set(found) == all_of_them
    assert plan_for(planner, dp=2).max_seqlen == lengths.max()


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f'{{"text": "{"ab" * (1 + i % 20)}"}}\n' for i in range(200)))
    main(["graph-plan", str(path), "--capacity", "128", "--max-sequences", "64", "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["chosen"]["sequences"] == [64]
    assert plan["slots"] == 128
    assert plan["max_seqlen"] <= 41
    assert plan["chosen"]["coverage"] > 0.9
    with pytest.raises(SystemExit):
        main(["graph-plan", str(path), "--text-key", "body"])
    assert "no string under the key 'body', found ['text']" in capsys.readouterr().err


def test_costs_and_samples_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"GraphCosts\(eager=0.0\): wanted a positive time"):
        GraphCosts(eager=0.0)
    with pytest.raises(ValueError, match="No sampled batch fits into slots=8"):
        plan_graphs([], slots=8, max_seqlen=8)
