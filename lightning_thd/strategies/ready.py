"""Lightning's strategies with our mixin: "thd" on one device, "thd_ddp", "thd_model_parallel"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_thd._checks import choice, flags, instance, whole_number
from lightning_thd._private import private_of
from lightning_thd.alignment import Layout
from lightning_thd.parallel.context.layout import Communication
from lightning_thd.parallel.experts import require_dispatch
from lightning_thd.parallel.fsdp import models_of, trains_towers
from lightning_thd.parallel.mesh import check_sizes
from lightning_thd.parallel.pipeline import ScheduleName
from lightning_thd.strategies.mixin import THDStrategyMixin
from lightning_thd.strategies.pack_cut import check_degrees, check_ways
from lightning_thd.strategies.shards import whole_state_dict


class THDSingleDeviceStrategy(THDStrategyMixin, SingleDeviceStrategy):
    """``Trainer(strategy="thd")``: one device, steps with varying numbers of microbatches."""

    strategy_name = "thd"

    def __init__(self, device: torch.device | str | None = None, **kwargs: Any) -> None:
        super().__init__(device=device or "cpu", **kwargs)
        # Empty until Lightning sets the device, which it does only if the list is empty.
        self._chosen = [] if device is None else [torch.device(device)]

    @property
    def root_device(self) -> torch.device:
        """Return the device of the model: the chosen one, which is the CPU until there is a choice."""
        return self._chosen[0] if self._chosen else super().root_device

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Return the one chosen device as a list, which Lightning reads and sets."""
        return self._chosen

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices and len(devices) > 1:
            raise MisconfigurationException(
                f"strategy='thd' runs on one device, but the Trainer has {len(devices)}. "
                "Use strategy='thd_ddp', or Trainer(devices=1)."
            )
        self._chosen = [torch.device(device) for device in devices or ()]


# The arguments that THDModelParallelStrategy has and THDDDPStrategy has not.
_SHARDING = (
    "data_parallel_size",
    "data_parallel_replicas",
    "tensor_parallel_size",
    "tensor_parallel_plan",
    "sequence_parallel",
    "reshard_after_forward",
    "asynchronous_checkpoints",
    "pipeline_parallel_size",
    "pipeline_schedule",
    "stages_per_rank",
    "pipeline_split",
    "expert_parallel_size",
)


def _refuse_sharding(arguments: dict[str, Any]) -> None:
    """Refuse arguments for sharded parameters, which DDP would only refuse when training begins."""
    names = [f"{name}=" for name in arguments if name in _SHARDING]
    if names:
        raise TypeError(
            f"THDDDPStrategy has no {', '.join(names)}: it replicates the parameters on every rank. Use "
            "THDModelParallelStrategy, which shards them and takes the same arguments besides."
        )


class THDDDPStrategy(THDStrategyMixin, DDPStrategy):
    """``Trainer(strategy="thd_ddp")``: replicated parameters, steps with varying numbers of microbatches.

    Args:
        context_parallel_size: number of ranks that share the slots of a pack.
            ``dynamic`` chooses 1, 2, 4, ... ranks for every microbatch: long sequences are shared, short ones
            stay whole. Then ``THDDataModule(capacity=...)`` is the capacity of one rank, and each of
            the n packs of ``Packs(n)`` has that of the largest group.
        max_context_parallel_size: most ranks that share a sequence under ``dynamic``, a power of two.
        context_parallel_layout: ``dual_chunk`` gives ranks equal work; ``contiguous`` pads no sequence;
            ``striped`` does both, with a kernel call for each rank's keys; ``mixed`` keeps short sequences
            whole, so that ranks exchange few keys.
        context_parallel_communication: what attention exchanges. ``all_gather``: all keys and values.
            ``needed``: only those that a rank's queries see. ``ring``: the same, from one rank after another.
            ``ulysses``: all slots of some heads. ``auto``: the faster of ``needed`` and ``ulysses``.
        broadcast_data: one of the ranks that share packs reads the data, and sends it to the others. Iterable
            datasets need it if they do not state which part they read.
        kwargs: the arguments of Lightning's ``DDPStrategy``.
    """

    strategy_name = "thd_ddp"

    def __init__(
        self,
        *,
        context_parallel_size: int | Literal["dynamic"] = 1,
        max_context_parallel_size: int | None = None,
        context_parallel_layout: Layout = "dual_chunk",
        context_parallel_communication: Communication = "auto",
        broadcast_data: bool = False,
        **kwargs: Any,
    ) -> None:
        _refuse_sharding(kwargs)
        super().__init__(**kwargs)
        _configure(
            self,
            size=context_parallel_size,
            max_size=max_context_parallel_size,
            layout=context_parallel_layout,
            communication=context_parallel_communication,
            broadcast_data=broadcast_data,
        )

    def configure_ddp(self) -> None:
        """Wrap the model in DDP; let DDP accept that a rank without images does not use a vision tower."""
        assert self.lightning_module is not None
        if any(trains_towers(model) for model in models_of(self.lightning_module)):
            options = private_of(self, "lightning.pytorch.strategies.DDPStrategy._ddp_kwargs")
            options.setdefault("find_unused_parameters", True)
        super().configure_ddp()


class THDModelParallelStrategy(THDStrategyMixin, ModelParallelStrategy):
    """``Trainer(strategy="thd_model_parallel")``: the strategy shards the model that the user built.

    Weights are cut over the tensor-parallel ranks by the model's own plan, and sharded by FSDP2 over data and
    context ranks. All ranks begin with the weights of rank 0, or of the first rank of their pipeline stage.
    Build the model in ``__init__`` or in ``configure_model``. A model that you have sharded stays as it is.
    ``context_parallel_...`` and ``broadcast_data`` are those of ``THDDDPStrategy``.

    Args:
        data_parallel_size: number of groups that read different data; ``auto`` uses all processes.
        data_parallel_replicas: number of copies of all weights, such as one a node. A copy is sharded over
            neighbouring data-parallel ranks; gradients are averaged over the copies too.
        tensor_parallel_size: number of ranks that each hold some rows or columns of the weights.
        tensor_parallel_plan: a dict from module names below a model to styles (``parallel.tensor``), instead
            of the model's own plan.
        sequence_parallel: tensor-parallel ranks share the slots between blocks, which saves memory.
        reshard_after_forward: free a layer's gathered weights between its forward and backward pass; with
            False, weights stay until the step's end. ``auto`` frees them, but not under a pipeline.
        asynchronous_checkpoints: write checkpoints in the background; the previous one stays until the new
            one is complete. ``wait_for_checkpoint()`` waits for it.
        process_group_backend: the backend of ``torch.distributed``.
        timeout: the timeout of collectives; if a rank dies, the job ends after this time at the latest.
        pipeline_parallel_size: number of ranks that each hold some layers; see docs/guides/pipelines.md.
        pipeline_schedule: ``1f1b``, or ``interleaved`` with several stages per rank and a smaller bubble.
        stages_per_rank: stages of each rank, above 1 only for ``interleaved``.
        pipeline_split: ``auto`` by FLOPs and parameters, or the number of layers of each stage.
        expert_parallel_size: number of ranks that each hold some whole experts, to which transformers sends
            the tokens (transformers 5.23 and later). They are ranks of the other axes: the number divides
            data x context x tensor ranks, and FSDP2 shards experts over the rest. Other weights stay as they
            are.
    """

    strategy_name = "thd_model_parallel"

    def __init__(
        self,
        *,
        data_parallel_size: Literal["auto"] | int = "auto",
        data_parallel_replicas: int = 1,
        context_parallel_size: int | Literal["dynamic"] = 1,
        max_context_parallel_size: int | None = None,
        tensor_parallel_size: int = 1,
        tensor_parallel_plan: dict[str, str] | None = None,
        sequence_parallel: bool = False,
        context_parallel_layout: Layout = "dual_chunk",
        context_parallel_communication: Communication = "auto",
        broadcast_data: bool = False,
        reshard_after_forward: bool | Literal["auto"] = "auto",
        asynchronous_checkpoints: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        pipeline_parallel_size: int = 1,
        pipeline_schedule: ScheduleName = "1f1b",
        stages_per_rank: int = 1,
        pipeline_split: Literal["auto"] | Sequence[int] = "auto",
        expert_parallel_size: int = 1,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)

        check_sizes(
            data=data_parallel_size,
            tensor=tensor_parallel_size,
            replicas=data_parallel_replicas,
            expert=expert_parallel_size,
        )
        if expert_parallel_size > 1:
            _check_experts(expert_parallel_size, context_parallel_size, sequence_parallel)
        _check_pipeline(pipeline_parallel_size, pipeline_schedule, stages_per_rank, pipeline_split)
        if tensor_parallel_plan is not None:
            advice = "Pass names of modules and their styles: {'mlp.up_proj': 'colwise'}."
            instance(tensor_parallel_plan, "tensor_parallel_plan", Mapping, advice=advice)
        if process_group_backend is not None:
            instance(process_group_backend, "process_group_backend", str, advice="Pass 'nccl' or 'gloo'.")
        if reshard_after_forward != "auto":
            flags(reshard_after_forward=reshard_after_forward)
        flags(sequence_parallel=sequence_parallel, asynchronous_checkpoints=asynchronous_checkpoints)

        _configure(
            self,
            size=context_parallel_size,
            max_size=max_context_parallel_size,
            layout=context_parallel_layout,
            communication=context_parallel_communication,
            broadcast_data=broadcast_data,
        )
        self.data_parallel_size = data_parallel_size
        self.data_parallel_replicas = data_parallel_replicas
        self.tensor_parallel_size = tensor_parallel_size
        self.tensor_parallel_plan = tensor_parallel_plan
        self.sequence_parallel = sequence_parallel and tensor_parallel_size > 1
        self.reshard_after_forward = reshard_after_forward
        self.asynchronous_checkpoints = asynchronous_checkpoints
        self.pipeline_parallel_size = pipeline_parallel_size
        self.pipeline_schedule = pipeline_schedule
        self.stages_per_rank = stages_per_rank
        self.pipeline_split = pipeline_split
        self.expert_parallel_size = expert_parallel_size

    def save_pretrained(self, folder: str | Path, model: nn.Module | None = None) -> None:
        """Write the whole weights into a Hugging Face folder; a collective in which rank 0 writes.

        ``model`` is a PreTrainedModel of the LightningModule; the default is its only one.
        """
        assert self.lightning_module is not None
        if model is None:
            model = _only_pretrained_model(self.lightning_module)

        axes = self._axes
        # The ranks of the pipeline that begins at this stage's first rank gather, stage by stage.
        gathers = axes is None or axes.meshes is None or axes.meshes.stage.get_local_rank() == 0
        of_stage = whole_state_dict(model, keep=gathers)
        state = of_stage
        if self._pipeline is not None and gathers:
            state = self._pipeline.gather_states(of_stage)

        if self.is_global_zero:
            exporter: Any = model
            exporter.save_pretrained(str(folder), state_dict=state)
        if self._pipeline is not None and gathers and hasattr(model, "get_base_model"):
            self._pipeline.write_adapters(Path(folder), model, of_stage)
        self.barrier()


def _only_pretrained_model(module: nn.Module) -> nn.Module:
    """Return the model of a LightningModule that has ``save_pretrained``; refuse none and several."""
    models = [model for model in models_of(module) if hasattr(model, "save_pretrained")]
    if len(models) != 1:
        raise ValueError(
            f"{type(module).__name__} holds {len(models)} models with save_pretrained(), wanted one. Pass "
            "model=."
        )
    return models[0]


def register_strategies() -> None:
    """Register the names with Lightning's ``Trainer(strategy=...)``; ``import lightning_thd`` calls it."""
    for strategy in (THDSingleDeviceStrategy, THDDDPStrategy, THDModelParallelStrategy):
        if strategy.strategy_name not in StrategyRegistry:
            StrategyRegistry.register(strategy.strategy_name, strategy, description=strategy.__doc__ or "")


def _check_experts(size: int, context: int | str, sequence_parallel: bool) -> None:
    require_dispatch()
    if context == "dynamic":
        raise ValueError(
            f"expert_parallel_size={size} with context_parallel_size='dynamic': not all ranks run every "
            "microbatch together, as the exchange of tokens needs. Set a fixed context_parallel_size."
        )
    if sequence_parallel:
        raise ValueError(
            f"expert_parallel_size={size} with sequence_parallel=True: both divide the tokens of "
            "tensor-parallel ranks. Leave sequence_parallel out."
        )


def _configure(
    strategy: Any,
    *,
    size: int | str,
    max_size: int | None,
    layout: Layout,
    communication: Communication,
    broadcast_data: bool,
) -> None:
    """Check the arguments of context parallelism, and set the attributes that ``THDStrategyMixin`` reads."""
    check_degrees(size, max_size)
    flags(broadcast_data=broadcast_data)
    check_ways(layout, communication)
    strategy.context_parallel_size = size
    strategy.max_context_parallel_size = max_size
    strategy.context_parallel_layout = layout
    strategy.context_parallel_communication = communication
    strategy.broadcast_data = broadcast_data


def _check_pipeline(
    size: int, schedule: str, stages_per_rank: int, split: Literal["auto"] | Sequence[int]
) -> None:
    """Refuse arguments of a pipeline that contradict each other."""
    whole_number(size, "pipeline_parallel_size", least=1)
    whole_number(stages_per_rank, "stages_per_rank", least=1)
    choice(schedule, "pipeline_schedule", *get_args(ScheduleName))
    if (stages_per_rank > 1) != (schedule == "interleaved"):
        raise ValueError(
            f"pipeline_schedule={schedule!r} with stages_per_rank={stages_per_rank}: 'interleaved' takes 2 "
            "or more stages a rank, '1f1b' one."
        )
    if size == 1 and (stages_per_rank > 1 or not isinstance(split, str)):
        raise ValueError(
            f"stages_per_rank={stages_per_rank}, pipeline_split={split!r} with pipeline_parallel_size=1: "
            "there are no stages. Set pipeline_parallel_size, or leave both out."
        )
