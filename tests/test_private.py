"""Without other packages' private names the package imports and trains; what needs one says so."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_thd._private import PRIVATE, PrivateNameGone, private

ROOT = Path(__file__).parent.parent
TRAIN = """
import importlib
from lightning_thd._private import PRIVATE
import lightning.pytorch, torch.distributed.checkpoint, torch.utils.data

for name in PRIVATE:
    module, _, attribute = name.rpartition(".")
    delattr(importlib.import_module(module), attribute)

import lightning as L
import torch
from lightning_thd import *
from tests.tiny import tiny_llama

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = tiny_llama()

    def training_step(self, batch, _):
        return causal_lm_loss(self.model, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

rows = [{"input_ids": [1, 2, 3, 4]}] * 16
for step, strategy in ((Packs(1), "auto"), (Sequences(4), "thd")):
    trainer = L.Trainer(
        max_steps=2, accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[THDThroughputMonitor()],
    )
    trainer.fit(Module(), THDDataModule(rows, capacity=16, global_batch=step))
    assert trainer.global_step == 2
print("trained")
"""


@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_name_that_is_gone_stops_its_feature_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert private(name) is not None
    module, _, attribute = name.rpartition(".")
    monkeypatch.delattr(importlib.import_module(module), attribute)
    if attribute == "worker":  # a module: import finds it again, so that its parent has to be unable to
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PrivateNameGone, match=f"^{PRIVATE[name].feature[:20]}.* needs .*{attribute}"):
        private(name)


@pytest.mark.parametrize("name", PRIVATE)
def test_the_table_names_the_file_that_uses_it(name: str) -> None:
    text = (ROOT / "lightning_thd" / PRIVATE[name].place).read_text()
    assert f'private("{name}")' in text


def test_without_any_of_them_the_package_imports_and_trains() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRAIN],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "trained"
