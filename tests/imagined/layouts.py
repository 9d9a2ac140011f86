"""One rank of a job on imagined GPUs and an imagined NCCL: layouts of ranks against one process by hand.

Arguments: a file for what rank 0 found, then names of ``LAYOUTS`` of one world size; run under torchrun's
environment. What NCCL refuses (CPU tensors, wrong sizes, two ranks on one device) ends the rank.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_thd import Packs, Sequences
from tests.imagined.gpu import data, imagined_gpu
from tests.imagined.nccl import imagined_nccl
from tests.imagined.run import traffic
from tests.strategies import jobs
from tests.strategies.jobs import Layout
from tests.tiny import largest_error


def _way(communication: str, layout: str) -> dict[str, str]:
    return {"context_parallel_communication": communication, "context_parallel_layout": layout}


LAYOUTS: dict[str, tuple[str, Layout, Packs | Sequences]] = {
    "ddp": ("qwen3", Layout(strategy="thd_ddp", dp=2), Packs(4)),
    "fsdp": ("qwen3", Layout(dp=2), Sequences(12)),
    "tp": ("qwen3", Layout(tp=2, options={"sequence_parallel": True}), Sequences(12)),
    "pp": ("qwen3", Layout(pp=2), Sequences(12)),
    "cp needed": ("qwen3", Layout(strategy="thd_ddp", cp=2), Sequences(12)),
    "cp all_gather": ("mistral", Layout(cp=2, options=_way("all_gather", "striped")), Packs(2)),
    "cp ulysses": ("qwen3", Layout(cp=2, options=_way("ulysses", "contiguous")), Packs(2)),
    "cp ring": ("lfm2", Layout(strategy="thd_ddp", cp=2, options=_way("ring", "dual_chunk")), Packs(2)),
    "cp x tp": ("qwen3_moe", Layout(cp=2, tp=2), Sequences(12)),
    "dp x cp": ("mistral", Layout(strategy="thd_ddp", dp=2, cp=2), Packs(4)),
    "pp x dp": ("qwen3", Layout(pp=2, dp=2), Packs(4)),
    "replicas": ("qwen3", Layout(dp=4, options={"data_parallel_replicas": 2}), Sequences(24)),
}


def train(name: str, log: Any, calls: list[Any]) -> dict[str, Any]:
    """Train one layout in fp32; return its error against one process, its traffic and its waits."""
    family, layout, step = LAYOUTS[name]
    log.clear()
    calls.clear()
    log.step = 0
    found = jobs.train(family, layout, step, torch.float32, {"accelerator": "gpu"})
    seen, waits = traffic(log), sum(call[0] == "host waits" for call in calls)
    parameters = {key: data(value) for key, value in found["params"].items()}
    log.counting = False
    wanted = jobs.train_by_hand(family, layout, step, torch.float32)
    log.counting = True
    away = max(abs(a - b) / b for a, b in zip(found["losses"], wanted["losses"], strict=True))
    held = {key: wanted["params"][key] for key in parameters}  # a stage of a pipeline has some of them
    error = largest_error(parameters, held)
    return {"error": error, "losses": away, "waits": waits, "kinds": sorted({c[0] for c in calls}), **seen}


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    jobs.strict_warnings = lambda: None
    results = {}
    with imagined_gpu(devices=world) as log, imagined_nccl() as calls:
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl")
        for name in sys.argv[2:]:
            results[name] = train(name, log, calls)
            if rank == 0:
                Path(sys.argv[1]).write_text(json.dumps(results))
        store = dist.distributed_c10d._get_default_store()
        store.set(f"end{rank}", "1")
        store.wait([f"end{other}" for other in range(world)])
    sys.stdout.flush()
    os._exit(0)  # torch's own end would wait for the imagined communicators


if __name__ == "__main__":
    main()
