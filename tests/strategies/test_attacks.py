"""Logs, limits, schedules and several Trainers give on many ranks what they give on one process."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.rows import error_or, run_row
from tests.strategies.attacks import ATTACKS, attack
from tests.strategies.jobs import Layout, data, make_trainer
from tests.strategies.matrix import STEP, Plain, error_of, layout_of

# Two data-parallel ranks have packs of their own: what is of a pack differs, and is not compared here.
OF_A_PACK = {"logs", "sums", "overfit", "finder", "validated in between"}
# What ranks that share packs refuse: the sum could be of the pack or of a rank's slots.
REFUSED_SUMS = {
    "sums": r"MisconfigurationException: self.log\(reduce_fx='sum'",
    "counts": r"Counting\.tokens is a SumMetric while ranks share packs.*set its process_group to self",
}
# torch's anomaly detection knows no cut gradients.
REFUSED_CUT = {"traced": r"MisconfigurationException: detect_anomaly=True with tensor_parallel_size=2"}
REFUSED = {"thawed": r"MisconfigurationException: Thaw under \w+: it copies weights .* or unfreezes weights"}
DDP_ALONE = {"frozen later"}  # torch's DDP waits for the gradient of every weight it was given, and says so


def all_of(names: list[str], strategy: str, layout: str, folder: str) -> list[dict[str, torch.Tensor]]:
    return [attack(name, strategy, layout, folder) for name in names]


def errors_of_row(strategy: str, layout: str, names: list[str], folder: Path) -> dict[str, list[Any]]:
    """Return, for every attack, the errors of weights and logs of each rank, or what it raised."""
    [wanted] = run_ranks(all_of, 1, names, "thd", "one", str(folder), timeout_s=600)
    row = run_row(attack, layout_of(layout).world, names, strategy, layout, str(folder))
    return {
        name: [error_or(outcome, partial(error_of, wanted=expected)) for outcome in outcomes]
        for name, outcomes, expected in zip(names, row, wanted, strict=True)
    }


def check(strategy: str, layout: str, names: list[str], folder: Path) -> None:
    faults = []
    for name, errors in errors_of_row(strategy, layout, names, folder).items():
        refused = REFUSED | (REFUSED_SUMS if layout_of(layout).cp > 1 else {})
        refused |= REFUSED_CUT if layout_of(layout).tp > 1 else {}
        if name in refused:
            faults += [(name, error) for error in errors if not re.search(refused[name], str(error))]
            continue
        faults += [
            (name, error)
            for error in errors
            if isinstance(error, str) or error[0] >= 1e-10 or error[1] >= 2e-6
        ]
    assert not faults, "\n".join(f"{strategy} {layout} {name}: {error}" for name, error in faults)


def test_some(tmp_path: Path) -> None:
    check("thd_ddp", "cp2", ["logs", "sums", "thawed"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "layout"),
    [
        *[
            ("thd_ddp", "dp2"),
            ("thd_ddp", "cp2"),
            ("thd_model_parallel", "cp2"),
            ("thd_model_parallel", "tp2"),
        ],
        *[("thd_model_parallel", "dp2"), ("thd_model_parallel", "cp2tp2"), ("own_model_parallel", "cp2tp2")],
    ],
)
def test_every_attack(strategy: str, layout: str, tmp_path: Path) -> None:
    left_out = OF_A_PACK if layout_of(layout).dp > 1 else set()
    left_out |= DDP_ALONE if strategy == "thd_ddp" else set()
    check(strategy, layout, [name for name in ATTACKS if name not in left_out], tmp_path)


class LogsAfter(Plain):
    """Logs the loss of a step when it is over."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("after", outputs["loss"].detach(), on_epoch=True)


def mean_of_epoch() -> tuple[float, float]:
    trainer = make_trainer(Layout(), strategy="thd", max_steps=-1, max_epochs=1)
    trainer.fit(LogsAfter(), data(STEP))
    return float(trainer.callback_metrics["after_epoch"]), float(trainer.callback_metrics["train/loss_epoch"])


def test_what_is_logged_after_a_step_weighs_as_much_as_the_step() -> None:
    [(after, inside)] = run_ranks(mean_of_epoch, 1)
    assert after == pytest.approx(inside, rel=1e-6)  # Lightning keeps logs in fp32
