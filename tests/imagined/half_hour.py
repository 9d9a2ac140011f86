"""The commands of ``benchmarks/GPU.md`` in small on an imagined GPU, so that a real one runs them at once.

Every part runs the code that runs there, with tiny sizes, and the losses' kernels by their stand-in in torch.
Goals are not checked: the imagined device has no speed. ``python -m tests.imagined.half_hour [PART ...]``.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import nn

from lightning_thd.callbacks.cuda_graph import make_buckets
from lightning_thd.cuda_graph import graphed_step
from lightning_thd.cuda_graph.backend import CudaBackend
from tests.imagined.gpu import imagined_gpu
from tests.loss.forced import kernels_forced

# Layers, hidden size, heads, key-value heads and intermediate size.
TINY = (2, 32, 2, 2, 64)


def loss_kernels() -> None:
    from benchmarks import gpu_loss
    from tests.loss import rows_in_torch

    shapes = mock.Mock(return_value=(8192, 16))
    with (
        mock.patch.object(rows_in_torch, "shape_of", shapes, create=True),
        mock.patch.object(gpu_loss, "VOCABULARY", 2000),
        kernels_forced(interpreted=False),
    ):
        rows_of(gpu_loss.kernels())


def loss_big_head() -> None:
    from benchmarks import gpu_loss

    sizes = {"TOKENS": 96, "WIDTH": 32, "VOCABULARY": 500}
    with mock.patch.multiple(gpu_loss, **sizes), kernels_forced(interpreted=False):  # type: ignore[arg-type]
        rows = rows_of(gpu_loss.big_head())
    assert rows["scalar loss: error of the loss"] < 1e-3, rows


def train_125m() -> None:
    from benchmarks import gpu_end_to_end

    packs = gpu_end_to_end.packs

    def small_packs(slots: int, documents: int) -> Any:
        return packs(64, documents)

    sizes: dict[str, Any] = {"SMALL": TINY, "VOCABULARY": 200, "STEPS": 6, "packs": small_packs}
    with mock.patch.multiple(gpu_end_to_end, **sizes), _compiled_without_triton():
        rows = rows_of(gpu_end_to_end.rates("125M", TINY, 64, 8))
    assert len(rows) == 15, rows


def train_7b() -> None:
    from benchmarks import gpu_end_to_end

    packs = gpu_end_to_end.packs
    sizes: dict[str, Any] = {"LARGE": TINY, "VOCABULARY": 200, "STEPS": 6, "LARGE_GIB": 1}
    sizes["packs"] = lambda slots, documents: packs(64, documents)
    sizes["make_buckets"] = lambda counts, slots: make_buckets(counts, slots=64)
    with mock.patch.multiple(gpu_end_to_end, **sizes):
        rows_of(gpu_end_to_end.train_large())
        with mock.patch.object(gpu_end_to_end, "LARGE_GIB", 10**6):
            rows = rows_of(gpu_end_to_end.train_large())
    assert next(iter(rows)).startswith("7B needs 1000000 GiB"), rows


def lightning_1b() -> None:
    from benchmarks import gpu_lightning

    case = {"tiny": (*TINY, 64, 12.0)}
    with mock.patch.multiple(gpu_lightning, CASES=case, VOCABULARY=200, WARM=2, STEPS=5):
        rows = rows_of(gpu_lightning.measured("tiny"))
    assert len(rows) > 5, rows


def host_time() -> None:
    from benchmarks import host_time as module

    with mock.patch.multiple(module, STEPS=6, WARM=2):
        module.main(["--cuda", "--rounds", "1"])


@contextlib.contextmanager
def _compiled_without_triton() -> Iterator[None]:
    """Let torch's compiler trace, and run what it traced operator by operator."""
    compile_layer: Any = nn.Module.compile

    def traced(self: nn.Module, **options: Any) -> None:
        compile_layer(self, **{**options, "backend": "aot_eager"})

    backend = functools.partial(CudaBackend, compiler="aot_eager")
    with (
        mock.patch.object(graphed_step, "CudaBackend", backend),
        mock.patch.object(nn.Module, "compile", traced),
    ):
        yield


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def rows_of(rows: Iterator[Any]) -> dict[str, float]:
    """Print rows as they come, and return them by case."""
    values: dict[str, float] = {}
    for row in rows:
        _say(f"  {row.case}: {row.value:.4g} {row.unit} {row.goal}".rstrip())
        assert not math.isnan(row.value), row
        values[row.case] = row.value
    assert values
    return values


PARTS: dict[str, Callable[[], None]] = {
    one.__name__: one for one in (loss_kernels, loss_big_head, train_125m, train_7b, host_time, lightning_1b)
}


def main(names: list[str]) -> int:
    failed = []
    for name in names or PARTS:
        _say(name)
        try:
            with imagined_gpu(capability=(9, 0), name="NVIDIA H100 80GB HBM3"):
                PARTS[name]()
        except Exception:
            traceback.print_exc()
            failed.append(name)
    _say(f"failed: {failed}" if failed else "all parts ran")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
