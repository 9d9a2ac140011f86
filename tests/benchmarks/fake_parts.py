"""Parts that need no GPU: one succeeds, one takes its process down."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from benchmarks.gpu_parts import Row, part


def process() -> Row:
    """Return a row that says in which process a part runs."""
    return Row(case="process", value=float(os.getpid()), unit="")


@part("good", shows="a goal met", seconds=1, rank=1)
def good() -> Iterator[Row]:
    yield Row(case="a case", value=1.25, unit="x", goal=">= 1", met=True)
    yield process()


@part("beside", shows="another part of the same process", seconds=1, rank=1)
def beside() -> Iterator[Row]:
    yield process()


@part("wrong", shows="a part that raises", seconds=1, rank=1)
def wrong() -> Iterator[Row]:
    yield process()
    raise ValueError("this part is wrong")


@part("device_lost", shows="a device that fails in the middle", seconds=1, rank=2)
def device_lost() -> Iterator[Row]:
    yield Row(case="before", value=2.0, unit="us")
    sys.stderr.write("torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n")
    sys.stderr.flush()
    os._exit(134)  # as the runtime does


@part("after", shows="a goal missed", seconds=1, rank=3)
def after() -> Iterator[Row]:
    yield Row(case="late", value=0.5, unit="x", goal=">= 1", met=False)
    yield process()


@part("large", shows="no time for it", seconds=1e6, rank=5)
def large() -> Iterator[Row]:
    raise AssertionError("must not run")
    yield
