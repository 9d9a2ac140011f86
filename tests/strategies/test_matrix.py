"""Strategies x layouts x features: each cell gives what one process gives, or a refusal; nothing hangs."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

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
WITHOUT = [
    *[(strategy, layout) for strategy in ("thd_ddp", "own_ddp") for layout in ("tp2", "cp2tp2", "replicas2")],
    *[(strategy, layout) for strategy in ("thd", "own_one_device") for layout in ("cp2", "tp2", "replicas2")],
]
# Two data-parallel ranks have packs of their own: what is of a pack differs, and is not compared.
OF_A_PACK = {"logs", "sums", "validated in between"}


def refusals(strategy: str, layout: str) -> dict[str, str]:
    """Return which features a row refuses, and how."""
    place = layout_of(layout)
    texts = {}
    if place.world > 1:
        texts["thawed"] = r"Thaw under \w+: it unfreezes weights"
    if "model_parallel" in strategy:  # ranks that share weights out have no whole ones to copy
        texts["ema"] = texts["swa"] = r"(EMA|Stochastic)Weight\w+ under \w+ModelParallel\w*: it copies"
    if place.cp > 1:  # the sum could be of the pack or of a rank's slots
        texts["sums"] = r"MisconfigurationException: self.log\(reduce_fx='sum'"
        texts["counts"] = r"Counting\.tokens is a SumMetric while ranks share packs.*set its process_group to"
    if place.pp > 1:
        texts["accumulate"] = texts["validated in between"] = "but with a pipeline,.* each batch is a step"
        texts["metrics"] = texts["counts"] = "only the last pipeline stage has the numbers"
        texts["manual"] = "which automatic_optimization=False cannot"
    return texts


def check(strategy: str, layout: str, features: list[str], folder: Path) -> None:
    place = layout_of(layout)
    left_out = OF_A_PACK if place.dp > 1 else set()

    if strategy.endswith(
        "ddp"
    ):  # torch's DDP waits for the gradient of every weight it was given, and says so
        left_out = left_out | {"frozen later"}

    features = [feature for feature in features if feature not in left_out]
    [expected] = run_ranks(one_process, 1, features, timeout_s=600)
    row = run_row(run_cell, place.world, features, strategy, layout, str(folder))
    refused = refusals(strategy, layout)
    faults = []

    for feature, outcomes in zip(features, row, strict=True):
        compare = partial(error_of, wanted=expected.get(oracle_of(feature, layout)))
        errors = [error_or(outcome, compare) for outcome in outcomes]
        if feature in refused:
            faults += [(feature, error) for error in errors if not re.search(refused[feature], str(error))]
            continue
        # Lightning keeps logs in fp32.
        faults += [(feature, e) for e in errors if isinstance(e, str) or e[0] >= 1e-10 or e[1] >= 2e-6]

    assert not faults, "\n".join(f"{strategy} {layout} {feature}: {error}" for feature, error in faults)


@pytest.mark.parametrize(
    ("strategy", "layout", "features"),
    [
        ("own_model_parallel", "tp2", ["clip value", "predict", "ema", "sums"]),
        ("thd_ddp", "cp2", ["logs", "sums", "thawed"]),
        ("thd_model_parallel", "pp2", ["validate", "predict", "groups", "logs"]),
        pytest.param("thd_model_parallel", "dp2", ["lora", "lr_find", "resume"], marks=pytest.mark.slow),
    ],
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
