"""Compute what GPU runs are compared with on a machine without a GPU, into files that are taken along.

``python -m benchmarks.gpu_oracles`` writes into ``runs/oracles`` what one process finds for every family of
``tests/models`` and every layout of ``benchmarks.gpu_nccl``. ``benchmarks.gpu`` and ``gpu_nccl`` read it
there. They compute what is missing. Attention is left out, because its oracle runs on the GPU.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch

from benchmarks.gpu_parts import ORACLES
from lightning_thd.models import register_thd
from tests.models import matrix
from tests.models.families import FAMILIES
from tests.oracles import FOLDER
from tests.strategies.jobs import train_by_hand
from tests.strategies.layouts import LAYOUTS


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=ORACLES)
    folder = parser.parse_args(argv).out
    begun = time.perf_counter()
    before = os.environ.get(FOLDER)
    os.environ[FOLDER] = str(folder.absolute())
    try:
        compute()
    finally:
        del os.environ[FOLDER]
        if before is not None:
            os.environ[FOLDER] = before

    files = sorted(folder.glob("*.pt"))
    size = sum(file.stat().st_size for file in files) / 1e6
    print(f"{len(files)} oracles, {size:.1f} MB, {time.perf_counter() - begun:.0f} s: {folder}")


def compute() -> None:
    """Compute every oracle that is not there."""
    register_thd()
    for name in FAMILIES:
        matrix.oracle.cache_clear()
        matrix.oracle(name)
    matrix.oracle.cache_clear()
    for family, layout, step in LAYOUTS.values():
        for dtype in (torch.float64, torch.float32):
            train_by_hand(family, layout, step, dtype)


if __name__ == "__main__":
    main()
