"""Layouts x features: each gives the weights of one process, and nothing hangs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor

from lightning_thd import Packs, Sequences, THDBatch, THDStrategyMixin, causal_lm_loss
from tests.ranks import run_ranks
from tests.strategies.jobs import Job, Layout, data, full_parameters, make_trainer
from tests.tiny import largest_error, sequences

STEP, STEPS = Sequences(12), 3


class OwnDDP(THDStrategyMixin, DDPStrategy):
    context_parallel_size = 2


class OwnModelParallel(THDStrategyMixin, ModelParallelStrategy):
    data_parallel_size = "auto"
    tensor_parallel_size = 2


class Frozen(Job):
    """Trains the second layer and the head alone."""

    def __init__(self) -> None:
        super().__init__()
        self.model.model.embed_tokens.requires_grad_(False)
        self.model.model.layers[0].requires_grad_(False)


class Recomputed(Job):
    def __init__(self) -> None:
        super().__init__()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})


class CompiledInside(Job):
    def configure_model(self) -> None:
        self.model.compile(backend="eager")


class Adapted(Job):
    """Trains low-rank adapters of attention's products."""

    def __init__(self) -> None:
        super().__init__()
        peft = pytest.importorskip("peft")
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        self.model = peft.get_peft_model(self.model, config).double()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, eps=1e-5)


class Manual(Job):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: THDBatch, batch_idx: int) -> dict[str, Tensor]:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = causal_lm_loss(self.model, batch)
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach()}


class Stopping(Job):
    def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
        self.log("val/loss", causal_lm_loss(self.model, batch))


def options_of(feature: str, dp: int) -> dict[str, Any]:
    """Return a Trainer's arguments, the same on one process and on many but for ``dp``."""
    given: dict[str, Any] = {"max_steps": STEPS}
    if feature == "clip value":
        given |= {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    elif feature == "accumulate":
        given |= {"accumulate_grad_batches": 4 // dp}
    elif feature == "manual":
        given |= {"gradient_clip_val": None}
    elif feature == "early stopping":
        stop = EarlyStopping("val/loss", min_delta=10.0, patience=1, check_on_train_epoch_end=False)
        given |= {"callbacks": [stop], "val_check_interval": 1, "max_steps": 8, "num_sanity_val_steps": 0}
    return given


MODULES: dict[str, Callable[[], Job]] = {
    "clip norm": Job,
    "clip value": Job,
    "accumulate": Job,
    "frozen": Frozen,
    "checkpointing": Recomputed,
    "compile": CompiledInside,
    "lora": Adapted,
    "manual": Manual,
    "early stopping": Stopping,
}
LAYOUTS: dict[str, tuple[Layout, type | None]] = {
    "thd_ddp dp2": (Layout(strategy="thd_ddp", dp=2), None),
    "thd_ddp cp2": (Layout(strategy="thd_ddp", cp=2), None),
    "dp2": (Layout(dp=2), None),
    "cp2": (Layout(cp=2), None),
    "tp2": (Layout(tp=2), None),
    "replicas": (Layout(dp=2, options={"data_parallel_replicas": 2}), None),
    "dp2 cp2": (Layout(dp=2, cp=2), None),
    "cp2 tp2": (Layout(cp=2, tp=2), None),
    "own ddp": (Layout(strategy="thd_ddp", cp=2), OwnDDP),
    "own model parallel": (Layout(tp=2), OwnModelParallel),
}


def train(name: str | None, features: list[str]) -> dict[str, dict[str, Tensor]]:
    """Train with every feature on this rank and return the weights."""
    warnings.filterwarnings("ignore")
    layout, own = LAYOUTS[name] if name is not None else (Layout(), None)
    found: dict[str, Any] = {}
    for feature in features:
        strategy: Any = "thd" if name is None else None if own is None else own()
        step: Any = STEP
        if feature == "accumulate":
            step = Packs(4)
        elif feature == "manual":
            step = Packs(layout.dp)
        module = MODULES[feature]()
        trainer = make_trainer(layout, strategy=strategy, **options_of(feature, layout.dp))
        trainer.fit(module, data(step, val=sequences(8, seed=7)))
        assert trainer.global_step == (2 if feature == "early stopping" else STEPS)
        found[feature] = full_parameters(module.model)
    return found


def check(name: str, features: list[str]) -> None:
    layout = LAYOUTS[name][0]
    if layout.dp > 1:  # a step of one pack a rank holds other sequences than one process's step
        features = [feature for feature in features if feature != "manual"]
    [wanted] = run_ranks(train, 1, None, features)
    for found in run_ranks(train, layout.world, name, features, timeout_s=400):
        for feature in features:
            assert largest_error(found[feature], wanted[feature]) < 1e-10, feature


@pytest.mark.parametrize(("name", "features"), [("cp2 tp2", ["clip value", "frozen", "checkpointing"])])
def test_some(name: str, features: list[str]) -> None:
    check(name, features)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_with_every_feature(name: str) -> None:
    check(name, list(MODULES))
