"""Doubts that only a real GPU settles, each with the command that settles it.

``python -m benchmarks.gpu_doubts`` lists them; with the name of one of this file's checks it runs the check,
prints "settled" or the error, and ends with 0 or 1. ``python -m benchmarks.gpu --plan`` ends with the list.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

_HERE = "python -m benchmarks.gpu_doubts"
_GRAPHS = "python -m pytest -m gpu tests/cuda_graph/test_gpu.py -k"
DOUBTS = {
    "After a capture whose end failed, dropout of earlier graphs still follows the generator.": (
        f"{_GRAPHS} 'breaks_at_its_end or dropout'"
    ),
    "Graphs of one pool do not overwrite each other's memory.": (
        f"{_GRAPHS} 'nan_in_freed_memory or memory_is_level'"
    ),
    "_grouped_mm in bf16 reads nothing on compute capability 8.": f"{_HERE} grouped_mm",
    "Lazy NCCL groups that are made again after destroy_process_group wait for their own ranks only.": (
        "torchrun --nproc_per_node 4 -m benchmarks.gpu_doubts lazy_groups"
    ),
}


def grouped_mm() -> None:
    """Multiply groups of rows while host reads are errors."""
    rows = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = torch.randn(4, 32, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([16, 16, 40, 64], device="cuda", dtype=torch.int32)
    torch._grouped_mm(rows, weights, offs=ends).square().sum().backward()  # libraries are loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch._grouped_mm(rows, weights, offs=ends).square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def lazy_groups() -> None:
    """Exchange between two of four ranks in groups without a device, before and after a new start."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    for _ in range(2):
        dist.init_process_group("nccl")
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        x = torch.full((1,), float(rank), device="cuda")
        dist.all_reduce(x, group=pairs[rank // 2])
        assert x.item() == (1.0 if rank < 2 else 5.0)
        dist.destroy_process_group()


CHECKS: dict[str, Callable[[], None]] = {x.__name__: x for x in (grouped_mm, lazy_groups)}


def listed() -> str:
    """Return the doubts and their commands as text."""
    return "\n".join(f"{doubt}\n    {command}" for doubt, command in DOUBTS.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("check", nargs="?", choices=list(CHECKS))
    name = parser.parse_args().check
    if name is None:
        print(listed())
        return 0
    try:
        CHECKS[name]()
    except Exception as error:
        print(f"{name}: {type(error).__name__} {error}")
        return 1
    print(f"{name}: settled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
