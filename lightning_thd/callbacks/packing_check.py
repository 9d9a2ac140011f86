"""A Lightning module at the start of fit -> a leak check of its model."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_thd._checks import flags, host_ints, instance
from lightning_thd._find import models_in
from lightning_thd.models.probe import check_options, check_packing
from lightning_thd.models.probe_report import PackingReport


class PackingCheck(L.Callback):
    """Runs ``check_packing`` when fit starts, on the model with its device, dtype and sharding for training.

    The check takes a few forwards and, with ``grad``, backwards of ``sum(lengths)`` tokens. If sequences leak
    into each other, the run stops with ``PackingLeakError``.

    Args:
        model: the attribute of the Lightning module that holds the model; dots are allowed
            (``"policy.model"``). The default is the first transformers model in the module.
        vocab_size: the number of token ids; by default that of the model's config.
        lengths: the lengths of the test sequences.
        grad: also check gradients. If parameters are DTensors, gradients are never checked, because FSDP2
            would reduce them over ranks.
        tolerance: as for ``check_packing``; None chooses it by the dtype.
    """

    def __init__(
        self,
        *,
        model: str | None = None,
        vocab_size: int | None = None,
        lengths: Sequence[int] = (7, 1, 16, 3, 8),
        grad: bool = True,
        tolerance: float | None = None,
    ) -> None:
        if model is not None:
            instance(model, "model", str, advice="Pass the attribute that holds the model: 'policy.model'.")
        check_options(vocab_size, tolerance)
        flags(grad=grad)
        self.model = model
        self.vocab_size = vocab_size
        self.lengths = tuple(host_ints(lengths, "lengths", advice="Pass at least two lengths.").tolist())
        self.grad = grad
        self.tolerance = tolerance
        self.report: PackingReport | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Run the check."""
        model = find_model(pl_module, self.model)
        sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        with trainer.precision_plugin.forward_context():
            self.report = check_packing(
                model,
                self.vocab_size,
                self.lengths,
                self.grad and not sharded,
                tolerance=self.tolerance,
                thorough=False,
            )
        rank_zero_info(f"PackingCheck: no sequence sees another.\n{self.report}")


def find_model(pl_module: nn.Module, name: str | None) -> nn.Module:
    """Return the submodule at the path ``name``; without a name, the first transformers model."""
    if name is not None:
        return pl_module.get_submodule(name)
    for _, model in models_in(pl_module):
        if hasattr(model, "get_input_embeddings"):
            language_model: nn.Module = model
            return language_model

    raise MisconfigurationException(
        f"PackingCheck found no transformers model in {type(pl_module).__name__}. Name the attribute that "
        "holds your model, PackingCheck(model='net', vocab_size=...). Its forward must take a THDBatch and "
        "return logits."
    )
