"""A Lightning module about to be trained -> the leak probe on its model, once, before the first step."""

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
    """Run ``check_packing`` when fit starts, on the model as it will be trained: device, dtype, sharding.

    Takes a few forwards and backwards of ``sum(lengths)`` tokens. A leak ends the run with
    ``PackingLeakError``, which names the module.

    Args:
        model: attribute of the Lightning module that holds the model, dots allowed (``"policy.model"``). By
            default the first transformers model found in it.
        vocab_size: number of tokens; from the model's config when absent.
        lengths: of the sequences to try.
        grad: check gradients too; switched off where parameters are sharded (FSDP2 would reduce gradients).
        tolerance: the largest allowed difference between packed and single; None depends on the dtype.
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
        """Run the probe, only at the first fit of a trainer."""
        if self.report is not None:
            return
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
    """Find the model to probe by its path, or the outermost one with a config."""
    if name is not None:
        return pl_module.get_submodule(name)
    for _, model in models_in(pl_module):
        if hasattr(model, "get_input_embeddings"):
            found: nn.Module = model
            return found
    raise MisconfigurationException(
        f"PackingCheck found no transformers model in {type(pl_module).__name__}. Name the attribute that "
        "holds yours, PackingCheck(model='net', vocab_size=...); its forward takes a THDBatch and returns "
        "logits."
    )
