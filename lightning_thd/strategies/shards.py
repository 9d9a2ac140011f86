"""A LightningModule built for one process -> its weights cut and sharded over the strategy's mesh."""

from __future__ import annotations

from collections.abc import Generator, MutableMapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_thd._private import private
from lightning_thd.models.weights import draw_weights, read_weights, require_unchanged
from lightning_thd.parallel import fsdp
from lightning_thd.parallel.across_ranks import on_host
from lightning_thd.parallel.draws import SharedDraws
from lightning_thd.parallel.mesh import TENSOR, Meshes
from lightning_thd.parallel.sequence import apply_sequence_parallel
from lightning_thd.parallel.tensor import apply_tensor_parallel, check_heads, model_plan
from lightning_thd.strategies.axes import Axes
from lightning_thd.strategies.checkpoints import plain_name
from lightning_thd.strategies.guards import refuse_lbfgs, refuse_partial_sharding
from lightning_thd.strategies.norms import clip_by_norm, clip_by_value, meshes


class WeightShards:
    """Cuts and shards the weights of a ``ModelParallelStrategy``, and clips their gradients."""

    def __init__(self, strategy: Any, axes: Axes) -> None:
        assert axes.meshes is not None
        self._strategy, self._axes = strategy, axes
        self._meshes: Meshes = axes.meshes
        self.draws: SharedDraws | None = None  # for tensor-parallel ranks, which run the same tokens
        self._towers: tuple[fsdp.TowerPaths, ...] = ()

    def setup(self, trainer: L.Trainer) -> None:
        """Shard the model unless the user has sharded it, then create the optimizers over its shards."""
        strategy: Any = self._strategy
        fits = trainer.state.fn == TrainerFn.FITTING
        # FSDP2 needs the weights' version counters, which inference mode lacks.
        evaluations: Any = (trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
        for loop in (*evaluations, trainer.fit_loop.epoch_loop.val_loop):
            loop.inference_mode = False
        strategy.accelerator.setup(trainer)
        if self._axes.sizes.tensor > 1:
            place = self._meshes.data_context.get_local_rank()
            self.draws = SharedDraws(strategy.broadcast(torch.initial_seed()), place)
        if fsdp.is_sharded(strategy.model):
            fsdp.reshard(strategy.model)
            refuse_partial_sharding(strategy.model, self._axes.sizes)
            self._towers = tuple(fsdp.tower_paths(self._put(strategy.model)))
        else:
            self._shard(strategy.model)
        strategy._checkpoints.open()
        strategy.barrier()
        if fits:
            strategy.setup_optimizers(trainer)
            refuse_lbfgs(strategy.optimizers, self._axes.sizes)
            self.no_foreach_over_meshes()
        strategy.setup_precision_plugin()
        plugin: Any = strategy.precision_plugin
        plugin.clip_grad_by_norm = self._clip_by_norm
        plugin.clip_grad_by_value = lambda optimizer, clip_val: clip_by_value(
            plugin.main_params(optimizer), float(clip_val)
        )
        if fits:
            for optimizer in strategy.optimizers:
                _move_states(optimizer, strategy.root_device)

    def _shard(self, module: nn.Module) -> None:
        strategy, pipeline = self._strategy, self._strategy._pipeline
        if any(isinstance(child, FullyShardedDataParallel) for child in module.modules()):
            raise MisconfigurationException(
                "The model is wrapped in FullyShardedDataParallel (FSDP1), which thd_model_parallel does not "
                "support. Pass the model without it: thd_model_parallel applies FSDP2."
            )
        policy, tensor = policy_of(strategy.precision_plugin.precision), self._axes.sizes.tensor
        plans = []  # by position, because precision plugins may replace the modules
        for model in fsdp.models_of(module) if tensor > 1 else ():
            plans.append(strategy.tensor_parallel_plan or model_plan(model, tensor))
            check_heads(model, tensor, plans[-1])
        has_weights = not any(t.is_meta for t in [*module.parameters(), *module.buffers()])
        require_unchanged(module)
        if pipeline is not None:
            pipeline.cut(module)
        if not has_weights:
            read_weights(module)
            draw_weights(module, strategy.root_device, seed=strategy.broadcast(torch.initial_seed()))
        module = self._put(module)
        group = None
        if pipeline is not None:
            group = self._meshes.stage.get_group()
        _copy_from_first_rank(module, group)
        if tensor > 1:
            for model, plan in zip(fsdp.models_of(module), plans, strict=True):
                apply_tensor_parallel(model, plan, self._meshes.tensor)
                if strategy.sequence_parallel:
                    apply_sequence_parallel(model, self._meshes.group(TENSOR))
        self._towers = tuple(fsdp.tower_paths(module))
        frees = strategy.reshard_after_forward
        frees = pipeline is None if frees == "auto" else bool(frees)
        fsdp.shard_parameters(module, self._meshes.shards, policy=policy, reshard_after_forward=frees)
        if pipeline is not None:
            pipeline.tie_ends(module)

    def _put(self, module: nn.Module) -> nn.Module:
        """Materialise a module and move it to its device and dtype, as the base strategy does."""
        strategy = self._strategy
        materialize = private("lightning.fabric.utilities.init._materialize_distributed_module")
        materialize(module, strategy.root_device)
        strategy.model = strategy.precision_plugin.convert_module(module)
        strategy.model_to_device()
        placed: nn.Module = strategy.model
        return placed

    @cached_property
    def _host_group(self) -> dist.ProcessGroup:
        return on_host(self._meshes.data_context.get_group())

    @contextmanager
    def microbatch(self, batch: object) -> Generator[None]:
        """Seed the random stream of a microbatch, and find out whether any rank's microbatch has images."""
        if self._towers:
            seen = fsdp.any_rank_sees(batch, self._host_group)
            for paths in self._towers:
                paths.active = seen
        if self.draws is None or self._strategy._pipeline is not None:  # a pipeline seeds once per step
            yield
            return
        with self.draws.microbatch(self._strategy._trainer.global_step):
            yield

    def free_after_validation(self, trainer: L.Trainer) -> None:
        """Free gathered weights after the last batch; a callback that freezes weights must get the shards."""
        if trainer._evaluation_loop.batch_progress.is_last_batch:
            fsdp.reshard(self._strategy.model)

    def no_foreach_over_meshes(self) -> None:
        """Turn off foreach kernels, which cannot mix meshes, for parameter groups that span several."""
        for optimizer in self._strategy.optimizers:
            for group in optimizer.param_groups:
                if len(meshes(group["params"])) > 1 and not group.get("fused"):
                    group["foreach"] = False

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        strategy, pipeline = self._strategy, self._strategy._pipeline
        across: dict[str, Any] = {} if pipeline is None else pipeline.clipping
        parameters = strategy.precision_plugin.main_params(optimizer)
        clip_by_norm(parameters, float(clip_val), device=strategy.root_device, **across)


def policy_of(precision: str) -> MixedPrecisionPolicy:
    """Return the dtypes in which FSDP2 gathers weights and sums gradients."""
    if precision == "16-mixed":
        raise MisconfigurationException(
            "precision='16-mixed' would let every rank choose a loss scale by its shards only. Use "
            "'bf16-mixed', 'bf16-true' or '32-true'."
        )
    if precision == "bf16-mixed":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def whole_state_dict(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Gather every weight into the CPU memory of ranks with ``keep=True``, by name; a collective."""
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            state[plain_name(name)] = whole.detach().cpu()
    return state


def _copy_from_first_rank(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Give all ranks of a group, or of the job, the parameters and buffers of its first; a collective."""
    first = 0
    if group is not None:
        first = dist.get_global_rank(group, 0)
    for value in [*module.parameters(), *module.buffers()]:
        sent = value.detach().contiguous()
        dist.broadcast(sent, first, group=group)
        if sent.data_ptr() != value.data_ptr():
            value.detach().copy_(sent)


def _move_states(optimizer: Any, device: torch.device) -> None:
    """Move an optimizer's states to a device, except step counts, which stay where they are."""
    for parameter, state in optimizer.state.items():
        if isinstance(state, MutableMapping):
            for name, value in state.items():
                if name != "step":
                    state[name] = move_data_to_device(value, device)
        else:
            optimizer.state[parameter] = move_data_to_device(state, device)
