"""The probe as a callback: once at fit start, on the model as it is trained."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip("transformers")

from lightning_thd.batch import THDBatch
from lightning_thd.callbacks.packing_check import PackingCheck
from lightning_thd.models import PackingLeakError, register_thd
from tests.models.families import build
from tests.models.test_probe import Nearly
from tests.tiny import quiet_trainer

register_thd()
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.`:FutureWarning"),
]


class Module(L.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"lm": model})
        self.steps = 0

    def training_step(self, batch: Tensor) -> Tensor:
        self.steps += 1
        loss: Tensor = self.net["lm"](**THDBatch.collate([{"input_ids": batch[0]}]).hf_kwargs()).logits.mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: L.LightningModule, callback: PackingCheck) -> None:
    trainer = quiet_trainer(max_steps=1, callbacks=[callback])
    trainer.fit(module, DataLoader(torch.arange(3, 11).view(1, 8), num_workers=0))


def test_a_right_model_trains() -> None:
    module = Module(build("llama", "thd"))
    callback = PackingCheck()
    fit(module, callback)
    assert callback.report is not None
    assert callback.report.ok
    assert callback.report.gradient_leak == 0
    assert module.steps == 1


def test_a_leaking_model_does_not_start() -> None:
    module = Module(build("mamba", "eager"))
    callback = PackingCheck(model="net.lm", lengths=(5, 9), grad=False)
    fit(Module(build("llama", "thd")), callback)  # the check of one model does not stand for another's
    with pytest.raises(PackingLeakError, match="MambaMixer"):
        fit(module, callback)
    assert module.steps == 0


def test_a_small_leak_in_mixed_precision_stops_the_run() -> None:
    module = Module(Nearly(1e-3))
    trainer = quiet_trainer(
        max_steps=1, callbacks=[PackingCheck(model="net.lm", vocab_size=32)], precision="bf16-mixed"
    )
    with pytest.raises(PackingLeakError, match=r"first wrong module is leaking \(Mixing\)"):
        trainer.fit(module, DataLoader(torch.arange(3, 11).view(1, 8), num_workers=0))


def test_no_model_to_probe() -> None:
    module = Module(build("llama", "thd"))
    with pytest.raises(AttributeError, match="Module has no attribute `lm`"):
        fit(module, PackingCheck(model="lm"))
    module.net["lm"] = nn.Linear(1, 1)
    with pytest.raises(MisconfigurationException, match="found no transformers model in Module"):
        fit(module, PackingCheck())
