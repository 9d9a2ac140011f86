"""Layouts of ranks on a real NCCL, several on one start: a line for each as it ends, tracebacks in a file.

``python -u -m benchmarks.gpu_nccl 2`` runs the layouts of two ranks, ``4`` those of four; names behind the
number choose some. Each runs in fp64, then in fp32: what differs in fp32 alone is rounding. ``$OUT/nccl.txt``
(or ``runs/nccl.txt``) gets whole tracebacks, and ``nccl.txt.<rank>`` the stacks of ranks that hang for 40
seconds.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts import take_oracles_along
from tests.ranks import run_ranks
from tests.strategies import jobs
from tests.strategies.layouts import LAYOUTS, check_layout, rows

LOG = Path(os.environ.get("OUT", "runs")) / "nccl.txt"


def train(names: tuple[str, ...], dtype: torch.dtype) -> list[Any]:
    """Train in every layout on this rank, and return parameters or a traceback for each."""
    found: list[Any] = []
    stacks = Path(f"{LOG}.{os.environ['RANK']}").open("a")  # noqa: SIM115  (faulthandler keeps it)
    for name in names:
        faulthandler.dump_traceback_later(40, file=stacks, repeat=True)
        try:
            found.append(jobs.train(*LAYOUTS[name], dtype))
        except Exception:
            found.append(traceback.format_exc())
    faulthandler.cancel_dump_traceback_later()
    return found


def verdict(name: str, found: list[Any], dtype: torch.dtype) -> str:
    """Return how a layout ended, and write its traceback into the file if it failed."""
    raised = [one for one in found if isinstance(one, str)]
    if raised:
        keep(name, dtype, raised[0])
        return f"RAISED {raised[0].strip().splitlines()[-1][:200]}"
    try:
        check_layout(name, found, dtype)
    except Exception as error:
        keep(name, dtype, traceback.format_exc())
        return f"DIFFERS {str(error)[:200]}"
    return "ok"


def keep(what: object, dtype: torch.dtype, text: str) -> None:
    """Add a traceback to the file."""
    with LOG.open("a") as file:
        file.write(f"== {what} {dtype}\n{text}\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("ranks", type=int, choices=(2, 4))
    parser.add_argument("layouts", nargs="*")
    arguments = parser.parse_args(argv)
    take_oracles_along()
    LOG.parent.mkdir(parents=True, exist_ok=True)
    os.environ["NCCL_DEBUG"] = "WARN"
    os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "2000"
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    ran = 0
    equal = 0  # in fp64
    for every in rows(arguments.ranks, 4):
        names = tuple(name for name in every if not arguments.layouts or name in arguments.layouts)
        ran += len(names)
        for dtype in (torch.float64, torch.float32) if names else ():
            begun = time.perf_counter()
            try:
                ranks = run_ranks(train, arguments.ranks, names, dtype, timeout_s=120.0, kind="nccl")
            except Exception as error:
                keep(names, dtype, traceback.format_exc())
                print(names, dtype, "RANKS", str(error)[-300:].replace("\n", " "), flush=True)
                continue
            seconds = time.perf_counter() - begun
            for name, found in zip(names, zip(*ranks, strict=True), strict=True):
                said = verdict(name, list(found), dtype)
                print(name, dtype, said, f"{seconds:.0f} s", flush=True)
                equal += dtype == torch.float64 and said == "ok"
    print(f"{equal} of {ran} layouts of {arguments.ranks} ranks equal one process in fp64", flush=True)


if __name__ == "__main__":
    main()
