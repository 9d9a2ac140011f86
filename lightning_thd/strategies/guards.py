"""A module, strategy and callbacks -> an error if a parallel layout would change the numbers or hang."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.compile import to_uncompiled
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS

from lightning_thd._hooks import hooks_of
from lightning_thd._pages import see
from lightning_thd.batch.thd_batch import Packed
from lightning_thd.parallel.mesh import EXPERT, TENSOR, AxisSizes

# Where torch keeps its context parallelism, in modules whose names differ by release.
_TORCH_CP = "torch.distributed.tensor.experimental."

# A part of the name of a Lightning strategy or Accelerate type -> why our steps cannot run in that engine.
_REFUSED_ENGINES = {
    "deepspeed": "whose engine accumulates, clips and steps by itself",
    "megatron": "which runs the model and its steps by itself",
    "xla": "which compiles one step of fixed shapes",
    "dataparallel": "which cuts packs and their cu_seqlens in pieces, one per device",
}


def why_refused(engine: str) -> str | None:
    """Return why our steps cannot run in an engine of this name, or None if they can."""
    plain = engine.lower().replace("_", "")
    for name, why in _REFUSED_ENGINES.items():
        if name in plain:
            return why
    return None


def refused_engine(kind: type) -> tuple[str, str] | None:
    """Return the Lightning base of a strategy whose engine cannot run our steps, and why, or None."""
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        if not package.startswith("lightning"):  # a user's class may be called "MyMegatronStrategy"
            continue
        why = why_refused(base.__name__)
        if why is not None:
            return base.__name__, why
    return None


def refuse_engine(strategy: type) -> None:
    """Refuse a class that puts ``THDStrategyMixin`` on a strategy whose engine cannot run our steps."""
    refused = refused_engine(strategy)
    if refused is not None:
        base, why = refused
        raise TypeError(
            f"{strategy.__name__} puts THDStrategyMixin on {base}, {why}. Put it on SingleDevice-, "
            f"DDP-, FSDP- or ModelParallelStrategy, or use Packs(n) under {base} without the mixin."
        )


def refuse_other_attention(module: nn.Module, cp: int) -> None:
    """Refuse a model whose attention would see only the slots of one rank."""
    for name, child in module.named_modules():
        chosen = getattr(getattr(child, "config", None), "_attn_implementation", None)
        # Only transformers' models choose an attention; other modules may hold such a config too.
        chose_other = chosen not in (None, "thd") and hasattr(child, "set_attn_implementation")
        if chose_other or isinstance(child, nn.MultiheadAttention | nn.Transformer):
            raise MisconfigurationException(
                f"context_parallel_size={cp}, but the attention of {name or 'the model'} "
                f"({type(child).__name__}, {chosen!r}) sees only the shard of its own rank. Set "
                f"attn_implementation='thd', or call varlen_attention. {see('attention')}"
            )


def packs(batch: Any) -> list[Packed]:
    """Return the packs and steps in a batch: itself, or those in its dicts, lists and dataclasses."""
    packs_and_steps: list[Packed] = []
    apply_to_collection(batch, Packed, packs_and_steps.append, allow_frozen=True)
    return packs_and_steps


def refuse_unused_layout(batch: object) -> None:
    """Refuse a model that ran on shards without an attention that sees other ranks' slots."""
    each_pack = [pack for pack_or_step in packs(batch) for pack in pack_or_step.packs]
    shards = [pack.boundaries for pack in each_pack if pack.boundaries.ranks > 1]
    if shards and not any(boundaries.used for boundaries in shards):
        raise MisconfigurationException(
            f"context_parallel_size={shards[0].ranks}, but the model ran without calling varlen_attention. "
            "Call it with batch.boundaries, or use attn_implementation='thd'."
        )


def refuse_second_context_parallelism(module: nn.Module | None, cp: int) -> None:
    """Refuse Accelerate's or torch's context parallelism beside ours, which would cut packs twice."""
    if _runs_torch_context_parallel(module):
        raise MisconfigurationException(
            f"context_parallel_size={cp} while torch's context_parallel() is active, which cuts sequences a "
            "second time. Leave its context; after an error inside of it, start a new process."
        )
    if module is not None and _has_accelerate_hooks(module):
        raise MisconfigurationException(
            f"context_parallel_size={cp} while Accelerate's context parallelism is active, which cuts "
            "sequences a second time. Prepare the model without ParallelismConfig(cp_size, sp_size)."
        )


def _runs_torch_context_parallel(module: nn.Module | None) -> bool:
    """Return whether torch has replaced the attention function, or hooked a module, to cut sequences."""
    changed: list[Any] = [nn.functional.scaled_dot_product_attention]
    if module is not None:
        changed += hooks_of(module.modules(), "forward_pre")
    return any(str(_defined_in(function)).startswith(_TORCH_CP) for function in changed)


def _defined_in(function: Any) -> str | None:
    """Return the module that defines a function, or the one inside a partial."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None)


def _has_accelerate_hooks(module: nn.Module) -> bool:
    """Return whether Accelerate has hooked a module to cut its inputs over context-parallel ranks."""
    for hook in hooks_of(module.modules(), "forward_pre"):
        name = getattr(hook, "__qualname__", "")
        if _defined_in(hook) == "accelerate.big_modeling" and "context_parallel" in name:
            return True
    return False


def refuse_compiled_module(module: LightningModule, sizes: AxisSizes) -> None:
    """Refuse ``torch.compile(lightning_module)`` if ranks share packs: their collectives would hang."""
    if sizes.peers == 1:
        return
    if _is_compiled_by_lightning(module):
        raise MisconfigurationException(
            f"torch.compile({type(module).__name__}) while {sizes.peers} ranks share each pack: compiled "
            "collectives can wait for each other forever. Compile only its model: self.model.compile()."
        )


def _is_compiled_by_lightning(module: LightningModule) -> bool:
    """Return whether Lightning runs a module that ``torch.compile`` was given."""
    try:
        to_uncompiled(copy.copy(module))  # on a copy, because it gives the module its own steps back
    except ValueError:  # "is required to be a compiled LightningModule"
        return False
    return True


def refuse_static_graph(model: object) -> None:
    """Refuse DDP's static graph for steps whose first backward pass is not synchronised."""
    if isinstance(model, DistributedDataParallel) and model.static_graph:
        raise MisconfigurationException(
            "static_graph=True with a step of several microbatches: DDP then wants every backward pass "
            "synchronised, but gradients are exchanged only in the last one. Leave static_graph out."
        )


def refuse_lbfgs(optimizers: list[Any], sizes: AxisSizes) -> None:
    """Refuse torch's LBFGS with tensor or pipeline ranks: LBFGS needs products over all weights."""
    if sizes.tensor * sizes.pipeline == 1:
        return
    for optimizer in optimizers:
        if isinstance(getattr(optimizer, "optimizer", optimizer), LBFGS):
            raise MisconfigurationException(
                f"LBFGS with tensor_parallel_size={sizes.tensor}, pipeline_parallel_size={sizes.pipeline}: "
                "LBFGS needs products over all weights, but a rank has only a part. Set both sizes to 1."
            )


def refuse_callbacks(callbacks: Iterable[Any], strategy: Any) -> None:
    """Refuse callbacks that copy cut weights, or unfreeze weights whose gradients would not be averaged."""
    shards = isinstance(strategy, ModelParallelStrategy)
    if not shards and not isinstance(strategy, DDPStrategy):
        return

    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            why = "unfreezes weights whose gradients ranks would not average"
        elif shards and isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            why = "copies weights that are cut over ranks"
        else:
            continue
        raise MisconfigurationException(
            f"{type(callback).__name__} under {type(strategy).__name__}: it {why}. Leave it out."
        )


def refuse_unfrozen(frozen: Iterable[nn.Parameter]) -> None:
    """Refuse to train weights that were frozen when DDP wrapped the module."""
    if any(parameter.requires_grad for parameter in frozen):
        raise MisconfigurationException(
            "Weights were unfrozen after DDP wrapped the module, and DDP does not average their gradients. "
            "Unfreeze them in configure_model(), and resume there from a checkpoint of the frozen training."
        )


def refuse_partial_sharding(model: nn.Module, sizes: AxisSizes) -> None:
    """Refuse a model if the user's own sharding leaves some gradients without averaging."""
    ranks_with_own_tokens = sizes.data * sizes.context
    if ranks_with_own_tokens == 1:
        return

    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if _is_of_distributed_experts(parameter):
            continue  # cut in an earlier fit, and their gradients are averaged
        ranks = _ranks_that_share(parameter)
        if ranks != ranks_with_own_tokens:
            raise MisconfigurationException(
                f"{name} was sharded over {ranks} ranks in configure_model(), but {ranks_with_own_tokens} "
                "ranks see different tokens. Call fully_shard on the whole model over "
                "'data_context_parallel'."
            )


def _is_of_distributed_experts(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and EXPERT in (parameter.device_mesh.mesh_dim_names or ())


def _ranks_that_share(parameter: nn.Parameter) -> int:
    """Return over how many ranks a parameter is sharded or copied, tensor-parallel ranks left out."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    axes = mesh.mesh_dim_names or ("",) * mesh.ndim
    return math.prod(size for axis, size in zip(axes, mesh.shape, strict=True) if axis != TENSOR)
