"""Gradients of any layout, on several meshes or stages -> their norms, and the same gradients clipped."""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from lightning_thd._private import private, set_private
from lightning_thd._user_code import user_line
from lightning_thd.parallel.exchange import local
from lightning_thd.parallel.pipeline.cut import stages_in
from lightning_thd.parallel.pipeline.stage import Stage

# Gradients that can be added up together: their mesh or None, the axes that shard them, their dtype.
_Key: TypeAlias = tuple[Any, tuple[int, ...], torch.dtype]


def clip_by_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    *,
    device: torch.device | None = None,
    across: dist.ProcessGroup | None = None,
    counted_elsewhere: Collection[int] = (),
) -> Tensor:
    """Scale gradients to a norm of at most ``max_norm``, and return the norm before; a collective.

    The norm is that of all shards, and of all ranks of ``across``, the stages of a pipeline. It leaves out
    parameters whose ids are in ``counted_elsewhere``, because another rank counts them.
    """
    parameters = list(parameters)
    if device is None and parameters:
        device = parameters[0].device
    zero = torch.zeros((), device=device)
    scaled = _by_mesh(parameters)
    if not scaled and across is None:
        return zero

    counted = scaled
    if counted_elsewhere:
        counted = _by_mesh(p for p in parameters if id(p) not in counted_elsewhere)
    squares = [_sum_of_squares(grads, key) for key, grads in counted.items()]
    square = torch.stack(squares).sum() if squares else zero
    if across is not None:
        square = square.to(torch.float64)  # one dtype on all stages, also on one without gradients
        dist.all_reduce(square, group=across)
    norm = square.sqrt()

    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch's rule and constant
    multiply = private("torch._foreach_mul_")
    for (_, _, dtype), grads in scaled.items():
        # The factor in the gradients' dtype saves a conversion; but fp16 would round a small factor to 0.
        multiply(grads, factor if dtype == torch.float16 else factor.to(dtype))
    return norm


def _sum_of_squares(grads: list[Tensor], key: _Key) -> Tensor:
    """Return the squared norm of gradients over all ranks that hold parts of them, in fp32 or better."""
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    norms = private("torch._foreach_norm")(grads, 2, dtype=wide)
    square = torch.stack(norms).square().sum()

    mesh, axes, _ = key
    for axis in axes:
        dist.all_reduce(square, group=mesh.get_group(axis))
    return square


def clip_by_value(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Clamp every gradient to ``[-limit, limit]``."""
    for parameter in parameters:
        grad: Any = parameter.grad
        if grad is not None:
            local(grad).clamp_(-limit, limit)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> dict[_Key, list[Tensor]]:
    """Group the local parts of gradients by mesh, sharded axes and dtype, in the same order on every rank."""
    groups: dict[_Key, list[Tensor]] = {}
    for parameter in parameters:
        grad: Any = parameter.grad
        if grad is None:
            continue
        mesh = None
        axes: tuple[int, ...] = ()
        if isinstance(grad, DTensor):
            mesh = grad.device_mesh
            axes = tuple(axis for axis, kind in enumerate(grad.placements) if not kind.is_replicate())
        part = local(grad)
        groups.setdefault((mesh, axes, part.dtype), []).append(part)
    return groups


def meshes(parameters: Iterable[Tensor]) -> set[Any]:
    """Return the meshes of parameters; None stands for plain tensors."""
    return {p.device_mesh if isinstance(p, DTensor) else None for p in parameters}


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Tensor]:
    """Compute the p-norm, p = ``norm_type``, of each gradient (all its shards) and of all; a collective.

    Returns:
        ``grad_2.0_norm/<name>`` for each gradient, and ``grad_2.0_norm_total``, scalar tensors. If p is 2,
        norms 3 and 4 give a total of 5. A pipeline's rank gets its own layers' norms, and the total of all.
    """
    try:
        p = float(norm_type)
    except (TypeError, ValueError):
        p = math.nan  # refused below
    if not p > 0:
        raise ValueError(f"norm_type={norm_type!r}; wanted a number above 0, or 'inf'.")

    norms: dict[str, Tensor] = {}
    counted: list[Tensor] = []  # the norms of the total: a tied weight is counted on the first stage only
    stage = next(stages_in(module), None)
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            continue
        norm = _norm_of(parameter.grad, p)
        norms[f"grad_{p}_norm{group_separator}{name}"] = norm
        if stage is None or stage.channel.rank == 0 or parameter is not stage.tied:
            counted.append(norm)

    if stage is not None:  # also a stage without gradients, because the total is a collective
        norms[f"grad_{p}_norm_total"] = _total_over_stages(counted, p, stage)
    elif norms:
        norms[f"grad_{p}_norm_total"] = torch.linalg.vector_norm(torch.stack(counted), p)
    return norms


def _norm_of(grad: Tensor, p: float) -> Tensor:
    """Return the p-norm of a gradient, in fp32 or better; a collective if the gradient is sharded."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(grad.detach(), p, dtype=wide)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _total_over_stages(norms: list[Tensor], p: float, stage: Stage) -> Tensor:
    """Return the p-norm of this stage's norms and of those of all other stages; a collective."""
    of_stage = torch.zeros((), dtype=torch.float64, device=stage.device)
    if norms:
        of_stage = torch.linalg.vector_norm(torch.stack(norms), p)
    of_stages: list[float] = [0.0] * stage.channel.ranks
    dist.all_gather_object(of_stages, float(of_stage), group=stage.channel.down)
    total: Tensor = torch.linalg.vector_norm(torch.tensor(of_stages, dtype=torch.float64), p)
    return total.to(of_stage)


@contextmanager
def refused_norms_of_a_stage() -> Generator[None]:
    """Refuse torch's clipping and norms inside this context: they see only the gradients of one stage."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise MisconfigurationException(
            "torch.nn.utils sees only the gradients of this pipeline stage. Use gradient_clip_val=, "
            f"self.clip_gradients(...) or lightning_thd.strategies.norms.grad_norm.\n  {user_line()}"
        )

    # All functions of torch's module call this one, under whatever name the user imported them.
    grouping = "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype"
    replaced = private(grouping)
    set_private(clip_grad, grouping, refuse)
    try:
        yield
    finally:
        set_private(clip_grad, grouping, replaced)
