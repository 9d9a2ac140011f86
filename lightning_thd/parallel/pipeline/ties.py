"""A weight that embedding and head share -> the same weight and gradient on the first and last stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_thd.parallel.pipeline.channel import Channel


def copy_tied(weight: nn.Parameter, channel: Channel) -> None:
    """Copy the first stage's tied weight, whole or sharded, to the last stage; both call it."""
    data = _local(weight.detach())
    if channel.rank == 0:
        dist.send(data.contiguous(), _other_end(channel), group=channel.down)
        return
    received = torch.empty_like(data)
    dist.recv(received, _other_end(channel), group=channel.down)
    data.copy_(received)


def sum_tied(weight: nn.Parameter, channel: Channel) -> None:
    """Sum the reduced gradients of the embedding's and head's tied weight; both stages call it."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    own = _local(weight.grad)
    other = torch.empty_like(own)
    peer, group = _other_end(channel), channel.up
    exchange = [
        dist.P2POp(dist.isend, own.contiguous(), peer, group=group),
        dist.P2POp(dist.irecv, other, peer, group=group),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    own.add_(other)


def share_group(weight: nn.Parameter | None, optimizers: Sequence[Optimizer], channel: Channel) -> None:
    """Move the last stage's tied weight to the optimizer group of the first stage's; all stages call it.

    Groups that were made by names may hold the head elsewhere than the embedding, whose weight it is.

    Args:
        weight: on the first and last stage, the copy of it.
        optimizers: of this stage.
        channel: to the others.

    Raises:
        ValueError: when the last stage has no group with the options of the first's.
    """
    options = [
        [{name: repr(value) for name, value in group.items() if name != "params"} for group in o.param_groups]
        for o in optimizers
    ]
    own = _place(weight, optimizers)
    found: list[Any] = [None] * channel.ranks
    dist.all_gather_object(found, (own, options), group=channel.down)
    (wanted, first), (_, last) = found[0], found[-1]
    if wanted is not None:
        i, k = wanted
        there = last[i][k] if i < len(last) and k < len(last[i]) else None
        if there != first[i][k]:
            raise ValueError(
                f"The weight that embedding and head share is in the optimizer's group {k} on the first "
                f"pipeline stage, with {first[i][k]}, but that group of the last stage has {there}. Make "
                "the same groups on every rank, empty ones included."
            )
    if channel.rank == channel.ranks - 1 and own != wanted:
        if own is not None:
            group = optimizers[own[0]].param_groups[own[1]]
            group["params"] = [parameter for parameter in group["params"] if parameter is not weight]
        if wanted is not None:
            optimizers[wanted[0]].param_groups[wanted[1]]["params"].append(weight)


def share_freezing(weight: nn.Parameter | None, channel: Channel) -> None:
    """Freeze both copies of a tied weight if one is frozen; all stages call it."""
    found: list[Any] = [None] * channel.ranks
    dist.all_gather_object(found, weight is None or weight.requires_grad, group=channel.down)
    if weight is not None and not all(found):
        weight.requires_grad_(False)


def _place(weight: nn.Parameter | None, optimizers: Sequence[Optimizer]) -> tuple[int, int] | None:
    for i, optimizer in enumerate(optimizers):
        for k, group in enumerate(optimizer.param_groups):
            if any(parameter is weight for parameter in group["params"]):
                return i, k
    return None


def _other_end(channel: Channel) -> int:
    end = channel.ranks - 1 if channel.rank == 0 else 0
    return dist.get_global_rank(channel.down, end)


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
