"""A LightningModule built for one process -> its weights cut and sharded over the strategy's mesh."""

from __future__ import annotations

from collections.abc import Generator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
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

from lightning_thd.models.tiles import tile_of
from lightning_thd.models.weights import draw_weights, read_weights, require_unchanged
from lightning_thd.parallel import experts, fsdp
from lightning_thd.parallel.across_ranks import on_host
from lightning_thd.parallel.draws import SharedDraws
from lightning_thd.parallel.mesh import TENSOR, Meshes
from lightning_thd.parallel.sequence import apply_sequence_parallel
from lightning_thd.parallel.tensor import apply_tensor_parallel, check_heads, check_names, model_plan
from lightning_thd.strategies.axes import Axes
from lightning_thd.strategies.checkpoints import plain_name
from lightning_thd.strategies.guards import refuse_lbfgs, refuse_partial_sharding
from lightning_thd.strategies.norms import clip_by_norm, clip_by_value, meshes
from lightning_thd.warnings import THDWarning, warn


class WeightShards:
    """Cuts and shards the weights of a ``ModelParallelStrategy``, and clips their gradients."""

    def __init__(self, strategy: Any, axes: Axes) -> None:
        assert axes.meshes is not None
        self._strategy = strategy
        self._axes = axes
        self._meshes: Meshes = axes.meshes
        self.draws: SharedDraws | None = None  # for tensor-parallel ranks, which run the same tokens
        self._towers: tuple[fsdp.TowerPaths, ...] = ()

    def setup(self, trainer: L.Trainer) -> None:
        """Shard the model unless the user has sharded it, then create the optimizers over its shards."""
        strategy = self._strategy
        _leave_inference_mode(trainer)
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

        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            strategy.setup_optimizers(trainer)
            refuse_lbfgs(strategy.optimizers, self._axes.sizes)
            self.no_foreach_over_meshes()
        strategy.setup_precision_plugin()
        self._clip_over_meshes()
        if fits:
            for optimizer in strategy.optimizers:
                _move_states(optimizer, strategy.root_device)

    def _shard(self, module: nn.Module) -> None:
        """Cut a whole module to this rank's weights, which begin as those of the first rank."""
        strategy = self._strategy
        pipeline = strategy._pipeline
        if any(isinstance(child, FullyShardedDataParallel) for child in module.modules()):
            raise MisconfigurationException(
                "The model is wrapped in FullyShardedDataParallel (FSDP1), which thd_model_parallel does not "
                "support. Pass the model without it: thd_model_parallel applies FSDP2."
            )
        policy = policy_of(strategy.precision_plugin.precision)
        plans = self._tensor_plans(module)
        expert_plans = self._expert_plans(module)
        require_unchanged(module)

        # The order: a stage reads only its own layers, copies go over whole weights, and FSDP2 cuts last.
        has_weights = not _has_meta_tensors(module)
        if pipeline is not None:
            pipeline.cut(module)
        if not has_weights:
            read_weights(module)
            draw_weights(module, strategy.root_device, seed=strategy.broadcast(torch.initial_seed()))
        module = self._put(module)
        group = None if pipeline is None else self._meshes.stage.get_group()
        _copy_from_first_rank(module, group)
        self._apply_tensor_plans(module, plans)

        self._towers = tuple(fsdp.tower_paths(module))
        frees = strategy.reshard_after_forward
        if frees == "auto":
            frees = pipeline is None
        self._distribute_experts(module, expert_plans, policy=policy, reshard_after_forward=bool(frees))
        fsdp.shard_parameters(module, self._meshes.shards, policy=policy, reshard_after_forward=bool(frees))
        if pipeline is not None:
            pipeline.tie_ends(module)

    def _tensor_plans(self, module: nn.Module) -> list[Mapping[str, str]]:
        """Return a tensor-parallel plan for each model of a module, in order; none without such ranks.

        They are kept by position, because precision plugins may replace the models.
        """
        tensor = self._axes.sizes.tensor
        if tensor == 1:
            return []

        models = [*fsdp.models_of(module)]
        own_plan = self._strategy.tensor_parallel_plan
        if own_plan:
            check_names(models, own_plan)
        plans = []
        for model in models:
            plan = own_plan or model_plan(model, tensor)
            check_heads(model, tensor, plan)
            if self._meshes.experts is not None:  # tensor parallelism would give each rank whole experts too
                plan = {name: style for name, style in plan.items() if style != "moe_tp_experts"}
            plans.append(plan)
        return plans

    def _apply_tensor_plans(self, module: nn.Module, plans: list[Mapping[str, str]]) -> None:
        """Cut the weights of a module's models over the tensor-parallel ranks."""
        if not plans:
            return
        for model, plan in zip(fsdp.models_of(module), plans, strict=True):
            apply_tensor_parallel(model, plan, self._meshes.tensor)
            if self._strategy.sequence_parallel:
                apply_sequence_parallel(model, self._meshes.group(TENSOR))

    def _expert_plans(self, module: nn.Module) -> list[dict[str, str]]:
        """Return the plan of each model's experts, in order; none if no experts are distributed."""
        if self._meshes.experts is None:
            return []
        ranks = self._meshes.experts.size()
        plans = []
        for model in fsdp.models_of(module):
            tile = tile_of(model)
            if tile is not None:
                raise MisconfigurationException(
                    f"mlp_tile={tile} with expert_parallel_size={ranks}: ranks have different numbers of "
                    "tiles, but must all take part in every exchange of tokens. Leave one of them out."
                )
            plans.append(experts.expert_plan(model, ranks))
        return plans

    def _distribute_experts(
        self,
        module: nn.Module,
        plans: list[dict[str, str]],
        *,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool,
    ) -> None:
        """Leave this rank its experts, and shard them over the ranks that hold the same ones."""
        meshes = self._meshes
        if meshes.experts is None or meshes.expert_shards is None:
            return

        # FSDP2 takes the mean over the ranks that hold the same experts. The mean over all ranks with other
        # tokens is wanted, as for other weights.
        sizes = self._axes.sizes
        scale = meshes.expert_shards.size() / (sizes.data * sizes.context)
        for model, plan in zip(fsdp.models_of(module), plans, strict=True):
            of_this_stage = {name: style for name, style in plan.items() if _has(model, name)}
            experts.distribute_experts(
                model, of_this_stage, meshes.experts, meshes.tensor, gradient_scale=scale
            )
            experts.shard_experts(
                model, meshes.expert_shards, policy=policy, reshard_after_forward=reshard_after_forward
            )

    def _put(self, module: nn.Module) -> nn.Module:
        """Give a module its memory, device and dtype, as the base strategy does; return it."""
        strategy = self._strategy
        _fill_meta_tensors(module, strategy.root_device)
        strategy.model = strategy.precision_plugin.convert_module(module)
        strategy.model_to_device()
        placed: nn.Module = strategy.model
        return placed

    @cached_property
    def _host_group(self) -> dist.ProcessGroup:
        """The ranks of a stage that see different tokens, in CPU memory; they create it together."""
        return on_host(self._meshes.data_context.get_group())

    @contextmanager
    def microbatch(self, batch: object) -> Generator[None]:
        """Seed the random stream of a microbatch, and find out whether any rank's microbatch has images."""
        if self._towers:
            any_has_images = fsdp.any_rank_sees(batch, self._host_group)
            for paths in self._towers:
                paths.active = any_has_images

        if self.draws is None or self._strategy._pipeline is not None:  # a pipeline seeds once per step
            yield
            return
        with self.draws.microbatch(self._strategy._trainer.global_step):
            yield

    def free_after_validation(self, trainer: L.Trainer) -> None:
        """Free gathered weights after the last batch; a callback that freezes weights must get the shards."""
        loop: Any = trainer.validate_loop
        if trainer.state.fn == TrainerFn.FITTING:
            loop = trainer.fit_loop.epoch_loop.val_loop
        if loop.batch_progress.is_last_batch:
            fsdp.reshard(self._strategy.model)

    def no_foreach_over_meshes(self) -> None:
        """Turn off foreach kernels, which cannot mix meshes, for parameter groups that span several."""
        for optimizer in self._strategy.optimizers:
            for group in optimizer.param_groups:
                if len(meshes(group["params"])) > 1 and not group.get("fused"):
                    group["foreach"] = False

    def _clip_over_meshes(self) -> None:
        """Let the precision plugin, which Lightning asks to clip, clip gradients on any meshes and stages."""
        plugin = self._strategy.precision_plugin

        def clip_by_limit(optimizer: Any, clip_val: float) -> None:
            clip_by_value(plugin.main_params(optimizer), float(clip_val))

        plugin.clip_grad_by_norm = self._clip_by_norm
        plugin.clip_grad_by_value = clip_by_limit

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        strategy = self._strategy
        over_stages = {} if strategy._pipeline is None else strategy._pipeline.clipping
        parameters = strategy.precision_plugin.main_params(optimizer)
        clip_by_norm(parameters, float(clip_val), device=strategy.root_device, **over_stages)


def _leave_inference_mode(trainer: L.Trainer) -> None:
    """Let evaluation loops run under no_grad: FSDP2 needs version counters, which inference mode lacks."""
    loops: Any = (
        trainer.validate_loop,
        trainer.test_loop,
        trainer.predict_loop,
        trainer.fit_loop.epoch_loop.val_loop,
    )
    for loop in loops:
        loop.inference_mode = False


def _has_meta_tensors(module: nn.Module) -> bool:
    """Return whether a weight or buffer of a module has no memory yet."""
    return any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers()))


def _fill_meta_tensors(module: nn.Module, device: torch.device) -> None:
    """Give a module that was built on the meta device memory, and draw weights by ``reset_parameters``.

    As in Lightning: modules without that method, but with weights or buffers, are named in a warning.
    """
    if not _has_meta_tensors(module):
        return

    module.to_empty(device=device)  # FSDP2 wants that call on its root, not on each module
    not_drawn = set()
    for child in module.modules():
        reset = getattr(child, "reset_parameters", None)
        if callable(reset):
            if _has_tensors(child):
                reset()
        elif _has_tensors(child):
            not_drawn.add(type(child).__name__)
    if not_drawn:
        warn(
            f"{', '.join(sorted(not_drawn))} were built without memory and have no reset_parameters(), so "
            "that their weights and buffers are arbitrary numbers. Load a checkpoint, or build the model "
            "with weights.",
            THDWarning,
        )


def _has_tensors(module: nn.Module) -> bool:
    """Return whether a module holds weights or buffers itself, its children left out."""
    return any(True for _ in chain(module.parameters(recurse=False), module.buffers(recurse=False)))


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


def _has(model: nn.Module, name: str) -> bool:
    """Return whether a module or parameter is on this rank: other pipeline stages hold other layers."""
    parent, _, child = name.rpartition(".")
    try:
        holder = model.get_submodule(parent)
    except AttributeError:
        return False
    return child in holder._modules or child in holder._parameters


def whole_state_dict(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Gather every weight into the CPU memory of ranks with ``keep=True``, by name; a collective."""
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        # On ranks with keep=False too: gathering a DTensor is a collective.
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
        sent = value.detach().contiguous()  # collectives take no other layout
        dist.broadcast(sent, first, group=group)
        if sent.data_ptr() != value.data_ptr():
            value.detach().copy_(sent)


def _move_states(optimizer: Any, device: torch.device) -> None:
    """Move an optimizer's states to a device, except step counts, which stay where they are."""
    for parameter, state in optimizer.state.items():
        if not isinstance(state, MutableMapping):
            optimizer.state[parameter] = move_data_to_device(state, device)
            continue
        for name, value in state.items():
            if name != "step":
                state[name] = move_data_to_device(value, device)
