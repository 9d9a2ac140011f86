"""Fits with the graphs' callback, and what two fits are compared by."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch

from lightning_thd import THDDataModule
from lightning_thd.callbacks.cuda_graph import CUDAGraphCallback
from tests.cuda_graph.support import GraphModule
from tests.tiny import largest_error, quiet_trainer, sequences

CAPACITY = 96


def callback(**kwargs: Any) -> CUDAGraphCallback:
    return CUDAGraphCallback(**{"backend": "recording", "max_sequences": (6, 9), "require": True, **kwargs})


def fit(
    *callbacks: L.Callback, module: L.LightningModule | None = None, data: Any = None, **kwargs: Any
) -> tuple[Any, L.Trainer]:
    module = module or GraphModule()
    defaults = {"max_steps": 6, "log_every_n_steps": 1, "gradient_clip_val": 0.5}
    step = kwargs.pop("step", None)
    trainer = quiet_trainer(callbacks=list(callbacks), **{**defaults, **kwargs})
    trainer.fit(module, data or THDDataModule(sequences(90), capacity=CAPACITY, global_batch=step))
    return module, trainer


def parameters(module: L.LightningModule) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}


def assert_same(a: tuple[Any, L.Trainer], b: tuple[Any, L.Trainer], tolerance: float = 1e-12) -> None:
    assert largest_error(parameters(a[0]), parameters(b[0])) < tolerance
    assert a[0].outputs == pytest.approx(b[0].outputs, rel=tolerance)
    assert a[0].events == b[0].events
    assert len(a[0].events) >= 6
    assert a[1].callback_metrics.keys() == b[1].callback_metrics.keys()
    for key, value in b[1].callback_metrics.items():
        # Lightning keeps logs in fp32, where the last bit may round either way.
        assert float(a[1].callback_metrics[key]) == pytest.approx(float(value), rel=max(tolerance, 2e-7)), key


class Repeated(L.LightningDataModule):
    """A data module that knows no planner."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]
