"""A yes or no of every rank -> whether all ranks said yes."""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_agree(agrees: bool, device: torch.device) -> bool:
    """Return whether every rank agrees; in a single process, return this one's answer."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return agrees
    votes = torch.tensor(int(agrees), device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes)
