"""A private name of another package -> its value, or an error that names the feature that needs it.

``PRIVATE`` lists private names of other packages that this package uses: modules, functions and methods,
which ``private`` imports, and attributes of objects, which ``private_of`` reads and ``set_private`` writes.
Each is taken where it is used, so that a release that moves one stops one feature and nothing else. Without a
check, writing an attribute that is gone would pass without an error, and change nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple

from lightning_thd._versions import installed_version


class PrivateName(NamedTuple):
    """What is known of one private name."""

    place: str  # the module of this package that uses it
    checked: str  # the releases in which it was checked
    feature: str  # what stops working if it is gone


class PrivateNameGone(RuntimeError):
    """Another package no longer has a private name that a feature needs."""


_LIGHTNING = "lightning 2.6.6"
_TORCH = "torch 2.11, 2.13, 2.14"
_TRANSFORMERS = "transformers 5.19, 5.23, 5.24"

PRIVATE: Final[dict[str, PrivateName]] = {
    # -- kernels
    "torch._C._len_torch_dispatch_stack": PrivateName(
        "_modes.py", _TORCH, "attention on a CPU, a fused loss or CUDAGraphCallback"
    ),
    "torch._C._are_functorch_transforms_active": PrivateName("_modes.py", _TORCH, "attention on a CPU"),
    "torch.utils._python_dispatch.TorchDispatchMode": PrivateName(
        "_modes.py",
        _TORCH,
        'CUDAGraphCallback, capacity="auto" on ranks that share layers, or check_packing in fp32 of a '
        "model with an autocast inside",
    ),
    "torch._C._distributed_c10d._create_work_from_future": PrivateName(
        "cuda_graph/recording.py", _TORCH, 'collectives in CUDAGraphCallback(backend="recording")'
    ),
    "torch.ops.mkldnn._linear_pointwise": PrivateName(
        "loss/tiles/products.py", _TORCH, "a fused loss in fp32 at full speed on a CPU with AVX-512"
    ),
    "torch.library.CustomOpDef._init_fn": PrivateName(
        "attention/kernels/flash.py", _TORCH, 'backend="flash" with flash-attn 3'
    ),
    "flash_attn.flash_attn_interface._wrapped_flash_attn_varlen_forward": PrivateName(
        "attention/kernels/flash.py", "flash-attn 2.8", 'backend="flash" with flash-attn 2'
    ),
    "flash_attn.flash_attn_interface._wrapped_flash_attn_varlen_backward": PrivateName(
        "attention/kernels/flash.py", "flash-attn 2.8", 'backend="flash" with flash-attn 2'
    ),
    "flash_attn_interface._flash_attn_forward": PrivateName(
        "attention/kernels/flash.py", "flash-attn 3 of tag 2.8.3", 'backend="flash" with flash-attn 3'
    ),
    "flash_attn_interface._flash_attn_backward": PrivateName(
        "attention/kernels/flash.py", "flash-attn 3 of tag 2.8.3", 'backend="flash" with flash-attn 3'
    ),
    "flash_attn.cute.interface._flash_attn_fwd": PrivateName(
        "attention/kernels/flash.py", "flash-attn-4 4.0.0b36", 'backend="flash" with flash-attn 4'
    ),
    "flash_attn.cute.interface._flash_attn_bwd": PrivateName(
        "attention/kernels/flash.py", "flash-attn-4 4.0.0b36", 'backend="flash" with flash-attn 4'
    ),
    "torch.Tensor._version": PrivateName(
        "batch/upload.py", _TORCH, "a batch in pinned memory, or a fused loss on a GPU"
    ),
    # -- data
    "lightning.pytorch.Trainer.fit_loop._combined_loader_states_to_load": PrivateName(
        "data/trainer_link.py", _LIGHTNING, "THDDataModule in a Trainer"
    ),
    "lightning.pytorch.Trainer.fit_loop._data_fetcher": PrivateName(
        "data/trainer_link.py", _LIGHTNING, "a mixture whose epochs differ in length"
    ),
    "datasets.IterableDataset._ex_iterable": PrivateName(
        "data/streams/shards.py", "datasets 5.2", "a stream of a datasets.IterableDataset"
    ),
    "lightning.pytorch.overrides.distributed._IndexBatchSamplerWrapper": PrivateName(
        "data/loader.py", _LIGHTNING, "the indices of predicted batches in BasePredictionWriter"
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
    "torch.distributed.device_mesh.DeviceMesh._flatten": PrivateName(
        "parallel/mesh.py",
        _TORCH,
        "a strategy whose ranks share packs or weights, or prepare_thd with two data axes",
    ),
    # -- ranks that share packs
    "datasets.IterableDataset._distributed": PrivateName(
        "strategies/pack_cut.py", "datasets 5.2", "an iterable dataset that every rank of a pack reads"
    ),
    # -- steps and logs
    "lightning.pytorch.Trainer._results": PrivateName(
        "strategies/logs.py", _LIGHTNING, "self.log under our strategies"
    ),
    "lightning.pytorch.Trainer._logger_connector": PrivateName(
        "strategies/logs.py", _LIGHTNING, "Sequences(n)"
    ),
    "lightning.pytorch.Trainer._logger_connector._current_fx": PrivateName(
        "strategies/logs.py", _LIGHTNING, "Sequences(n)"
    ),
    "lightning.pytorch.LightningModule._current_fx_name": PrivateName(
        "strategies/logs.py", _LIGHTNING, "Sequences(n)"
    ),
    "lightning.pytorch.Trainer._results.values._forward_cache": PrivateName(
        "strategies/logs.py", _LIGHTNING, "self.log(on_step=True) with Sequences(n)"
    ),
    "lightning.pytorch.Trainer._results.values.meta.sync._fn": PrivateName(
        "strategies/logs.py", _LIGHTNING, "self.log(on_step=True, sync_dist=True) with Sequences(n)"
    ),
    # -- logs of callbacks
    "lightning.pytorch.Trainer.fit_loop.epoch_loop._batches_that_stepped": PrivateName(
        "_trainer.py", _LIGHTNING, "THDThroughputMonitor or CUDAGraphCallback"
    ),
    "torch.nn.Module._compiled_call_impl": PrivateName(
        "_find.py", _TORCH, "THDThroughputMonitor for a transformers model"
    ),
    # -- weights, gradients and checkpoints
    "lightning.pytorch.strategies.DDPStrategy._ddp_kwargs": PrivateName(
        "strategies/ready.py", _LIGHTNING, 'training a vision tower under strategy="thd_ddp"'
    ),
    "torch.optim.AdamW._step_supports_amp_scaling": PrivateName(
        "module.py", _TORCH, "the fused AdamW of CausalLMModule"
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
    "torch.ops.operator._schema": PrivateName("cuda_graph/recording.py", _TORCH, "CUDAGraphCallback"),
    "torch.Tensor._backward_hooks": PrivateName("cuda_graph/capture.py", _TORCH, "CUDAGraphCallback"),
    "torch.Tensor._post_accumulate_grad_hooks": PrivateName(
        "cuda_graph/capture.py", _TORCH, "CUDAGraphCallback"
    ),
    "torch._foreach_add_": PrivateName("cuda_graph/capture.py", _TORCH, "CUDAGraphCallback"),
    "torch._foreach_copy_": PrivateName("cuda_graph/capture.py", _TORCH, "CUDAGraphCallback"),
    "torch._dynamo": PrivateName("cuda_graph/compiled.py", _TORCH, "compile_layers=True"),
    "torch._C._cuda_endAllocateToPool": PrivateName(
        "cuda_graph/backend.py", _TORCH, "going on after a capture that failed"
    ),
    "torch._C._cuda_releasePool": PrivateName(
        "cuda_graph/backend.py", _TORCH, "going on after a capture that failed"
    ),
    "lightning.Fabric.setup._forward_module": PrivateName(
        "integrations/packed_loop.py", _LIGHTNING, "capture() of a loop under Fabric"
    ),
    # -- models of transformers
    "transformers.GradientCheckpointingLayer._gradient_checkpointing_func": PrivateName(
        "_find.py", _TRANSFORMERS, "gradient checkpointing of a model of transformers"
    ),
    "transformers.PreTrainedModel._init_weights": PrivateName(
        "models/weights.py", _TRANSFORMERS, "drawing the weights of a model on the meta device"
    ),
    "transformers.PreTrainedModel._load_pretrained_model": PrivateName(
        "models/weights.py", _TRANSFORMERS, "from_pretrained under a pipeline"
    ),
    "transformers.PreTrainedModel._finalize_model_loading": PrivateName(
        "models/weights.py", _TRANSFORMERS, "from_pretrained under a pipeline"
    ),
    "transformers.initialization.tensor._is_hf_initialized": PrivateName(
        "models/weights.py", _TRANSFORMERS, "drawing the weights of a model on the meta device"
    ),
    "transformers.ProcessorMixin._get_num_multimodal_tokens": PrivateName(
        "data/read/vision_chat.py", _TRANSFORMERS, "images of a family without grids"
    ),
    # -- transformers' Trainer
    "transformers.Trainer._load_rng_state": PrivateName(
        "integrations/hf_data.py", _TRANSFORMERS, "packed_trainer(...).train(resume_from_checkpoint=...)"
    ),
    "transformers.Trainer._get_train_sampler": PrivateName(
        "integrations/hf_options.py", _TRANSFORMERS, "packed_trainer"
    ),
    # -- TRL's trainers
    "trl.SFTTrainer._prepare_dataset": PrivateName(
        "integrations/hf_cuts.py", "trl 1.0, 1.9, 1.16", "max_length of packed_trainer(SFTTrainer)"
    ),
    # -- models of transformers that are cut
    "transformers.PreTrainedModel._no_split_modules": PrivateName(
        "parallel/fsdp.py", _TRANSFORMERS, 'strategy="thd_model_parallel"'
    ),
    "transformers.integrations.moe.use_experts_implementation._is_expert_parallel": PrivateName(
        "parallel/tensor.py", _TRANSFORMERS, "tensor_parallel_size above 1 for experts"
    ),
    "transformers.PreTrainedConfig._experts_implementation": PrivateName(
        "parallel/tensor.py", _TRANSFORMERS, "tensor_parallel_size above 1 for experts"
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


def private_getter(name: str) -> Callable[[object], Any]:
    """Return a fast function that reads the attribute ``name`` of ``PRIVATE`` from any object that has it."""
    assert name in PRIVATE, name
    return attrgetter(name.rpartition(".")[2])


def set_private(owner: object, name: str, value: Any) -> None:
    """Set the attribute of an object that a name of ``PRIVATE`` names.

    Raises:
        PrivateNameGone: if the object has no such attribute yet, so that nothing would read the value.
    """
    private_of(owner, name)
    setattr(owner, name.rpartition(".")[2], value)


def private_setter(owner: object, name: str) -> Callable[[Any], None]:
    """Return a fast function that sets the attribute ``name`` of ``PRIVATE`` of one object.

    Raises:
        PrivateNameGone: if the object has no such attribute yet, so that nothing would read the value.
    """
    private_of(owner, name)
    return partial(setattr, owner, name.rpartition(".")[2])


def _gone(name: str) -> PrivateNameGone:
    row = PRIVATE[name]
    package = name.partition(".")[0]
    return PrivateNameGone(
        f"{row.feature} needs {name}, which {package} {installed_version(package)} does not have. It "
        f"was checked with {row.checked}. Install such a release, or a newer lightning_thd. Everything "
        "else works."
    )
