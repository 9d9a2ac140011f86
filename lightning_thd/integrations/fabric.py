"""A Fabric loop -> packed steps, the exact loss, and throughput in its loggers."""

from __future__ import annotations

from typing import Any, Literal

from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.fabric.wrappers import is_wrapped
from torch import nn

from lightning_thd.alignment import Layout
from lightning_thd.data import THDDataModule
from lightning_thd.data.loader import THDLoader
from lightning_thd.flops import FlopsModel
from lightning_thd.integrations.packed_loop import (
    Engine,
    LossFn,
    PackedLoop,
    as_loader,
    asks_boundaries,
    balancing,
)
from lightning_thd.loss import causal_lm_loss
from lightning_thd.loss.router_balance import RouterBalance
from lightning_thd.models.preparing import prepare_if_asked
from lightning_thd.parallel.across_ranks import ALONE
from lightning_thd.parallel.context.layout import Communication
from lightning_thd.strategies.guards import refused_engine
from lightning_thd.strategies.pack_cut import share_packs


def prepare_fabric(
    fabric: Fabric,
    model: nn.Module,
    data: THDDataModule | THDLoader,
    optimizer: Any,
    *,
    accumulate: int = 1,
    loss_fn: LossFn = causal_lm_loss,
    router_balance: RouterBalance | None = None,
    peak: Literal["auto", "measure"] | float = "auto",
    flops_model: FlopsModel | None = None,
    log_every_n_steps: int = 50,
    context_parallel_size: int = 1,
    context_parallel_layout: Layout = "dual_chunk",
    context_parallel_communication: Communication = "auto",
    needs_boundaries: bool = True,
) -> PackedLoop:
    """Prepare a model, packed data and an optimizer for a Fabric loop.

    Args:
        fabric: a launched Fabric on one or several devices. Under its ``ModelParallelStrategy`` the ranks
            along the mesh's ``data_parallel`` axis read different packs; ``parallelize_fn`` cuts the weights.
        model: a model built with ``attn_implementation="thd"``, before or after ``fabric.setup_module``.
        data: a ``THDDataModule``, or a loader that its ``train_steps`` returned.
        optimizer: an optimizer of the model's parameters, set up or not, or a list of several; then
            ``loop.optimizer`` is a list. For strategies that replace parameters, pass a function that makes
            the optimizers of the prepared model.
        accumulate: packs per rank in a step of ``Packs``; 1 with ``Sequences(n)``.
        loss_fn: ``(model, batch) -> loss``, which multiplies the loss by ``batch.loss_scale``.
        router_balance: the tokens over which ``causal_lm_loss`` balances experts.
        peak: dense FLOP/s of a device, for MFU: see ``THDThroughputMonitor``.
        flops_model: the model's FLOPs, if they cannot be read from its config: see there.
        log_every_n_steps: steps between two calls of ``fabric.log_dict``.
        context_parallel_size: number of neighbouring ranks that share a pack's slots; see ``prepare_thd``.
        context_parallel_layout: as for ``prepare_thd``.
        context_parallel_communication: as for ``prepare_thd``.
        needs_boundaries: refuse a ``loss_fn`` whose first pack of several sequences is asked for no
            boundaries; see ``THDDataModule``, which may say it too.

    Returns:
        The loop. To save, pass a dict with ``loop.model``, ``loop.optimizer``, ``loop.loader`` and ``loop``
        to ``fabric.save``. To resume, pass the same dict to ``fabric.load``.

    Raises:
        ValueError: if the data is of another type, the optimizer's parameters were replaced, or the strategy
            runs steps or cuts batches by itself.
    """
    refused = refused_engine(type(fabric.strategy))
    if refused is not None:
        engine_name, reason = refused
        raise ValueError(
            f"prepare_fabric under {engine_name}, {reason}. Use Fabric(strategy='ddp'), 'fsdp', "
            "ModelParallelStrategy or one device."
        )

    needs_boundaries = asks_boundaries(data, needs_boundaries)
    prepare_if_asked(model)
    reader = share_packs(
        model,
        data_rank(fabric),
        fabric.device,
        context_parallel_size,
        context_parallel_layout,
        context_parallel_communication,
    )
    loader = as_loader(data, model, reader, accumulate=accumulate, device=fabric.device)
    model, optimizer = _set_up(fabric, model, optimizer)

    engine = Engine(
        backward=fabric.backward,
        no_sync=lambda module: fabric.no_backward_sync(module),  # type: ignore[arg-type]
        log=lambda metrics, step: fabric.log_dict(metrics, step),
        device=fabric.device,
        devices=fabric.world_size,
        reader=reader,
        precision=str(fabric.strategy.precision.precision),
    )
    return PackedLoop(
        engine,
        model,
        loader,
        optimizer,
        loss_fn=balancing(loss_fn, router_balance),
        peak=peak,
        flops_model=flops_model,
        log_every_n_steps=log_every_n_steps,
        needs_boundaries=needs_boundaries,
    )


def data_rank(fabric: Fabric) -> tuple[int, int, Any]:
    """Return this rank's index among the ranks with different data, their number and their group."""
    if not isinstance(fabric.strategy, ModelParallelStrategy):
        # All ranks read different data, also those of FSDP1's mesh.
        return fabric.global_rank, fabric.world_size, None if fabric.world_size > 1 else ALONE

    axis = fabric.strategy.device_mesh["data_parallel"]
    return axis.get_local_rank(), axis.size(), axis.get_group()


def _set_up(fabric: Fabric, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """Return Fabric's model and its optimizer, or list of optimizers; what is set up already stays."""
    prepared: nn.Module = model
    if not is_wrapped(model):
        prepared = fabric.setup_module(model)

    # A function gets the prepared model: FSDP1 and FSDP2 replace the parameters when they set it up.
    if callable(optimizer) and not hasattr(optimizer, "param_groups"):
        optimizer = optimizer(prepared)
    is_several = isinstance(optimizer, list | tuple)
    optimizers = optimizer if is_several else [optimizer]

    # The step of an optimizer whose parameters were replaced would change nothing, without an error.
    trained = {id(parameter) for parameter in prepared.parameters()}
    groups = [group for one in optimizers for group in one.param_groups]
    lost = [p for group in groups for p in group["params"] if id(p) not in trained]
    if lost:
        raise ValueError(
            f"The optimizer holds {len(lost)} parameters that are not the prepared model's: "
            f"{type(fabric.strategy).__name__} has replaced them, or another model has them. Give a function "
            "of the prepared model: prepare_fabric(fabric, model, data, lambda m: AdamW(m.parameters()))."
        )

    ready = [one if is_wrapped(one) else fabric.setup_optimizers(one) for one in optimizers]
    return prepared, ready if is_several else ready[0]
