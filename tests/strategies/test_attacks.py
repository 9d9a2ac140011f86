"""Logs, limits, schedules and several Trainers give on many ranks what they give on one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.rows import run_row
from tests.strategies.attacks import ATTACKS, attack
from tests.strategies.jobs import Layout, data, make_trainer
from tests.strategies.matrix import STEP, Plain, error_of, layout_of

# Two data-parallel ranks have packs of their own: what is of a pack differs, and is not compared here.
OF_A_PACK = {"logs", "sums", "manual twice", "val batches", "overfit", "overfit fraction", "rates"}


def all_of(names: list[str], strategy: str, layout: str, folder: str) -> list[dict[str, torch.Tensor]]:
    return [attack(name, strategy, layout, folder) for name in names]


def check(strategy: str, layout: str, names: list[str], folder: Path) -> None:
    [wanted] = run_ranks(all_of, 1, names, "thd", "one", str(folder), timeout_s=600)
    row = run_row(attack, layout_of(layout).world, names, strategy, layout, str(folder))
    for name, outcomes, expected in zip(names, row, wanted, strict=True):
        for outcome in outcomes:
            if name == "sums" and layout_of(layout).cp > 1:
                assert re.search(r"MisconfigurationException: self.log\(reduce_fx='sum'", outcome.error or "")
                continue
            assert outcome.error is None, f"{name}: {outcome.error}"
            found = outcome.value
            if name == "rates":  # the first rank alone logs them
                found = {**expected, **found}
            weights, logs = error_of(found, expected)
            assert weights < 1e-10, name
            assert logs < 2e-6, name


def test_some(tmp_path: Path) -> None:
    check("thd_ddp", "cp2", ["logs", "sums"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "layout"),
    [
        *[("thd_ddp", "cp2"), ("thd_model_parallel", "cp2"), ("thd_model_parallel", "tp2")],
        *[("thd_model_parallel", "dp2"), ("thd_model_parallel", "cp2tp2"), ("own_model_parallel", "cp2tp2")],
    ],
)
def test_every_attack(strategy: str, layout: str, tmp_path: Path) -> None:
    left_out = OF_A_PACK if layout_of(layout).dp > 1 else {"named"}  # a name alone gives no sizes
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
