"""The probe as a callback: once at fit start, on the model as it is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip("transformers")

from lightning_thd import Sequences, THDDataModule, THDModelParallelStrategy, causal_lm_loss
from lightning_thd.batch import THDBatch
from lightning_thd.callbacks.packing_check import PackingCheck
from lightning_thd.models import PackingLeakError, register_thd
from lightning_thd.warnings import THDWarning
from tests.models.families import build
from tests.models.test_probe import Nearly
from tests.models.test_probe_loss import Tiny
from tests.ranks import run_ranks
from tests.tiny import VOCAB, quiet_trainer, sequences, tiny_llama

register_thd()
Loss = Callable[[Any, THDBatch], Any]
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


class InTheModule(L.LightningModule):
    """Its layers are in the Lightning module itself."""

    def __init__(self, *, leaks: bool = False) -> None:
        super().__init__()
        self.leaks = leaks
        self.tokens = nn.Embedding(VOCAB, 16)
        self.norms = nn.ModuleList([nn.LayerNorm(16)])
        self.head = nn.Linear(16, VOCAB)

    def logits(self, batch: THDBatch) -> Tensor:
        x = self.tokens(batch.input_ids)
        if self.leaks:
            x = x + x.cumsum(0)
        logits: Tensor = self.head(self.norms[0](x))
        return logits

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        assert batch.position_ids is not None
        loss = F.cross_entropy(self.logits(batch), batch.targets, reduction="sum")
        return loss * batch.loss_scale

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_layers_in_the_module_itself_are_checked_by_forward() -> None:
    def call(module: Any, batch: THDBatch) -> Tensor:
        logits: Tensor = module.logits(batch)
        return logits

    for model in (None, ""):
        callback = PackingCheck(model=model, vocab_size=VOCAB, forward=call)
        quiet_trainer(max_steps=1, callbacks=[callback]).fit(
            InTheModule(), THDDataModule(sequences(40), capacity=64)
        )
        assert callback.report is not None
        assert callback.report.loss == "a sum times batch.loss_scale"
    with pytest.raises(PackingLeakError, match="lets sequences of a pack see each other"):
        fit(InTheModule(leaks=True), PackingCheck(model="", vocab_size=VOCAB, forward=call))
    with pytest.raises(TypeError, match="forward is a int, 3; wanted a function of model and batch"):
        PackingCheck(forward=3)  # type: ignore[arg-type]


def test_advice_names_only_what_can_be_called_as_a_model() -> None:
    """An embedding, a norm and a list of layers are no models."""
    in_itself = r"its layers are in the module itself\. Move them into an nn\.Module .* or pass forward="
    for model, error in (("", ValueError), (None, MisconfigurationException)):
        with pytest.raises(error, match=in_itself):
            fit(InTheModule(), PackingCheck(model=model, vocab_size=VOCAB))
    with pytest.raises(MisconfigurationException, match=r"PackingCheck\(model='net\.lm', vocab_size"):
        fit(Module(Tiny()), PackingCheck(vocab_size=VOCAB))


# ---- The loss of training_step


class Losing(L.LightningModule):
    """A module whose loss is given, which logs it and counts its steps."""

    def __init__(self, loss: Loss, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = model or Tiny()
        self.loss = loss
        self.seen: list[int] = []

    def training_step(self, batch: THDBatch, batch_idx: int) -> dict[str, Tensor]:
        assert self.training
        self.seen.append(len(batch))
        loss = self.loss(self.model, batch)
        self.log("train/loss", loss.detach())
        self.log_dict({"train/again": loss.detach()})
        return {"loss": loss}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def scaled_sum(model: Any, batch: THDBatch) -> Tensor:
    return F.cross_entropy(model(batch), batch.targets, reduction="sum") * batch.loss_scale


def mean(model: Any, batch: THDBatch) -> Tensor:
    return F.cross_entropy(model(batch), batch.targets)


def train(
    loss: Loss, callback: PackingCheck | None, rows: list[dict[str, Any]] | None = None, **options: Any
) -> Losing:
    module = Losing(loss)
    global_batch = options.pop("global_batch", None)
    data = THDDataModule(rows or sequences(40), capacity=64, global_batch=global_batch)
    callbacks = [] if callback is None else [callback]
    trainer = quiet_trainer(max_steps=2, callbacks=callbacks, **options)
    trainer.fit(module, data)
    return module


def check() -> PackingCheck:
    return PackingCheck(model="model", vocab_size=VOCAB, grad=False, lengths=(3, 5))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_right_loss_is_measured_and_leaves_no_trace(precision: Any) -> None:
    callback = check()
    checked = train(scaled_sum, callback, precision=precision)
    assert callback.report is not None
    assert (callback.report.loss, callback.report.skipped) == ("a sum times batch.loss_scale", ())

    unchecked = train(scaled_sum, None, precision=precision)
    assert checked.seen == unchecked.seen
    assert checked.trainer.callback_metrics == unchecked.trainer.callback_metrics
    pairs = zip(checked.parameters(), unchecked.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert "log" not in vars(checked)


def test_a_wrong_loss_does_not_start() -> None:
    def shifted_again(model: Any, batch: THDBatch) -> Tensor:
        return F.cross_entropy(model(batch)[:-1], batch.targets[1:], reduction="sum") * batch.loss_scale

    with pytest.raises(PackingLeakError, match=r"^Losing.training_step is shifted twice.*; its loss"):
        train(shifted_again, check())
    unlooked = check()
    unlooked.loss = False
    with pytest.warns(THDWarning, match="which are shifted twice"):
        train(shifted_again, unlooked)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"strategy": "thd", "global_batch": Sequences(8)},
    ],
)
def test_a_mean_of_a_microbatch_is_wrong_if_a_step_has_several(options: dict[str, Any]) -> None:
    callback = check()
    if not options:
        train(mean, callback)
        assert callback.report is not None
        assert callback.report.loss == "a mean over its own targets"
        return
    with pytest.raises(PackingLeakError, match=r"training_step is a mean over its own targets and reads no"):
        train(mean, callback, **options)


def test_labels_of_the_data_decide_whether_a_token_may_be_its_own_label() -> None:
    def tagged(model: Any, batch: THDBatch) -> Tensor:
        labels = batch.targets.roll(1)
        return F.cross_entropy(model(batch), labels, reduction="sum") * batch.loss_scale

    rows = sequences(40)
    with pytest.raises(PackingLeakError, match="scores every token with its own logits"):
        train(tagged, check(), rows)
    for row in rows:
        row["labels"] = row["input_ids"] % 5
        row["labels"][0] = -100
    train(tagged, check(), rows)


def test_what_is_no_loss_of_tokens_is_left_out_and_said() -> None:
    def refusing(model: Any, batch: THDBatch) -> Tensor:
        if sum(batch.lengths) == 23:  # the check's own pack
            raise ZeroDivisionError
        return scaled_sum(model, batch)

    for loss, rows, reason in (
        (lambda m, b: m(b).mean(), None, "no label moves it"),
        (scaled_sum, [{"input_ids": [1, 2]}] * 40, "fewer than two different targets"),
        (refusing, None, "it raised ZeroDivisionError on a small pack"),
        (scaled_sum, [{"input_ids": [1, 2, 3], "label": 1}] * 40, "batches hold labels beside tokens"),
    ):
        callback = check()
        train(loss, callback, rows)
        assert callback.report is not None
        assert any(reason in text for text in callback.report.skipped), callback.report.skipped


def test_the_report_says_that_validation_step_is_not_looked_at() -> None:
    class Validating(Losing):
        def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
            return None

    callback = check()
    trainer = quiet_trainer(max_steps=1, limit_val_batches=0, callbacks=[callback])
    trainer.fit(Validating(scaled_sum), THDDataModule(sequences(40), capacity=64))
    assert callback.report is not None
    assert callback.report.skipped == ("the loss of validation_step: PackingCheck runs training_step only",)


def train_sharded(options: dict[str, Any]) -> Any:
    """Train on this rank, and return what the check found."""
    callback = PackingCheck(lengths=(3, 5), grad=False)
    wrong = options.pop("wrong", False)
    strategy = options.pop("strategy", None) or THDModelParallelStrategy(**options)

    def loss(model: Any, batch: THDBatch) -> Tensor:
        loss = causal_lm_loss(model, batch)
        return loss / batch.loss_tokens if wrong else loss

    module = Losing(loss, tiny_llama(torch.float32))
    trainer = quiet_trainer(max_steps=1, callbacks=[callback], devices=2, strategy=strategy)
    try:
        trainer.fit(module, THDDataModule(sequences(40), capacity=64))
    except PackingLeakError as error:
        return str(error).partition("\n")[0]
    assert callback.report is not None
    return callback.report.loss, callback.report.skipped


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tensor_parallel_size": 2},
        {"context_parallel_size": 2},
        {"strategy": "ddp"},
        {"strategy": "thd_ddp"},
    ],
)
def test_losses_are_checked_on_ranks_too(options: dict[str, Any]) -> None:
    if "context_parallel_size" in options:
        found = run_ranks(train_sharded, 2, options)
        assert found == [(None, ("the loss: sequences share prefixes, or ranks share a pack",))] * 2
        return
    for found in run_ranks(train_sharded, 2, options):
        assert found == ("a sum times batch.loss_scale", ())
    for found in run_ranks(train_sharded, 2, {**options, "wrong": True}):
        assert "divides by the targets of the pack" in found
