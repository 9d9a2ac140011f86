"""A weight that embedding and head share -> the same weight and gradient on the first and last stage."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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


def _other_end(channel: Channel) -> int:
    end = channel.ranks - 1 if channel.rank == 0 else 0
    return dist.get_global_rank(channel.down, end)


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
