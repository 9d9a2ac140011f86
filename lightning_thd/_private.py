"""A private name of another package -> its value, or an error that names the feature that needs it.

``PRIVATE`` lists private names of other packages that this package uses: modules, functions and methods,
which ``private`` imports, and attributes of objects, which ``private_of`` reads and ``set_private`` writes.
Each is taken where it is used, so that a release that moves one stops one feature and nothing else. Without a
check, writing an attribute that is gone would pass without an error, and change nothing.
"""

from __future__ import annotations

import importlib
from typing import Any, Final, NamedTuple

from lightning_thd._versions import installed_version


class PrivateName(NamedTuple):
    """What is known of one private name."""

    place: str  # the module of this package that uses it
    checked: str  # the releases in which it was checked
    feature: str  # what stops working if it is gone


class PrivateNameGone(RuntimeError):
    """Another package no longer has a private name that a feature needs."""


_LOGS = "lightning.pytorch.trainer.connectors.logger_connector"
_TORCH_CP = "torch.distributed.tensor.experimental._context_parallel._attention"
_LIGHTNING = "lightning 2.6.6"
_TORCH = "torch 2.13, 2.14"

PRIVATE: Final[dict[str, PrivateName]] = {
    # -- data
    "lightning.pytorch.overrides.distributed._IndexBatchSamplerWrapper": PrivateName(
        "data/loader.py", _LIGHTNING, "the indices of predicted batches in BasePredictionWriter"
    ),
    "torch.utils.data._utils.worker": PrivateName(
        "data/streams/intake.py", "torch 2.11 to 2.13", "streams that are read by workers (num_workers)"
    ),
    # -- axes of ranks
    "lightning.pytorch.strategies.ModelParallelStrategy._setup_distributed": PrivateName(
        "strategies/axes.py", _LIGHTNING, 'strategy="thd_model_parallel"'
    ),
    "lightning.pytorch.strategies.ModelParallelStrategy._device_mesh": PrivateName(
        "strategies/axes.py", _LIGHTNING, 'strategy="thd_model_parallel"'
    ),
    "lightning.pytorch.LightningModule._device_mesh": PrivateName(
        "strategies/axes.py", _LIGHTNING, 'strategy="thd_model_parallel"'
    ),
    "lightning.pytorch.strategies.ModelParallelStrategy._data_parallel_size": PrivateName(
        "strategies/axes.py", _LIGHTNING, 'strategy="thd_model_parallel"'
    ),
    "lightning.pytorch.strategies.ModelParallelStrategy._tensor_parallel_size": PrivateName(
        "strategies/axes.py", _LIGHTNING, 'strategy="thd_model_parallel"'
    ),
    "lightning.pytorch.strategies.ModelParallelStrategy._timeout": PrivateName(
        "strategies/axes.py", _LIGHTNING, "a pipeline, or a job that torchrun has started again"
    ),
    "torch.distributed.device_mesh.DeviceMesh._flatten": PrivateName(
        "parallel/mesh.py",
        _TORCH,
        "a strategy whose ranks share packs or weights, or prepare_thd with two data axes",
    ),
    # -- ranks that share packs
    "lightning.pytorch.LightningModule._compiler_ctx": PrivateName(
        "strategies/guards.py", _LIGHTNING, "a strategy whose ranks share packs"
    ),
    f"{_TORCH_CP}._replaced_functions": PrivateName(
        "strategies/guards.py", _TORCH, "context_parallel_size beside torch's context_parallel()"
    ),
    f"{_TORCH_CP}.custom_ops": PrivateName(
        "strategies/guards.py", _TORCH, "context_parallel_size beside torch's context_parallel()"
    ),
    "torch.distributed.tensor.DTensor._op_dispatcher": PrivateName(
        "strategies/guards.py", _TORCH, "context_parallel_size beside torch's context_parallel()"
    ),
    "torch.distributed.tensor._dispatch.OpDispatcher._custom_op_handlers": PrivateName(
        "strategies/guards.py", _TORCH, "context_parallel_size beside torch's context_parallel()"
    ),
    "torch.nn.Module._forward_pre_hooks": PrivateName(
        "strategies/guards.py", _TORCH, "context_parallel_size above 1"
    ),
    "datasets.IterableDataset._distributed": PrivateName(
        "strategies/pack_cut.py", "datasets 5.2", "an iterable dataset that every rank of a pack reads"
    ),
    # -- steps and logs
    "lightning.pytorch.Trainer._results": PrivateName(
        "strategies/logs.py", _LIGHTNING, "self.log under our strategies"
    ),
    "lightning.pytorch.Trainer._logger_connector": PrivateName(
        "strategies/logs.py",
        _LIGHTNING,
        "Sequences(n), THDThroughputMonitor, ExpertBias or CUDAGraphCallback",
    ),
    f"{_LOGS}.logger_connector._LoggerConnector._current_fx": PrivateName(
        "strategies/logs.py", _LIGHTNING, "Sequences(n)"
    ),
    "lightning.pytorch.LightningModule._current_fx_name": PrivateName(
        "strategies/logs.py", _LIGHTNING, "Sequences(n)"
    ),
    f"{_LOGS}.result._ResultMetric._forward_cache": PrivateName(
        "strategies/logs.py", _LIGHTNING, "self.log(on_step=True) with Sequences(n)"
    ),
    f"{_LOGS}.result._Sync._fn": PrivateName(
        "strategies/logs.py", _LIGHTNING, "self.log(on_step=True, sync_dist=True) with Sequences(n)"
    ),
    f"{_LOGS}.result._Sync._generate_sync_fn": PrivateName(
        "strategies/logs.py", _LIGHTNING, "self.log(on_step=True, sync_dist=True) with Sequences(n)"
    ),
    # -- logs of callbacks
    f"{_LOGS}.logger_connector._LoggerConnector._callback_metrics": PrivateName(
        "callbacks/loggers.py", _LIGHTNING, "THDThroughputMonitor or ExpertBias"
    ),
    f"{_LOGS}.logger_connector._LoggerConnector._progress_bar_metrics": PrivateName(
        "callbacks/loggers.py", _LIGHTNING, "THDThroughputMonitor(progress_bar=True)"
    ),
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._batches_that_stepped": PrivateName(
        "callbacks/loggers.py", _LIGHTNING, "THDThroughputMonitor or CUDAGraphCallback"
    ),
    "torch.nn.Module._compiled_call_impl": PrivateName(
        "callbacks/module_flops.py", _TORCH, "THDThroughputMonitor for a transformers model"
    ),
    # -- weights, gradients and checkpoints
    "lightning.pytorch.strategies.DDPStrategy._ddp_kwargs": PrivateName(
        "strategies/ready.py", _LIGHTNING, 'training a vision tower under strategy="thd_ddp"'
    ),
    "lightning.pytorch.strategies.ModelParallelStrategy._save_distributed_checkpoint": PrivateName(
        "strategies/checkpoints.py", _LIGHTNING, 'strategy="thd_model_parallel"'
    ),
    "torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX": PrivateName(
        "strategies/checkpoints.py", _TORCH, "loading a folder of sharded weights with strict_loading=True"
    ),
    "torch._foreach_mul_": PrivateName(
        "strategies/norms.py", _TORCH, 'gradient_clip_val under strategy="thd_model_parallel"'
    ),
    "torch._foreach_norm": PrivateName(
        "strategies/norms.py", _TORCH, 'gradient_clip_val under strategy="thd_model_parallel"'
    ),
    "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype": PrivateName(
        "strategies/norms.py", _TORCH, "pipeline_parallel_size above 1"
    ),
    # -- graphs
    "torch._C._distributed_c10d._create_work_from_future": PrivateName(
        "cuda_graph/recording.py", _TORCH, 'collectives in CUDAGraphCallback(backend="recording")'
    ),
    # -- models of transformers that are cut
    "torch.nn.Module._parameters": PrivateName("parallel/tensor.py", _TORCH, "tensor_parallel_size above 1"),
    "transformers.PreTrainedModel._no_split_modules": PrivateName(
        "parallel/fsdp.py", "transformers 5.19, 5.23", 'strategy="thd_model_parallel"'
    ),
    "transformers.integrations.moe.use_experts_implementation._is_expert_parallel": PrivateName(
        "parallel/tensor.py", "transformers 5.19, 5.23", "tensor_parallel_size above 1 for experts"
    ),
    "transformers.PreTrainedConfig._experts_implementation": PrivateName(
        "parallel/tensor.py", "transformers 5.19, 5.23", "tensor_parallel_size above 1 for experts"
    ),
}


def private(name: str) -> Any:
    """Return the module, function, class or method that a name of ``PRIVATE`` names.

    Raises:
        PrivateNameGone: if the installed release has no such name.
    """
    assert name in PRIVATE, name
    path, _, attribute = name.rpartition(".")
    try:
        return getattr(_owner(path), attribute)
    except (AttributeError, ImportError) as error:
        raise _gone(name) from error


def _owner(path: str) -> Any:
    """Return the module or class at a dotted path."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        if not module:
            raise
        return getattr(importlib.import_module(module), name)


def private_of(owner: object, name: str) -> Any:
    """Return the attribute of an object that a name of ``PRIVATE`` names, such as ``torch.nn.Module._x``.

    Raises:
        PrivateNameGone: if the object has no such attribute.
    """
    assert name in PRIVATE, name
    try:
        return getattr(owner, name.rpartition(".")[2])
    except AttributeError as error:
        raise _gone(name) from error


def set_private(owner: object, name: str, value: Any) -> None:
    """Set the attribute of an object that a name of ``PRIVATE`` names.

    Raises:
        PrivateNameGone: if the object has no such attribute yet, so that nothing would read the value.
    """
    private_of(owner, name)
    setattr(owner, name.rpartition(".")[2], value)


def _gone(name: str) -> PrivateNameGone:
    row = PRIVATE[name]
    package = name.partition(".")[0]
    return PrivateNameGone(
        f"{row.feature} needs {name}, which {package} {installed_version(package)} does not have. It "
        f"was checked with {row.checked}. Install such a release, or a newer lightning_thd. Everything "
        "else works."
    )
