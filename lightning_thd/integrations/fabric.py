"""A Fabric loop -> packed steps, the exact loss, and throughput in its loggers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal

from lightning.fabric import Fabric
from torch import nn

from lightning_thd.data import THDDataModule
from lightning_thd.data.loader import THDLoader
from lightning_thd.integrations.loop import Host, LossFn, PackedLoop, as_loader
from lightning_thd.loss import causal_lm_loss


def prepare_fabric(
    fabric: Fabric,
    model: nn.Module,
    data: THDDataModule | THDLoader,
    optimizer: Any,
    *,
    accumulate: int = 1,
    loss_fn: LossFn = causal_lm_loss,
    peak: Literal["auto", "measure"] | float = "auto",
    log_every_n_steps: int = 50,
) -> PackedLoop:
    """Prepare a model, packed data and an optimizer for a Fabric loop.

    Args:
        fabric: launched, with one device or data-parallel ranks.
        model: built with ``attn_implementation="thd"``, not set up yet.
        data: a ``THDDataModule``, or a loader that its ``train_steps`` returned.
        optimizer: over the model's parameters.
        accumulate: packs a rank runs in a step of ``Packs``; 1 with ``Sequences(n)``.
        loss_fn: ``(model, batch) -> loss``, with ``batch.loss_scale`` in it.
        peak: dense FLOP/s of a device, for MFU: see ``THDThroughputMonitor``.
        log_every_n_steps: steps between two calls of ``fabric.log_dict``.

    Returns:
        The loop. Save ``{"model": loop.model, "optimizer": loop.optimizer, "loader": loop.loader,
        "loop": loop}`` with ``fabric.save`` and give the same to ``fabric.load`` to resume.

    Raises:
        ValueError: for data of another kind.
    """
    loader = as_loader(data, model, rank=fabric.global_rank, ranks=fabric.world_size, accumulate=accumulate)
    model, optimizer = fabric.setup(model, optimizer)

    def no_sync(module: nn.Module) -> AbstractContextManager[None]:
        return fabric.no_backward_sync(module)  # type: ignore[arg-type]  # what fabric.setup returned

    host = Host(
        backward=fabric.backward,
        no_sync=no_sync,
        log=lambda metrics, step: fabric.log_dict(metrics, step),
        device=fabric.device,
        devices=fabric.world_size,
        ranks=fabric.world_size,
        precision=str(fabric._precision.precision),
    )
    return PackedLoop(
        host, model, loader, optimizer, loss_fn=loss_fn, peak=peak, log_every_n_steps=log_every_n_steps
    )
