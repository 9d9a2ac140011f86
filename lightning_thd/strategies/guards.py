"""A module, strategy and callbacks -> an error if a parallel layout would change the numbers or hang."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS

from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.parallel.mesh import TENSOR, AxisSizes

_TORCH_CP = "torch.distributed.tensor.experimental._context_parallel._attention"

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
    return next((why for name, why in _REFUSED_ENGINES.items() if name in plain), None)


def refused_engine(kind: type) -> tuple[str, str] | None:
    """Return the Lightning base of a strategy whose engine cannot run our steps, and why, or None."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0].startswith("lightning") and (why := why_refused(base.__name__)):
            return base.__name__, why
    return None


def refuse_engine(strategy: type) -> None:
    """Refuse a class that puts ``THDStrategyMixin`` on a strategy whose engine cannot run our steps."""
    if (found := refused_engine(strategy)) is not None:
        raise TypeError(
            f"{strategy.__name__} puts THDStrategyMixin on {found[0]}, {found[1]}. Put it on SingleDevice-, "
            f"DDP-, FSDP- or ModelParallelStrategy, or use Packs(n) under {found[0]} without the mixin."
        )


def refuse_other_attention(module: nn.Module, cp: int) -> None:
    """Refuse a model whose attention would see only the slots of one rank."""
    for name, child in module.named_modules():
        chosen = getattr(getattr(child, "config", None), "_attn_implementation", None)
        other = chosen not in (None, "thd") and hasattr(child, "set_attn_implementation")
        if other or isinstance(child, nn.MultiheadAttention | nn.Transformer):
            raise MisconfigurationException(
                f"context_parallel_size={cp}, but the attention of {name or 'the model'} "
                f"({type(child).__name__}, {chosen!r}) sees only the shard of its own rank. Set "
                "attn_implementation='thd', or call varlen_attention: docs/reference/messages.md#attention."
            )


def packs(batch: Any) -> list[Any]:
    """Return the packs and steps in a batch: itself, or those in its dicts, lists and dataclasses."""
    found: list[Any] = []
    apply_to_collection(batch, (THDBatch, THDStep), found.append, allow_frozen=True)
    return found


def refuse_unused_layout(batch: object) -> None:
    """Refuse a model that ran on shards without an attention that sees other ranks' slots."""
    several = [x for pack in packs(batch) for x in getattr(pack, "microbatches", (pack,))]
    layouts = [pack.boundaries.layout for pack in several if pack.boundaries.ranks > 1]
    if layouts and not any(layout.used for layout in layouts):
        raise MisconfigurationException(
            f"context_parallel_size={layouts[0].cp}, but the model ran without calling varlen_attention. "
            "Call it with batch.boundaries, or use attn_implementation='thd'."
        )


def refuse_second_context_parallelism(module: nn.Module | None, cp: int) -> None:
    """Refuse Accelerate's or torch's context parallelism beside ours, which would cut packs twice."""
    torch_cp: Any = sys.modules.get(_TORCH_CP)
    # torch's context_parallel() wraps the attention function, or registers handlers of its operators.
    wrapped = nn.functional.scaled_dot_product_attention in getattr(torch_cp, "_replaced_functions", {})
    operators = getattr(torch_cp, "custom_ops", {}).keys()
    if wrapped or operators & DTensor._op_dispatcher._custom_op_handlers.keys():
        raise MisconfigurationException(
            f"context_parallel_size={cp} while torch's context_parallel() is active, which cuts sequences a "
            "second time. Leave its context; after an error inside of it, start a new process."
        )
    if module is not None and _has_accelerate_hooks(module):
        raise MisconfigurationException(
            f"context_parallel_size={cp} while Accelerate's context parallelism is active, which cuts "
            "sequences a second time. Prepare the model without ParallelismConfig(cp_size, sp_size)."
        )


def _has_accelerate_hooks(module: nn.Module) -> bool:
    return any(
        getattr(hook, "__module__", None) == "accelerate.big_modeling"
        and "context_parallel" in getattr(hook, "__qualname__", "")
        for child in module.modules()
        for hook in child._forward_pre_hooks.values()
    )


def refuse_compiled_module(module: object, sizes: AxisSizes) -> None:
    """Refuse ``torch.compile(lightning_module)`` if ranks share packs: their collectives would hang."""
    if sizes.peers > 1 and getattr(module, "_compiler_ctx", None) is not None:
        raise MisconfigurationException(
            f"torch.compile({type(module).__name__}) while {sizes.peers} ranks share each pack: compiled "
            "collectives can wait for each other forever. Compile only its model: self.model.compile()."
        )


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
    refused = (WeightAveraging, StochasticWeightAveraging, BaseFinetuning) if shards else (BaseFinetuning,)
    for callback in callbacks:
        if isinstance(callback, refused) and (shards or isinstance(strategy, DDPStrategy)):
            why = "copies weights that are cut over ranks"
            if isinstance(callback, BaseFinetuning):
                why = "unfreezes weights whose gradients ranks would not average"
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
    wanted = sizes.data * sizes.context
    for name, parameter in model.named_parameters():
        if wanted == 1 or not parameter.requires_grad:
            continue
        ranks = 1
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            named = zip(mesh.mesh_dim_names or ("",) * mesh.ndim, mesh.shape, strict=True)
            ranks = math.prod(size for axis, size in named if axis != TENSOR)
        if ranks != wanted:
            raise MisconfigurationException(
                f"{name} was sharded over {ranks} ranks in configure_model(), but {wanted} ranks see "
                "different tokens. Call fully_shard on the whole model over 'data_context_parallel'."
            )
