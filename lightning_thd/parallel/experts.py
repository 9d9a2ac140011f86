"""A transformers model with experts -> whole experts on each rank, to which transformers sends the tokens.

The ranks of one stage form a mesh of ``expert_shards`` x ``expert_parallel``. Along ``expert_parallel`` each
rank holds other experts, and two all-to-alls a layer take every token to its experts and back. Along
``expert_shards`` FSDP2 shards the same experts. The dispatch is ``transformers.distributed.expert_parallel``.
This module finds the experts by the model's own plan, checks that the ranks divide them, and averages their
gradients.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from lightning_thd._find import models_in
from lightning_thd._versions import installed_version
from lightning_thd.parallel.exchange import local
from lightning_thd.parallel.tensor import parameters_as

_DISPATCH: Final = "ep_dispatch_experts"  # the style of modules whose tokens are sent
_WHOLE: Final = "grouped_gemm"  # the style of their weights, of which a rank holds those of its experts
_RANKS: Final = "_thd_expert_ranks"  # the attribute of distributed experts: over how many ranks


def require_dispatch() -> Callable[..., Any]:
    """Return transformers' function that distributes experts; raise ValueError if this release has none."""
    try:
        from transformers.distributed import expert_parallel
    except ImportError:
        apply: Any = None
    else:
        apply = getattr(expert_parallel, "apply_expert_parallelism", None)

    parameters = ["model", "ep_mesh", "tp_mesh", "plan", "ep_implementation"]
    if apply is None or list(inspect.signature(apply).parameters) != parameters:
        installed = installed_version("transformers")
        raise ValueError(
            "expert_parallel_size needs the dispatch of transformers.distributed.expert_parallel that "
            f"transformers 5.23 has; installed is transformers {installed}. Install 5.23 or later, or leave "
            "expert_parallel_size out: tensor_parallel_size gives each rank whole experts too."
        )

    dispatch: Callable[..., Any] = apply
    return dispatch


def expert_plan(model: nn.Module, ranks: int) -> dict[str, str]:
    """Return the plan of a model's experts, by full names of modules and parameters.

    Raises:
        ValueError: if no part of the model has such a plan, if its names match nothing, or if ``ranks`` does
            not divide the number of experts.
    """
    plan: dict[str, str] = {}
    names: set[str] = set()  # those of the plan

    for path, inner in models_in(model):
        prefix = f"{path}." if path else ""
        for name, style in (getattr(inner, "ep_plan", None) or {}).items():
            names.add(prefix + name)
            if style not in (_DISPATCH, _WHOLE):
                raise ValueError(
                    f"The expert-parallel plan of {type(inner).__name__} asks for {style!r} of {name!r}; "
                    f"supported are {_DISPATCH!r} and {_WHOLE!r}. Set expert_parallel_size=1 for this model."
                )
            for match in _matching(inner, name):
                plan[prefix + match] = style
        if names:
            break  # the plan of a model includes those of the models inside it

    experts = [name for name, style in plan.items() if style == _DISPATCH]
    if not experts:
        why = f"its plan {sorted(names)} matches no module" if names else "it has no plan for experts"
        raise ValueError(
            f"expert_parallel_size={ranks}, but {type(model).__name__} cannot be distributed by experts: "
            f"{why}. Set expert_parallel_size=1, or use a model whose config has a base_model_ep_plan."
        )

    for name in experts:
        _check_experts(name, model.get_submodule(name), plan, ranks)
    return plan


def _matching(model: nn.Module, entry: str) -> Iterator[str]:
    """Yield the names of modules and parameters that an entry of a plan means; ``*`` is any number."""
    pattern = re.compile(re.escape(entry).replace(r"\*", r"\d+"))
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters()]
    yield from (name for name in names if pattern.fullmatch(name))


def _check_experts(name: str, experts: Any, plan: dict[str, str], ranks: int) -> None:
    count: Any = getattr(experts, "num_experts", None)
    for own, parameter in experts.named_parameters(recurse=False):
        if plan.get(f"{name}.{own}") != _WHOLE or parameter.shape[:1] != (count,):
            raise ValueError(
                f"{name}.{own} has shape {list(parameter.shape)}, and the module {count} experts; wanted "
                "weights [experts, ...], all in the model's plan. Set expert_parallel_size=1 for this model."
            )
    if count % ranks:
        raise ValueError(
            f"{name} has {count} experts, which expert_parallel_size={ranks} does not divide. Set it to a "
            f"divisor of {count}."
        )


def distribute_experts(
    model: nn.Module, plan: dict[str, str], experts: DeviceMesh, tensor: DeviceMesh, *, gradient_scale: float
) -> None:
    """Leave each rank its experts, in place, and send tokens to them in every forward pass.

    Args:
        model: the model, with all experts on every rank.
        plan: what ``expert_plan`` returned, perhaps only the part that this rank's layers have.
        experts: the mesh of ranks that hold different experts.
        tensor: the mesh of ranks that run the same tokens.
        gradient_scale: factor of the gradients of experts. The dispatch adds up those of all ranks that sent
            tokens, where the mean over ranks is wanted.
    """
    dispatched = [name for name, style in plan.items() if style == _DISPATCH]
    for name in dispatched:
        _scale_gradients(model.get_submodule(name), gradient_scale)
    require_dispatch()(model, experts, tensor, plan, ep_implementation="all_to_all")
    for name in dispatched:
        module: Any = model.get_submodule(name)
        module.__dict__[_RANKS] = experts.size()
        if tensor.size() > 1:
            module.forward = _copying(module.forward)


def _copying(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a forward whose output is no view, which FSDP2 warns of; tensor ranks gather it as one."""
    return lambda *args, **kwargs: forward(*args, **kwargs).clone()


def _scale_gradients(experts: Any, scale: float) -> None:
    """Multiply the gradients of a module's parameters; transformers calls its forward with local ones."""
    forward = experts.forward

    def scaled(weight: Tensor) -> Tensor:
        output: Tensor = _ScaledGradient.apply(weight, scale)  # type: ignore[no-untyped-call]
        return output

    def scaling_forward(*args: Any, **kwargs: Any) -> Tensor:
        with parameters_as(experts, scaled):
            output: Tensor = forward(*args, **kwargs)
        return output

    experts.forward = scaling_forward


class _ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


def experts_of(model: nn.Module) -> list[nn.Module]:
    """List the modules whose experts ``distribute_experts`` has distributed."""
    return [module for module in model.modules() if _RANKS in module.__dict__]


def expert_ranks(model: nn.Module) -> int:
    """Return over how many ranks the experts of a model are distributed; 1 if they are not."""
    ranks: int = next((module.__dict__[_RANKS] for module in experts_of(model)), 1)
    return ranks


def shard_experts(
    model: nn.Module, mesh: DeviceMesh, *, policy: MixedPrecisionPolicy, reshard_after_forward: bool
) -> None:
    """Shard distributed experts by FSDP2 over ``mesh``, the ranks that hold the same ones."""
    for module in experts_of(model):
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=lambda weight: Shard(_dim_to_shard(weight, mesh.size())),
        )


def _dim_to_shard(weight: nn.Parameter, ranks: int) -> int:
    """Return the first dimension that the ranks divide: experts, else rows or columns of each."""
    shape = local(weight).shape
    for dim, size in enumerate(shape):
        if size % ranks == 0:
            return dim
    raise ValueError(
        f"{ranks} ranks share the same experts by FSDP2, but divide no dimension of their weights "
        f"{list(shape)}. Raise expert_parallel_size, so that fewer ranks hold the same experts."
    )
