"""Strategies x layouts x features: each cell gives what one process gives, or a refusal; nothing hangs."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.rows import error_or, run_row
from tests.strategies.matrix import FEATURES, ROWS, error_of, layout_of, one_process, oracle_of, run_cell

# Strategies that hold weights whole have no axis for parts of them, and one device has no axis at all.
REFUSED = {
    "thd": r"strategy='thd' runs on one device",
    "own_one_device": r"does not divide the 1 processes|(tensor_parallel_size|replicas)=2 under OwnOneDevice",
    "thd_ddp": r"(tensor_parallel_size|data_parallel_replicas)=2 under THDDDPStrategy",
    "own_ddp": r"(tensor_parallel_size|data_parallel_replicas)=2 under OwnDDP",
}
# Ranks that share weights out have no whole ones to copy.
REFUSED_COPIES = re.compile(
    r"(EMA|Stochastic)Weight\w+ under \w+ModelParallel\w*: it copies weights that ranks"
)
WITHOUT = [
    *[(strategy, layout) for strategy in ("thd_ddp", "own_ddp") for layout in ("tp2", "cp2tp2", "replicas2")],
    *[(strategy, layout) for strategy in ("thd", "own_one_device") for layout in ("cp2", "tp2", "replicas2")],
]


def errors_of_row(strategy: str, layout: str, features: list[str], folder: Path) -> dict[str, Any]:
    """Return, for every feature, the errors of weights and logs of each rank, or what it raised."""
    place = layout_of(layout)
    [wanted] = run_ranks(one_process, 1, features, timeout_s=600)
    row = run_row(run_cell, place.world, features, strategy, layout, str(folder))
    return {
        feature: [
            error_or(outcome, partial(error_of, wanted=wanted[oracle_of(feature, layout)]))
            for outcome in outcomes
        ]
        for feature, outcomes in zip(features, row, strict=True)
    }


def check(strategy: str, layout: str, features: list[str], folder: Path) -> None:
    faults = []
    for feature, errors in errors_of_row(strategy, layout, features, folder).items():
        if feature in ("ema", "swa") and "model_parallel" in strategy:
            faults += [(feature, error) for error in errors if not REFUSED_COPIES.search(str(error))]
            continue
        # Lightning keeps logs in fp32.
        faults += [
            (feature, error)
            for error in errors
            if isinstance(error, str) or error[0] >= 1e-10 or error[1] >= 1e-6
        ]
    assert not faults, "\n".join(f"{strategy} {layout} {feature}: {error}" for feature, error in faults)


@pytest.mark.parametrize(
    ("strategy", "layout", "features"),
    [
        ("own_model_parallel", "tp2", ["clip value", "predict", "ema"]),
        pytest.param("thd_model_parallel", "dp2", ["lora", "lr_find", "resume"], marks=pytest.mark.slow),
    ],
    ids=["tp2", "dp2"],
)
def test_some(strategy: str, layout: str, features: list[str], tmp_path: Path) -> None:
    check(strategy, layout, features, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "layout"), ROWS)
def test_every_layout_with_every_feature(strategy: str, layout: str, tmp_path: Path) -> None:
    check(strategy, layout, list(FEATURES), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "layout"), WITHOUT)
def test_what_a_strategy_cannot_is_refused(strategy: str, layout: str, tmp_path: Path) -> None:
    stages = ["fit", "validate", "predict"]
    row = run_row(run_cell, layout_of(layout).world, stages, strategy, layout, str(tmp_path))
    for outcome in (outcome for outcomes in row for outcome in outcomes):
        assert outcome.error is not None
        assert re.search(REFUSED[strategy], outcome.error), outcome.error
