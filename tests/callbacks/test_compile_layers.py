from __future__ import annotations

import itertools
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn

from lightning_thd import THDDataModule
from lightning_thd.callbacks import CompileLayers
from lightning_thd.callbacks.compile_layers import break_even
from lightning_thd.module import CausalLMModule
from tests.ranks import run_ranks
from tests.tiny import quiet_trainer, sequences, tiny_llama


@pytest.mark.parametrize(
    ("eager", "compiled", "wanted"),
    [
        (
            [9, 3, 3],
            [21, 2, 2, 2],
            "compiled in 19.0 s; a batch takes 2.00 s instead of 3.00 s: pays off after 19",
        ),
        ([9, 3, 3], [3, 3, 3, 3, 3], "does not pay off"),
        (
            [9, 3, 3],
            [1, 1, 1, 1],
            "compiled in 0.0 s; a batch takes 1.00 s instead of 3.00 s: pays off after 0 ",
        ),
    ],
)
def test_break_even(eager: list[float], compiled: list[float], wanted: str) -> None:
    assert wanted in break_even(eager, compiled)


@pytest.mark.parametrize("count", [1, True, 2.0])
def test_too_few_eager_batches_are_refused(count: object) -> None:
    with pytest.raises(ValueError, match="wanted 2 or more"):
        CompileLayers(eager_batches=count)  # type: ignore[arg-type]


def fit(folder: str, compiled: bool) -> tuple[list[float], list[str], int]:
    compile_layer = nn.Module.compile  # in eager mode: what is traced is the same, and no C++ is built
    nn.Module.compile = lambda self, **kw: compile_layer(self, backend="eager", **kw)  # type: ignore[method-assign]
    told: list[str] = []
    losses: list[float] = []
    ticks = itertools.count()

    class Losses(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, *args) -> None:  # type: ignore[no-untyped-def]
            losses.append(outputs["loss"].item())

    callbacks: list[L.Callback] = [Losses()]
    if compiled:
        callbacks.append(CompileLayers(eager_batches=2, report=told.append, clock=lambda: float(next(ticks))))
    torch.manual_seed(0)
    trainer = quiet_trainer(
        max_steps=9,
        callbacks=callbacks,
        default_root_dir=folder,
    )
    trainer.fit(CausalLMModule(tiny_llama(), lr=1e-3), THDDataModule(sequences(120), capacity=256))
    return losses, told, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow  # tests/test_module.py compiles layers too
def test_the_losses_stay_and_it_is_said_once(tmp_path: Path) -> None:
    # In a process of its own: once a batch was cut for context parallelism, attention breaks graphs.
    (eager, _, none), (losses, told, graphs) = (
        run_ranks(fit, 1, str(tmp_path), compiled)[0] for compiled in (False, True)
    )
    assert none == 0
    assert graphs == 1
    assert losses == pytest.approx(eager, rel=1e-5)
    assert len(told) == 1
    assert "does not pay off" in told[0]  # a clock that ticks once a call
