"""A Lightning module at the start of fit -> a leak check of its model, and a check of its own loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_thd._checks import described, flags, host_ints, instance
from lightning_thd._find import models_in
from lightning_thd.batch import THDBatch
from lightning_thd.batch.thd_batch import Packed, THDStep
from lightning_thd.data.trainer_link import job_of, weighs_microbatches
from lightning_thd.models.probe import Forward, check_options, check_packing, check_step
from lightning_thd.models.probe_loss import Tokens
from lightning_thd.models.probe_model import where_the_model_is
from lightning_thd.models.probe_report import PackingReport


class PackingCheck(L.Callback):
    """Runs ``check_packing`` when fit starts, on the model with its device, dtype and sharding for training.

    The check takes a few forwards and, with ``grad``, backwards of ``sum(lengths)`` tokens. If sequences leak
    into each other, the run stops with ``PackingLeakError``. Before the first step, the loss of
    ``training_step`` is checked too, as ``check_packing(loss_fn=)`` does it, on packs made of tokens and
    targets of the first batch. ``training_step`` is called some 50 to 80 times; ``self.log`` does nothing in
    these calls, and the module is as it was before. A mean over the targets of a microbatch stops the run if
    a step has several microbatches.

    Args:
        model: the attribute of the Lightning module that holds the model; dots are allowed
            (``"policy.model"``). The default is the first transformers model in the module; with
            ``forward``, a module without one is the model itself.
        vocab_size: the number of token ids; by default that of the model's config.
        lengths: the lengths of the test sequences.
        grad: also check gradients. If parameters are DTensors, gradients are never checked, because FSDP2
            would reduce them over ranks.
        tolerance: as for ``check_packing``; None chooses it by the dtype.
        forward: ``forward(model, batch)`` returns logits, as for ``check_packing``. It is for a model that is
            called in another way than ``model(batch)``, or for layers in the Lightning module itself.
        loss: check the loss of ``training_step`` too. It is not checked with manual optimisation, in a
            pipeline, and on batches of pairs, images, shared prefixes or labels of sequences. That of
            ``validation_step`` is never checked.
    """

    def __init__(
        self,
        *,
        model: str | None = None,
        vocab_size: int | None = None,
        lengths: Sequence[int] = (7, 1, 16, 3, 8),
        grad: bool = True,
        tolerance: float | None = None,
        forward: Forward | None = None,
        loss: bool = True,
    ) -> None:
        if model is not None:
            instance(model, "model", str, advice="Pass the attribute that holds the model: 'policy.model'.")
        check_options(vocab_size, tolerance)
        flags(grad=grad, loss=loss)
        if forward is not None and not callable(forward):
            raise TypeError(
                f"forward is {described(forward)}; wanted a function of model and batch that returns logits."
            )
        self.model = model
        self.vocab_size = vocab_size
        self.lengths = tuple(host_ints(lengths, "lengths", advice="Pass at least two lengths.").tolist())
        self.grad = grad
        self.tolerance = tolerance
        self.forward = forward
        self.loss = loss
        self._sees_first_batch = False
        self.report: PackingReport | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Run the check."""
        model = self._model_of(pl_module)
        sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        with trainer.precision_plugin.forward_context():
            self.report = check_packing(
                model,
                self.vocab_size,
                self.lengths,
                self.grad and not sharded,
                forward=self.forward,
                tolerance=self.tolerance,
                thorough=False,
            )
        if is_overridden("validation_step", pl_module):
            unseen = "the loss of validation_step: PackingCheck runs training_step only"
            self.report = replace(self.report, skipped=(*self.report.skipped, unseen))
        rank_zero_info(f"PackingCheck: no sequence sees another.\n{self.report}")
        self._sees_first_batch = True

    def _model_of(self, pl_module: L.LightningModule) -> nn.Module:
        """Return the model that is checked."""
        try:
            return find_model(pl_module, self.model)
        except MisconfigurationException:
            if self.forward is None:
                raise
            return pl_module

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Check the loss before the first step."""
        is_first = self._sees_first_batch
        self._sees_first_batch = False
        if not (is_first and self.loss and isinstance(batch, Packed)):
            return
        assert self.report is not None
        reason = _unlike_tokens(trainer, pl_module, batch.packs[0])
        if reason is not None:
            self.report = replace(self.report, skipped=(*self.report.skipped, f"the loss: {reason}"))
            return

        # Ranks that share a model must run the same packs.
        tokens: Tokens = trainer.strategy.broadcast(Tokens.of(batch.packs[0]))
        step = type(pl_module).training_step  # not what a callback put in its place, such as a graph's
        takes_index = is_param_in_hook_signature(pl_module.training_step, "batch_idx", min_args=2)

        def loss_fn(module: Any, pack: THDBatch) -> Any:
            return step(module, pack, batch_idx) if takes_index else step(module, pack)

        several = isinstance(batch, THDStep) or weighs_microbatches(job_of(trainer), None)
        with trainer.precision_plugin.train_step_context(), _without_logs(pl_module):
            self.report = check_step(
                self.report,
                pl_module,
                loss_fn,
                tokens,
                model=self._model_of(pl_module),
                forward=self.forward,
                what=f"{type(pl_module).__name__}.training_step",
                several=several,
            )
        if self.report.loss is not None:
            rank_zero_info(f"PackingCheck: the loss of training_step is {self.report.loss}.")
        else:
            rank_zero_info(f"PackingCheck: not looked at: {self.report.skipped[-1]}.")


def _unlike_tokens(trainer: L.Trainer, pl_module: L.LightningModule, batch: THDBatch) -> str | None:
    """Return why a loss cannot be measured on a pack of plain tokens, or None."""
    if not pl_module.automatic_optimization:
        return "training_step optimises by itself"
    if getattr(trainer.strategy, "pipeline_parallel_size", 1) != 1:
        return "a pipeline runs it"
    if batch.roles is not None:
        return "it compares queries and documents"
    if not batch.boundaries.own_slots:
        return "sequences share prefixes, or ranks share a pack"
    if batch.extras:
        return f"batches hold {', '.join(sorted(batch.extras))} beside tokens"
    return None


@contextmanager
def _without_logs(pl_module: L.LightningModule) -> Iterator[None]:
    """Let ``self.log`` do nothing inside this context."""
    own = vars(pl_module).get("log")
    vars(pl_module)["log"] = lambda *_, **__: None
    try:
        yield
    finally:
        del vars(pl_module)["log"]
        if own is not None:
            vars(pl_module)["log"] = own


def find_model(pl_module: nn.Module, name: str | None) -> nn.Module:
    """Return the submodule at the path ``name``; without a name, the first transformers model."""
    if name is not None:
        return pl_module.get_submodule(name)
    for _, model in models_in(pl_module):
        if hasattr(model, "get_input_embeddings"):
            language_model: nn.Module = model
            return language_model

    otherwise = ", or pass forward=, a function of module and batch"
    raise MisconfigurationException(
        f"PackingCheck found no transformers model in {type(pl_module).__name__}. "
        f"{where_the_model_is(pl_module, otherwise=otherwise)} The model's forward must take a THDBatch and "
        "return logits."
    )
