"""A LightningModule built for one process -> its weights cut and sharded over the strategy's mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as L
import torch
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torchmetrics import Metric

from lightning_thd.models.weights import draw_weights, read_weights, require_unchanged
from lightning_thd.parallel import fsdp
from lightning_thd.parallel.clip import clip_by_norm, clip_by_value, meshes
from lightning_thd.parallel.draws import SharedDraws
from lightning_thd.parallel.fsdp import TowerPaths, any_rank_sees, trains_towers
from lightning_thd.parallel.mesh import TENSOR
from lightning_thd.parallel.sequence import apply_sequence_parallel
from lightning_thd.parallel.tensor import apply_tensor_parallel, check_heads, model_plan
from lightning_thd.strategies.averages import shard_copies
from lightning_thd.strategies.background_saves import BackgroundSaves, refuse_links
from lightning_thd.strategies.checkpoints import (
    CURRENT,
    FRESH,
    by_index,
    drop_unknown_options,
    is_folder,
    load_averaging,
    load_optimizers,
    parameters_of_folder,
    read_folder,
    save_averaging,
    trained,
    whole_state,
    without_fresh,
)
from lightning_thd.strategies.context import ContextParallelMixin
from lightning_thd.strategies.dynamic import DYNAMIC
from lightning_thd.strategies.guards import (
    refuse_anomaly_detection,
    refuse_compiled_module,
    refuse_lbfgs,
    refuse_partial_sharding,
)
from lightning_thd.strategies.hosts import cuts_weights, local_gradients
from lightning_thd.strategies.modules.finetuning import restore_groups
from lightning_thd.strategies.modules.groups import any_empty, load_groups_of_folder
from lightning_thd.strategies.modules.metrics import SyncedMetrics, metrics_in, refuse_sums
from lightning_thd.strategies.modules.unfrozen import Unfrozen, watch


class ShardingMixin(ContextParallelMixin):
    """Shards the user's model on a ``ModelParallelStrategy``; leaves other strategies unchanged.

    Its attributes are arguments of ``THDModelParallelStrategy``. ``asynchronous_checkpoints`` is also what
    Lightning's ``AsyncCheckpointIO`` among the Trainer's plugins asks for.
    """

    tensor_parallel_plan: dict[str, str] | None = None
    reshard_after_forward: bool | Literal["auto"] = "auto"
    asynchronous_checkpoints: bool = False

    _background: BackgroundSaves | None = None
    _draws: SharedDraws | None = None
    _groups: int = 0
    _metrics: tuple[Metric, ...] = ()
    _synced: SyncedMetrics | None = None
    _towers: tuple[TowerPaths, ...] = ()
    _unfrozen: Unfrozen | None = None

    def setup(self, trainer: L.Trainer) -> None:
        """Shard the model, unless the user has, then create the optimizers over its shards."""
        refuse_compiled_module(self.lightning_module, self.sizes)
        refuse_anomaly_detection(trainer, self.sizes)
        writes_behind = self._writes_behind()
        self._count_once()
        if not cuts_weights(self):
            super().setup(trainer)
            self._unfrozen = watch(self.model)
            return
        assert self.model is not None
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if fsdp.is_sharded(self.model):
            fsdp.reshard(self.model)
            refuse_partial_sharding(self.model, self.sizes)
            self._put(self.model)
        else:
            self._shard_model(self.model)
        if trainer.state.fn == TrainerFn.FITTING:
            shard_copies(trainer.callbacks, self.model)  # type: ignore[attr-defined]
        if writes_behind:
            refuse_links(trainer.callbacks)  # type: ignore[attr-defined]
            self._background = self._background or BackgroundSaves(is_first=self.is_global_zero)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            refuse_lbfgs(self.optimizers, self.sizes)
            self._no_foreach_over_meshes()
        self.setup_precision_plugin()
        plugin: Any = self.precision_plugin
        plugin.clip_grad_by_norm = self._clip_by_norm
        plugin.clip_grad_by_value = self._clip_by_value
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _count_once(self) -> None:
        """Prepare for tensor-parallel ranks and stages, which run the same tokens as their peers."""
        assert self.lightning_module is not None
        if self.context_parallel_size != 1:
            refuse_sums(self.lightning_module, dynamic=self.context_parallel_size == DYNAMIC)
        self._metrics = tuple(metrics_in(self.lightning_module))
        sizes = self.sizes
        if self._meshes is None or sizes.tensor * sizes.pipeline == 1:
            return
        self._synced = SyncedMetrics(self._metrics, self._meshes.data_context.get_group())
        if sizes.tensor > 1:
            place = self._meshes.data_context.get_local_rank()
            self._draws = SharedDraws(self.broadcast(torch.initial_seed()), place)

    def _shard_model(self, module: nn.Module) -> None:
        if any(isinstance(child, FullyShardedDataParallel) for child in module.modules()):
            raise MisconfigurationException(
                "The model is wrapped in FullyShardedDataParallel (FSDP1), which knows no mesh. Give the "
                "model as it is: thd_model_parallel applies FSDP2."
            )
        policy, tensor = self._policy(), self.sizes.tensor
        assert self._meshes is not None
        plans = []  # by position: precision plugins may replace modules
        for model in fsdp.models_of(module) if tensor > 1 else ():
            plans.append(self.tensor_parallel_plan or model_plan(model, tensor))
            check_heads(model, tensor, plans[-1])
        has_weights = not any(t.is_meta for t in [*module.parameters(), *module.buffers()])
        require_unchanged(module)
        self._cut_by_depth(module)
        if not has_weights:
            read_weights(module)
            draw_weights(module, self.root_device, seed=self.broadcast(torch.initial_seed()))
        self.model = self._put(module)
        self._share_weights(self.model)
        if tensor > 1:
            for model, plan in zip(fsdp.models_of(self.model), plans, strict=True):
                apply_tensor_parallel(model, plan, self._meshes.tensor)
                if self.sequence_parallel:
                    apply_sequence_parallel(model, self._meshes.group(TENSOR))
        models = fsdp.models_of(self.model)
        self._towers = tuple(TowerPaths(model) for model in models if trains_towers(model))
        fsdp.shard_parameters(
            self.model,
            self._meshes.shards,
            policy=policy,
            reshard_after_forward=self._frees_weights(self.model),
        )

    def _frees_weights(self, module: nn.Module) -> bool:
        """Return whether a layer's gathered weights are freed after its forward pass."""
        return self.reshard_after_forward is not False

    def _cut_by_depth(self, module: nn.Module) -> None:
        """Do nothing: only pipelines keep just some layers of a model."""

    def _share_weights(self, module: nn.Module) -> None:
        """Broadcast the initial weights from rank 0."""
        _sync_module_states(module)

    def _put(self, module: nn.Module) -> nn.Module:
        """Materialise a module and move it to its device and dtype, as the base strategy does."""
        _materialize_distributed_module(module, self.root_device)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        return self.model

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch, after ranks of a vision model agree whether any of them has images."""
        if self._towers:
            assert self._meshes is not None
            group = self._meshes.data_context.get_group()
            seen = any_rank_sees(args[0], group, self._wire_device)
            for paths in self._towers:
                paths.active = seen
        with self._drawing():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch, and after the last one free what FSDP2 left gathered.

        Until then ``parameters()`` gives gathered copies: a callback that freezes one would freeze nothing.
        """
        output = super().validation_step(*args, **kwargs)
        if cuts_weights(self):
            assert self.lightning_module is not None
            assert self.model is not None
            if self.lightning_module.trainer._evaluation_loop.batch_progress.is_last_batch:
                fsdp.reshard(self.model)
        return output

    def _drawing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which tensor-parallel ranks draw the same random numbers."""
        return contextlib.nullcontext() if self._draws is None else self._draws.microbatch()

    def _policy(self) -> MixedPrecisionPolicy:
        precision = self.precision_plugin.precision
        if precision == "16-mixed":
            raise MisconfigurationException(
                "precision='16-mixed' scales the loss by what each rank sees of its own shards. Use "
                "'bf16-mixed', 'bf16-true' or '32-true'."
            )
        if precision == "bf16-mixed":
            return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return MixedPrecisionPolicy()

    def _no_foreach_over_meshes(self) -> None:
        """Turn off foreach kernels for parameter groups that span two meshes."""
        for optimizer in self.optimizers if cuts_weights(self) else ():
            for group in optimizer.param_groups:
                if len(meshes(group["params"])) > 1 and not group.get("fused"):
                    group["foreach"] = False
        self._groups = self._count_groups()

    def _count_groups(self) -> int:
        return sum(len(optimizer.param_groups) for optimizer in self.optimizers)

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        clip_by_norm(self.precision_plugin.main_params(optimizer), float(clip_val))

    def _clip_by_value(self, optimizer: Any, clip_val: float) -> None:
        clip_by_value(self.precision_plugin.main_params(optimizer), float(clip_val))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state, empty if it has made no step yet.

        torch makes the state of sharded weights by a step with zero gradients, which Adam would count.
        """
        host: Any = self
        if not cuts_weights(self):
            return super().optimizer_state(optimizer)
        inner = getattr(optimizer, "_optimizer", optimizer)
        fresh = not inner.state
        with trained(inner.state):
            if host._save_distributed_checkpoint:
                state: dict[str, Any] = super().optimizer_state(optimizer)
            else:  # Lightning would number parameters by their place in the module, which torch cannot load
                assert self.model is not None
                state = dict(whole_state(inner, self.model, keep=self.is_global_zero))
        if fresh:
            inner.state.clear()
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, in the background if set, with averaged weights if any."""
        if fresh := self._fresh():
            checkpoint[FRESH] = fresh
        if self._background is not None and storage_options is None:
            self._background.save(checkpoint, Path(self.broadcast(filepath)))
            return
        if cuts_weights(self) and CURRENT in checkpoint:
            host: Any = self
            path = Path(self.broadcast(filepath))
            save_averaging(checkpoint, path, folder=host._save_distributed_checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _fresh(self) -> list[int]:
        """Return the indices of optimizers that have made no step."""
        return [i for i, optimizer in enumerate(self.optimizers) if not optimizer.state]

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, after the one that is being written."""
        if self._background is None:
            super().remove_checkpoint(filepath)
        else:
            self._background.remove(partial(super().remove_checkpoint, filepath))

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint that is being written is whole; a collective.

        Raises:
            OSError: when it could not be written; also other errors of torch.
        """
        if self._background is not None:
            self._background.wait()

    def teardown(self) -> None:
        """Wait for this rank's part of the last checkpoint, then do as the base strategy does."""
        background, self._background = self._background, None
        if self._synced is not None:
            self._synced.close()
        self._synced = self._draws = self._unfrozen = None
        self._metrics = ()
        super().teardown()
        if cuts_weights(self):
            self.checkpoint_io.teardown()  # Lightning's ModelParallelStrategy leaves that out
        if background is not None:
            background.close()

    def _writes_behind(self) -> bool:
        host: Any = self
        asked = self.asynchronous_checkpoints or isinstance(self.checkpoint_io, AsyncCheckpointIO)
        folders = cuts_weights(self) and host._save_distributed_checkpoint
        if self.asynchronous_checkpoints and not folders:
            raise MisconfigurationException(
                f"asynchronous_checkpoints=True under {type(self).__name__}, which writes one file of whole "
                "weights. Use Trainer(plugins=[AsyncCheckpointIO()]), or THDModelParallelStrategy with "
                "save_distributed_checkpoint=True."
            )
        return bool(asked and folders)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of any layout: one file, or a folder of sharded weights."""
        self.wait_for_checkpoint()
        path = Path(self.broadcast(checkpoint_path))
        if cuts_weights(self):
            assert self.model is not None
            if self.optimizers:
                assert self.lightning_module is not None
                restore_groups(self.lightning_module.trainer, path, weights_only=weights_only)
            saved: list[nn.Parameter] = []
            if is_folder(path):
                saved = parameters_of_folder(path, self.optimizers, self.model)
                drop_unknown_options(self.optimizers, path)
            with trained(saved):
                checkpoint = self._load_sharded(path, weights_only)
            self._no_foreach_over_meshes()  # the options of another layout's optimizers are loaded now
            self._leave_fresh(checkpoint)
            load_averaging(checkpoint, path, self.model)
            return checkpoint
        if is_folder(path) and not isinstance(self, FSDPStrategy):
            return read_folder(path, weights_only=weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only)

    def _load_sharded(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        one_file = path.is_file()
        if not self.optimizers or not (one_file or any_empty(self.optimizers)):
            loaded: dict[str, Any] = super().load_checkpoint(path, weights_only=weights_only)
            return loaded
        optimizers, self.optimizers = self.optimizers, []  # Lightning takes numbers for the model's order
        try:
            loaded = super().load_checkpoint(path, weights_only=weights_only)
        finally:
            self.optimizers = optimizers
        assert self.model is not None
        if one_file:
            load_optimizers(loaded.get("optimizer_states", ()), optimizers, self.model)
        else:
            load_groups_of_folder(path, optimizers, self.model)
        return loaded

    def _leave_fresh(self, checkpoint: Mapping[str, Any]) -> None:
        """Clear the state that torch created in optimizers saved before their first step."""
        for i in checkpoint.get(FRESH, ()) if self.optimizers else ():
            self.optimizers[i].state.clear()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of the optimizers, sharded ones too."""
        if not cuts_weights(self) and "optimizer_states" in checkpoint:
            assert self.lightning_module is not None
            pairs = zip(without_fresh(checkpoint), self.optimizers, strict=False)
            numbered = [by_index(state, optimizer, self.lightning_module) for state, optimizer in pairs]
            checkpoint = {**checkpoint, "optimizer_states": numbered}
        super().load_optimizer_state_dict(checkpoint)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Accumulate gradients on this rank without reducing them inside this context."""
        base: Any = super()
        block = local_gradients(self)
        if block is None:
            block = getattr(base, "block_backward_sync", contextlib.nullcontext)()
        with block:
            yield
