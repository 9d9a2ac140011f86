"""Training with the callback equals training without it: parameters, hooks, logs, checkpoints, exceptions."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_thd import Sequences, THDBatch, THDDataModule
from lightning_thd.callbacks.cuda_graph import GraphCosts
from tests.callbacks.support import CAPACITY, Repeated, assert_same, callback, fit, parameters
from tests.cuda_graph.support import GraphModule, random_batch
from tests.tiny import largest_error, quiet_trainer, sequences

LONG = [pytest.param(n, -(-50 // n), marks=pytest.mark.slow) for n in (1, 2, 4)]


@pytest.mark.parametrize(("accumulate", "steps"), [(2, 3), *LONG])
def test_training_is_the_same(accumulate: int, steps: int) -> None:
    """Clipping, momentum, a scheduler and logs are in every fit."""
    graphs = callback()
    with_graphs = fit(graphs, accumulate_grad_batches=accumulate, max_steps=steps)
    # Fifty steps of momentum grow rounding a thousandfold.
    tolerance = 1e-12 if steps == 3 else 1e-9
    assert_same(with_graphs, fit(accumulate_grad_batches=accumulate, max_steps=steps), tolerance)
    assert graphs.stats.replays >= 2
    if steps > 3:
        assert graphs.stats.replays + graphs.stats.fallbacks.total() >= 50
        assert graphs.step is not None
        assert graphs.stats.captures == len(graphs.step.buckets) == 2
    assert graphs.stats.fallbacks["num_sequences"] >= 1
    assert set(graphs.stats.fallbacks) == {"num_sequences"}


@pytest.mark.filterwarnings("ignore:training_step returns .* beside the loss")
def test_steps_of_several_microbatches_are_the_same() -> None:
    graphs = callback()
    runs = [fit(*c, strategy="thd", step=Sequences(20)) for c in ((graphs,), ())]
    assert_same(*runs)
    assert graphs.stats.replays > 6


def test_bf16_autocast_is_the_same() -> None:
    graphs = callback()
    found = fit(graphs, module=GraphModule(dtype=torch.float32, lr=0.05), precision="bf16-mixed")
    wanted = fit(module=GraphModule(dtype=torch.float32, lr=0.05), precision="bf16-mixed")
    # bf16 has 8 bits; the cast weights are cached in eager and not in graphs, which rounds sums elsewhere.
    assert found[0].outputs == pytest.approx(wanted[0].outputs, rel=2e-3)
    assert found[0].events == wanted[0].events
    assert graphs.stats.replays >= 4


def test_without_a_planner_the_first_batches_are_observed() -> None:
    batches = [random_batch(seed, count=5) for seed in range(40)]
    graphs = callback(max_sequences="auto")
    found = fit(graphs, data=Repeated(batches), max_steps=40, gradient_clip_val=None)
    assert graphs.stats.replays >= 8
    assert graphs.step is not None
    assert graphs.step.buckets[0].slots == 128
    assert_same(found, fit(data=Repeated(batches), max_steps=40, gradient_clip_val=None), 1e-10)


def test_auto_chooses_from_the_planner_and_prints_the_table_once(caplog: pytest.LogCaptureFixture) -> None:
    graphs = callback(max_sequences="auto", costs=GraphCosts(eager=1.0, graph=0.5, per_sequence=0.01))
    with caplog.at_level("INFO"):
        fit(graphs)
    assert graphs.plan is not None
    assert graphs.plan.slots == CAPACITY
    assert 1 <= len(graphs.plan.buckets()) <= 3
    assert graphs.stats.hit_rate > 0.5
    tables = [r for r in caplog.records if "expected speed-up" in r.getMessage()]
    assert len(tables) == 1
    assert "P50" in tables[0].getMessage()


def test_rates_are_logged(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    graphs = callback()
    fit(graphs, logger=logger)
    header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"cuda_graph/hit_rate", "cuda_graph/capture_time_s", "train/loss_step"} <= set(header)
    assert "cuda_graph/fallback_num_sequences" in header
    assert 0 < graphs.stats.hit_rate < 1


def test_training_step_is_given_back_at_the_end_and_after_an_exception() -> None:
    class Boom(Exception):
        pass

    class Breaks(GraphModule):
        def on_train_batch_end(self, *args: Any) -> None:
            assert "training_step" in self.__dict__
            raise Boom

    module, _ = fit(callback())
    assert "training_step" not in module.__dict__
    module.trainer = None
    pickle.dumps(module)
    broken = Breaks()
    with pytest.raises(Boom):
        fit(callback(), module=broken)
    assert "training_step" not in broken.__dict__
    assert "log" not in broken.__dict__


def test_an_exception_inside_the_step_is_the_users_own() -> None:
    class Raises(GraphModule):
        def training_step(self, batch: THDBatch, batch_idx: int) -> Any:
            raise KeyError("mine")

    module = Raises()
    with pytest.warns(UserWarning, match="CUDA graphs are off.*mine"), pytest.raises(KeyError, match="mine"):
        fit(callback(require=False), module=module)
    assert "training_step" not in module.__dict__


class Saves(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def test_validation_checkpoints_and_resume_are_the_same(tmp_path: Path) -> None:
    def data() -> THDDataModule:
        return THDDataModule(sequences(90), val=sequences(20, seed=1), capacity=CAPACITY)

    options: dict[str, Any] = {"val_check_interval": 2, "max_steps": 6}
    graphs = callback()
    found = fit(graphs, Saves(tmp_path / "a.ckpt"), data=data(), **options)
    wanted = fit(Saves(tmp_path / "b.ckpt"), data=data(), **options)
    assert_same(found, wanted)
    assert "val/loss" in found[1].callback_metrics
    a, b = (torch.load(tmp_path / f, weights_only=False) for f in ("a.ckpt", "b.ckpt"))
    assert a["state_dict"].keys() == b["state_dict"].keys()
    resumed = GraphModule()
    trainer = quiet_trainer(
        max_steps=6,
        gradient_clip_val=0.5,
        val_check_interval=2,
        callbacks=[callback()],
    )
    trainer.fit(resumed, data(), ckpt_path=tmp_path / "a.ckpt", weights_only=False)
    assert largest_error(parameters(resumed), parameters(wanted[0])) < 1e-12


def test_a_second_fit_captures_anew() -> None:
    graphs, module = callback(), GraphModule()
    fit(graphs, module=module)
    first = graphs.stats
    fit(graphs, module=module)
    assert graphs.stats is not first
    assert graphs.stats.replays > 0
