"""An Accelerate loop -> packed steps, the exact loss, and throughput in its trackers."""

from __future__ import annotations

from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn

from lightning_thd._checks import described
from lightning_thd._imports import require
from lightning_thd._private import private
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
from lightning_thd.parallel.context.layout import Communication
from lightning_thd.strategies.guards import why_refused
from lightning_thd.strategies.pack_cut import share_packs

# accelerate's mixed_precision -> Lightning's name
_PRECISION = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "fp8": "transformer-engine"}


def prepare_accelerate(
    accelerator: Any,
    model: nn.Module,
    data: THDDataModule | THDLoader,
    optimizer: Any,
    scheduler: Any = None,
    *,
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
    """Prepare a model, packed data and an optimizer for an Accelerate loop.

    The plan gives every data-parallel rank different packs. ``accelerator.save_state`` and ``load_state``
    resume exactly; with ``Sequences(n)`` also on another number of processes.

    Args:
        accelerator: an ``accelerate.Accelerator``. Its ``gradient_accumulation_steps`` is the number of packs
            that a rank runs in a step of ``Packs``.
        model: built with ``attn_implementation="thd"``, not prepared yet.
        data: a ``THDDataModule``, or a loader that its ``train_steps`` returned.
        optimizer: an optimizer of the model's parameters, or a list; ``loop.optimizer`` is then a list too.
        scheduler: a scheduler that Accelerate has not prepared; it steps once per optimizer step.
        loss_fn: ``(model, batch) -> loss``, which multiplies the loss by ``batch.loss_scale``.
        router_balance: the tokens over which ``causal_lm_loss`` balances experts.
        peak: dense FLOP/s of a device, for MFU: see ``THDThroughputMonitor``.
        flops_model: the model's FLOPs, if they cannot be read from its config: see there.
        log_every_n_steps: steps between two calls of ``accelerator.log``.
        context_parallel_size: number of neighbouring ranks that share the slots of a pack, as under
            ``THDDDPStrategy``; sequences stay apart.
        context_parallel_layout: ``dual_chunk``, ``contiguous``, ``striped`` or ``mixed``.
        context_parallel_communication: ``auto``, ``all_gather``, ``ulysses``, ``needed`` or ``ring``.
        needs_boundaries: refuse a ``loss_fn`` whose first pack of several sequences is asked for no
            boundaries; see ``THDDataModule``, which may say it too.

    Returns:
        The loop. For every step of ``loop.loader``, call ``loop.backward(step)``, ``loop.optimizer.step()``
        and ``loop.optimizer.zero_grad()``.

    Raises:
        ValueError: for engines, parallelism and schedulers unfit for packs, or ``data`` of another type.
        TypeError: for a scheduler without ``step()``.
    """
    needs_boundaries = asks_boundaries(data, needs_boundaries)
    prepare_if_asked(model)
    schedulers = require("accelerate.scheduler", feature="prepare_thd")
    _refuse_parallelism(accelerator)
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise TypeError(f"scheduler is {described(scheduler)}; wanted a learning-rate scheduler, or None.")
    _refuse_fast_scheduler(accelerator, scheduler)

    reader = share_packs(
        model,
        data_rank(accelerator),
        accelerator.device,
        context_parallel_size,
        context_parallel_layout,
        context_parallel_communication,
    )
    loader = as_loader(
        data,
        model,
        reader,
        accumulate=accelerator.gradient_accumulation_steps,
        device=accelerator.device,
        name="gradient_accumulation_steps",
    )

    accelerator.sync_gradients = True  # after an error inside accumulate(), later Accelerators see False
    is_several = isinstance(optimizer, list | tuple)
    optimizers = optimizer if is_several else [optimizer]
    model, *prepared = accelerator.prepare(model, *optimizers)
    optimizer = prepared if is_several else prepared[0]
    if scheduler is not None:
        # With split_batches, the scheduler steps once per optimizer step, on any number of processes.
        scheduler = schedulers.AcceleratedScheduler(scheduler, prepared, split_batches=True)

    def backward(loss: Tensor) -> None:
        if not accelerator.sync_gradients:
            raise ValueError(
                "loop.backward() runs inside accelerator.accumulate(), but the loader yields whole optimizer "
                "steps, of which Accelerate would skip most. Leave accumulate() out; "
                "gradient_accumulation_steps says how many packs a step has."
            )
        # Accelerate divides by its accumulation steps, but the loop has divided the loss already.
        accelerator.backward(loss * accelerator.gradient_accumulation_steps)

    engine = Engine(
        backward=backward,
        no_sync=accelerator.no_sync,
        log=lambda metrics, step: accelerator.log(metrics, step=step),
        device=accelerator.device,
        devices=accelerator.num_processes,
        reader=reader,
        precision=_PRECISION.get(str(accelerator.mixed_precision), "32-true"),
    )
    loop = PackedLoop(
        engine,
        model,
        loader,
        optimizer,
        scheduler,
        loss_fn=balancing(loss_fn, router_balance),
        peak=peak,
        flops_model=flops_model,
        log_every_n_steps=log_every_n_steps,
        needs_boundaries=needs_boundaries,
    )
    accelerator.register_for_checkpointing(loader, loop)
    accelerator.register_save_state_pre_hook(lambda *_: loop._meter.pause())  # the next step resumes it
    if scheduler is not None:
        accelerator.register_for_checkpointing(scheduler)
    return loop


# The name at the top of the package, from before there was prepare_fabric beside it.
prepare_thd = prepare_accelerate


def _refuse_fast_scheduler(accelerator: Any, scheduler: Any) -> None:
    """Refuse a scheduler that Accelerate steps once for every process."""
    processes = accelerator.num_processes
    steps_once = getattr(scheduler, "split_batches", True) or not getattr(scheduler, "step_with_optimizer", 1)
    if processes > 1 and type(scheduler).__module__.startswith("accelerate.") and not steps_once:
        raise ValueError(
            f"scheduler was prepared by Accelerate, which steps it {processes} times per optimizer step, "
            "once for every process. Give prepare_thd the scheduler itself, counted in optimizer steps."
        )


def _refuse_parallelism(accelerator: Any) -> None:
    """Refuse engines and parallelism of Accelerate that run steps or cut sequences by themselves."""
    kind = getattr(accelerator.distributed_type, "name", "")
    why = why_refused(kind)
    if why is not None:
        raise ValueError(
            f"The accelerator runs {kind}, {why}. Use FSDP2 or DDP with prepare_thd, or Lightning "
            "with THDModelParallelStrategy."
        )

    config = accelerator.parallelism_config
    if config is None:
        return
    for name in ("cp_size", "sp_size"):
        size = getattr(config, name)
        if size > 1:
            raise ValueError(
                f"The accelerator has {name}={size}: its context parallelism replaces every mask by a causal "
                "one. Set it to 1, and prepare_thd(..., context_parallel_size=...)."
            )


def data_rank(accelerator: Any) -> tuple[int, int, Any]:
    """Return this rank's index among the ranks with different data, their number and their group."""
    config = accelerator.parallelism_config
    mesh = accelerator.torch_device_mesh if config is not None else None
    if mesh is None:
        return accelerator.process_index, accelerator.num_processes, None
    names = [name for name in ("dp_replicate", "dp_shard") if name in (mesh.mesh_dim_names or ())]
    if not names:  # all ranks read the same packs; as one group, they would count each pack several times
        ranks_apart = [[rank] for rank in range(mesh.size())]
        group_of_rank, _ = dist.new_subgroups_by_enumeration(ranks_apart)  # type: ignore[no-untyped-call]
        return 0, 1, group_of_rank

    rank = 0
    ranks = 1
    for name in names:  # replicas are the outer axis
        rank = rank * mesh[name].size() + mesh[name].get_local_rank()
        ranks *= mesh[name].size()

    if len(names) == 1:
        return rank, ranks, mesh[names[0]].get_group()
    # Only a flattened mesh has one group for two axes.
    flatten = private("torch.distributed.device_mesh.DeviceMesh._flatten")
    return rank, ranks, flatten(mesh[tuple(names)], "thd_data").get_group()
