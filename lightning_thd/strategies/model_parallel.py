"""``"thd_model_parallel"``: data, context and tensor parallelism of a model the user built on one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_thd._checks import described, flags, instance, whole_number
from lightning_thd.alignment import Layout
from lightning_thd.parallel import fsdp
from lightning_thd.parallel.context.costs import CommCosts
from lightning_thd.parallel.context.layout import Communication
from lightning_thd.parallel.mesh import check_sizes
from lightning_thd.parallel.pipeline import ScheduleName
from lightning_thd.strategies.dynamic import check_degrees, check_ways
from lightning_thd.strategies.pipeline.mixin import PipelineMixin


class THDModelParallelStrategy(PipelineMixin, ModelParallelStrategy):
    """``Trainer(strategy="thd_model_parallel")``: the strategy shards the model that the user built.

    Weights are cut over the tensor-parallel ranks by the model's own plan, and sharded by FSDP2 over all
    others. Rank 0's initial weights are everybody's. Build the model in ``__init__`` or ``configure_model``;
    one that is sharded there already is left as it is. ``context_parallel_size``,
    ``max_context_parallel_size``, ``context_parallel_layout``, ``context_parallel_communication``,
    ``context_parallel_costs``, ``broadcast_data`` and ``check_plans`` are those of ``THDDDPStrategy``.

    Args:
        data_parallel_size: groups that read different data; ``auto`` takes what the others leave.
        data_parallel_replicas: groups of neighbours among the data-parallel ranks, nodes say, that each share
            all weights among them: weights are gathered within a group, gradients averaged over groups too.
        tensor_parallel_size: ranks that share the rows and columns of weights.
        tensor_parallel_plan: module names below a model to styles (``parallel.tensor``), in place of the
            model's own plan.
        sequence_parallel: tensor-parallel ranks share the slots between blocks, which saves memory of norms
            and residuals for two more collectives a block.
        reshard_after_forward: free a layer's gathered weights between its forward and backward pass, and
            gather them again for every microbatch; with False they are gathered once a step and stay until
            its end. ``auto`` frees them, but for pipelines whose gathered weights take no more than a quarter
            of a rank's memory.
        save_distributed_checkpoint: every rank writes its part into a folder that any layout can load; else
            rank 0 writes one file of whole weights.
        asynchronous_checkpoints: write those folders in the background; a checkpoint takes its name when it
            is whole, and the one before it stays until then. ``wait_for_checkpoint()`` waits for it.
        process_group_backend: of ``torch.distributed``.
        timeout: of its collectives; a rank that dies ends the job after it at the latest.
        pipeline_parallel_size: ranks that share the layers of a model; see ``docs`` on what a step must be.
        pipeline_schedule: ``1f1b``, or ``interleaved`` with several stages a rank and a smaller bubble.
        stages_per_rank: stages of each rank, above 1 for ``interleaved`` alone.
        pipeline_split: ``auto`` by FLOPs and memory, or the number of layers of each stage.
        expert_parallel_size: must be 1; tensor-parallel ranks share out experts.
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
        context_parallel_costs: CommCosts | Literal["measure"] | None = None,
        reshard_after_forward: bool | Literal["auto"] = "auto",
        broadcast_data: bool = False,
        check_plans: bool = False,
        save_distributed_checkpoint: bool = True,
        asynchronous_checkpoints: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        pipeline_parallel_size: int = 1,
        pipeline_schedule: ScheduleName = "1f1b",
        stages_per_rank: int = 1,
        pipeline_split: Literal["auto"] | Sequence[int] = "auto",
        expert_parallel_size: int = 1,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        _refuse_other_axes(expert=expert_parallel_size)
        _check_pipeline(pipeline_parallel_size, pipeline_schedule, stages_per_rank)
        _check_split(pipeline_split, pipeline_parallel_size)
        check_sizes(data=data_parallel_size, tensor=tensor_parallel_size, replicas=data_parallel_replicas)
        if tensor_parallel_plan is not None:
            advice = "Pass names of modules and their styles: {'mlp.up_proj': 'colwise'}."
            instance(tensor_parallel_plan, "tensor_parallel_plan", Mapping, advice=advice)
        if process_group_backend is not None:
            instance(process_group_backend, "process_group_backend", str, advice="Pass 'nccl' or 'gloo'.")
        flags(
            sequence_parallel=sequence_parallel,
            broadcast_data=broadcast_data,
            check_plans=check_plans,
            save_distributed_checkpoint=save_distributed_checkpoint,
            asynchronous_checkpoints=asynchronous_checkpoints,
        )
        if pipeline_parallel_size > 1 and not save_distributed_checkpoint:
            raise ValueError(
                f"save_distributed_checkpoint=False with pipeline_parallel_size={pipeline_parallel_size}: "
                "the first rank would write the weights of its own layers alone. Leave it True; "
                "save_pretrained(folder) writes whole weights."
            )
        self.pipeline_parallel_size = pipeline_parallel_size
        self.pipeline_schedule = pipeline_schedule
        self.stages_per_rank = stages_per_rank
        self.pipeline_split = pipeline_split
        self.data_parallel_size = data_parallel_size
        self.data_parallel_replicas = data_parallel_replicas
        check_degrees(context_parallel_size, max_context_parallel_size)
        check_ways(context_parallel_layout, context_parallel_communication, context_parallel_costs)
        self.context_parallel_size = context_parallel_size
        self.max_context_parallel_size = max_context_parallel_size
        self.tensor_parallel_size = tensor_parallel_size
        self.tensor_parallel_plan = tensor_parallel_plan
        self.sequence_parallel = sequence_parallel and tensor_parallel_size > 1
        self.context_parallel_layout = context_parallel_layout
        self.context_parallel_communication = context_parallel_communication
        self.context_parallel_costs = context_parallel_costs
        if not isinstance(reshard_after_forward, bool | str) or reshard_after_forward not in (
            True,
            False,
            "auto",
        ):
            raise ValueError(
                f"reshard_after_forward={reshard_after_forward!r} is not one of True, False, 'auto'."
            )
        self.reshard_after_forward = reshard_after_forward
        self.broadcast_data, self.check_plans = broadcast_data, check_plans
        self.asynchronous_checkpoints = asynchronous_checkpoints

    def save_pretrained(self, folder: str | Path, model: nn.Module | None = None) -> None:
        """Write the whole weights into a Hugging Face folder; a collective, rank 0 writes.

        Args:
            folder: where to.
            model: a PreTrainedModel of the LightningModule; its only one when absent.

        Raises:
            ValueError: when there is none or more than one.
        """
        assert self.lightning_module is not None
        if model is None:
            found = [m for m in fsdp.models_of(self.lightning_module) if hasattr(m, "save_pretrained")]
            if len(found) != 1:
                raise ValueError(
                    f"{type(self.lightning_module).__name__} holds {len(found)} models with "
                    "save_pretrained(), wanted one. Pass model=."
                )
            model = found[0]
        state = self._all_stages(whole_state_dict(model, keep=self._first_of_stage))
        if self.is_global_zero:
            exporter: Any = model
            exporter.save_pretrained(str(folder), state_dict=state)
        self.barrier()


def _refuse_other_axes(**sizes: int) -> None:
    for axis, size in sizes.items():
        whole_number(size, f"{axis}_parallel_size", advice="1 makes no such axis.")
        if size != 1:
            raise MisconfigurationException(
                f"{axis}_parallel_size={size}: there is no {axis} axis. Supported are data_parallel_size, "
                "context_parallel_size, pipeline_parallel_size and tensor_parallel_size, whose ranks share "
                "out experts."
            )


def _check_split(split: object, size: int) -> None:
    if isinstance(split, str) and split == "auto":
        return
    if isinstance(split, str) or not isinstance(split, Sequence):
        raise TypeError(
            f"pipeline_split is {described(split)}; wanted 'auto', or the number of layers of each stage."
        )
    for layers in split:
        whole_number(layers, "A number in pipeline_split", least=1, advice="Each stage holds some layers.")
    if size == 1:
        raise ValueError(
            f"pipeline_split={list(split)} with pipeline_parallel_size=1: there are no stages to split into. "
            "Set pipeline_parallel_size, or leave the split out."
        )


def _check_pipeline(size: int, schedule: str, stages_per_rank: int) -> None:
    whole_number(size, "pipeline_parallel_size", least=1)
    whole_number(stages_per_rank, "stages_per_rank", least=None)
    if not isinstance(schedule, str) or schedule not in ("1f1b", "interleaved"):
        raise ValueError(f"pipeline_schedule={schedule!r} is not one of '1f1b', 'interleaved'.")
    if (stages_per_rank > 1) != (schedule == "interleaved") or stages_per_rank < 1:
        raise ValueError(
            f"pipeline_schedule={schedule!r} with stages_per_rank={stages_per_rank}: 'interleaved' takes 2 "
            "or more stages a rank, '1f1b' one."
        )
    if size == 1 and stages_per_rank > 1:
        raise ValueError(
            f"stages_per_rank={stages_per_rank} with pipeline_parallel_size=1: set pipeline_parallel_size "
            "to the ranks of the pipeline."
        )


def whole_state_dict(model: nn.Module, *, keep: bool | None = None) -> Mapping[str, torch.Tensor]:
    """Gather every weight onto the CPU of ranks that ``keep`` them (0 by default), by name; a collective."""
    first = (not dist.is_initialized() or dist.get_rank() == 0) if keep is None else keep
    state: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if first:
            state[name] = whole.detach().cpu()
    return state
