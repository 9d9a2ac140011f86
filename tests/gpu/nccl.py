"""Ranks of the real NCCL, on one GPU if there are no more."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def join_gpus(rank: int, world_size: int, store: Path) -> None:
    """Make this process, to its end, a rank of NCCL; its Trainers take a GPU in place of the CPU.

    NCCL refuses two ranks of one host on one GPU. Where ranks outnumber GPUs, each calls itself a host, and
    they exchange over sockets.
    """
    import lightning.pytorch as L

    shared = torch.cuda.device_count() < world_size
    if shared:
        os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
    device = torch.device("cuda", 0 if shared else rank)
    torch.cuda.set_device(device)
    torch.backends.cudnn.allow_tf32 = False  # convolutions would round fp32 to 10 bits
    meeting = f"file://{store}"
    dist.init_process_group("nccl", init_method=meeting, rank=rank, world_size=world_size, device_id=device)
    made: Any = L.Trainer.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        hosts = {"devices": 1, "num_nodes": world_size} if shared else {}
        made(self, *args, **{**options, **hosts, "accelerator": "gpu"})

    L.Trainer.__init__ = init  # type: ignore[method-assign]
