"""The commands of ``benchmarks/GPU.md`` in small on an imagined GPU, so that a real one runs them at once.

Every part runs the code that runs there, with tiny sizes, and the losses' kernels by their stand-in in torch.
Goals are not checked: the imagined device has no speed. ``python -m tests.imagined.half_hour [PART ...]``.

The part ``command`` runs ``benchmarks.gpu`` itself, with its processes. ``nccl`` runs ``benchmarks.gpu_nccl``
on ranks of an imagined NCCL, and ``nccl_all`` does so in all 28 layouts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import math
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from lightning_thd.callbacks import cuda_graph as callback
from lightning_thd.callbacks.cuda_graph import make_buckets
from lightning_thd.cuda_graph import graphed_step
from lightning_thd.cuda_graph.backend import CudaBackend
from tests.imagined.gpu import imagined_gpu
from tests.loss.forced import kernels_forced, module_replaced
from tests.ranks import run_ranks
from tests.strategies.layouts import IN_FP64

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
    sizes["make_buckets"] = lambda counts, slots: make_buckets(counts, slots=64)
    sizes["available"] = lambda name: True
    patched: list[dict[str, Any]] = []
    liger = types.ModuleType("liger_kernel.transformers")
    liger.apply_liger_kernel_to_qwen3 = lambda **options: patched.append(options)  # type: ignore[attr-defined]
    with (
        mock.patch.multiple(gpu_end_to_end, **sizes),
        module_replaced("liger_kernel", liger),
        module_replaced("liger_kernel.transformers", liger),
        _compiled_without_triton(),
    ):
        rows = rows_of(gpu_end_to_end.train_small())
    assert patched == [{"cross_entropy": False, "fused_linear_cross_entropy": False}]
    ways = {case.partition(", ")[2].partition(", ")[2].rpartition(":")[0] for case in rows}
    graphs = ("graphs", "compiled, graphs", "compiled, graphs and update", "liger's layers, graphs")
    assert ways == {"eager", *graphs, "compiled"}, ways
    assert len(rows) == 6 * 3 + len(graphs) + 1, rows


def train_7b() -> None:
    from benchmarks import gpu_end_to_end
    from benchmarks.host_time import flash_attn

    build = gpu_end_to_end.build
    packs = gpu_end_to_end.packs

    def without_flash_attn_installed(sizes: Any, attention: str) -> Any:
        model: Any = build(sizes, "sdpa")
        model.config._attn_implementation_internal = attention
        return model

    sizes: dict[str, Any] = {
        "LARGE": TINY,
        "VOCABULARY": 200,
        "LARGE_STEPS": 6,
        "LARGE_GIB": 1,
        "CHECKPOINTED_GIB": 1,
    }
    sizes["packs"] = lambda slots, documents: packs(64, documents)
    sizes["make_buckets"] = lambda counts, slots: make_buckets(counts, slots=64)
    too_much = 10**6
    with mock.patch.multiple(gpu_end_to_end, **sizes), _compiled_without_triton():
        whole = rows_of(gpu_end_to_end.train_large())
        with mock.patch.object(gpu_end_to_end, "LARGE_GIB", too_much):
            checkpointed = rows_of(gpu_end_to_end.train_large())
        with mock.patch.object(gpu_end_to_end, "CHECKPOINTED_GIB", too_much):
            refused = rows_of(gpu_end_to_end.train_large())
        with mock.patch.object(gpu_end_to_end, "build", without_flash_attn_installed), flash_attn():
            flattened = rows_of(gpu_end_to_end.rates("7B", TINY, 64, 2, kind="flattened"))
        with mock.patch.object(gpu_end_to_end, "step_s", side_effect=torch.OutOfMemoryError):
            full = rows_of(gpu_end_to_end.rates("7B", TINY, 64, 2))
    assert len(whole) == 2 * (3 * 3 + 2 + 1), whole  # two packs in three ways, two of them in graphs
    assert len(checkpointed) == 6, checkpointed
    assert all(", checkpoints, eager" in case for case in checkpointed), checkpointed
    assert next(iter(refused)).startswith("7B needs 1000000 GiB"), refused
    assert len(flattened) == 3, flattened
    assert len(full) == 3, full
    assert all(case.endswith(": out of memory") for case in full), full


def lightning_1b() -> None:
    from benchmarks import gpu_lightning

    case = {"tiny": (*TINY, 64, 12.0)}
    sizes: dict[str, Any] = {"CASES": case, "VOCABULARY": 200, "WARM": 2, "STEPS": 5}
    with mock.patch.multiple(gpu_lightning, **sizes), _compiled_without_triton():
        rows = rows_of(gpu_lightning.measured("tiny"))
    assert len(rows) > 5, rows


def host_time() -> None:
    from benchmarks import host_time as module

    with mock.patch.multiple(module, STEPS=6, WARM=2):
        module.main(["--cuda", "--rounds", "1"])


def attention() -> None:
    from benchmarks import gpu_attention

    lengths = [1, 2, 33, 0, 65]
    with mock.patch.object(gpu_attention, "LENGTHS", lengths):
        rows = rows_of(gpu_attention.equal())
    assert max(rows.values()) <= gpu_attention.TOLERANCE, rows


def attention_speed() -> None:
    from benchmarks import gpu_attention

    rows_of(gpu_attention.compare(2, 16))


def cuda_graph() -> None:
    from benchmarks import gpu_cuda_graph

    sizes: dict[str, Any] = {"SIZES": {"0.1B": TINY}, "VOCABULARY": 200, "BATCHES": 3}
    with mock.patch.multiple(gpu_cuda_graph, **sizes), mock.patch("torch.profiler.profile", _profiled):
        rows = rows_of(gpu_cuda_graph.measured((("0.1B", 64),), compiled=False))
    assert "0.1B 64 ours / eager" in rows, rows


def profile() -> None:
    from benchmarks import gpu_end_to_end, gpu_lightning, gpu_profile

    build = gpu_end_to_end.build
    packs = gpu_end_to_end.packs
    tiny: dict[str, Any] = {"build": lambda _: build(TINY), "packs": lambda *_: packs(64, 8)}
    tiny["make_buckets"] = lambda counts, slots: make_buckets(counts, slots=64)
    sizes: dict[str, Any] = {"CASES": {"tiny": (*TINY, 64, 12.0)}, "VOCABULARY": 200, "WARM": 2}
    with (
        mock.patch.multiple(gpu_profile, STEPS=2, profile=_profiled, **tiny),
        mock.patch.multiple(gpu_end_to_end, VOCABULARY=200, SMALL=TINY),
        mock.patch.object(sys, "argv", ["gpu_profile", "--host"]),
    ):
        gpu_profile.main()
    with (
        mock.patch.multiple(gpu_lightning, **sizes),
        mock.patch.multiple(gpu_profile, STEPS=2, profile=_profiled),
        _compiled_without_triton(),
    ):
        gpu_profile.device_rows("tiny", [])


def nccl() -> None:
    _nccl("2", "ddp", "fsdp")
    _nccl("4", "cp x tp")


def nccl_all() -> None:
    _nccl("2")
    _nccl("4")


def _nccl(*arguments: str) -> None:
    """Run ``benchmarks.gpu_nccl``, whose ranks have imagined GPUs, and check that every layout is right."""
    from benchmarks import gpu_nccl

    def on_imagined_gpus(*positional: Any, **options: Any) -> list[Any]:
        return run_ranks(*positional, **{**options, "kind": "imagined", "timeout_s": 1200.0})

    printed = io.StringIO()
    with mock.patch.object(gpu_nccl, "run_ranks", on_imagined_gpus), contextlib.redirect_stdout(printed):
        gpu_nccl.main([*arguments])
    *lines, summary = printed.getvalue().splitlines()
    for line in (*lines, summary):
        _say(f"  {line}")
    wrong = [line for line in lines if " ok " not in line and not _is_rounding(line)]
    assert lines, arguments
    assert not wrong, wrong
    equal, _, ran, *_ = summary.split()
    assert int(equal) == int(ran) == len(lines) / 2, summary


def _is_rounding(line: str) -> bool:
    """Return whether a layout differs where ``tests.strategies.layouts`` says that fp32 rounds too much."""
    return any(line.startswith(f"{name} torch.float32 DIFFERS") for name in IN_FP64)


def command() -> None:
    """Run the command itself: its plan, processes of benchmarks and of tests, and its table."""
    from benchmarks import gpu

    class OnImaginedGPU(gpu.Process):
        def __init__(self, words: list[str], **environment: str) -> None:
            if "pytest" in words:
                place = words.index("pytest") + 1
                words = [*words[:place], "-p", "tests.imagined.plugin", *words[place:]]
                words += ["-k", "not measured_peak"]  # no figure of a vendor is that of an imagined GPU
            else:
                words = ["-u", "-m", "tests.imagined.half_hour", "--serve"]
            super().__init__(words, **environment)

        def wait(self, limit_s: float) -> tuple[int | None, str]:
            return super().wait(1200.0)

    parts = ["loss_big_head", "lightning_1b", "test_throughput"]
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(gpu, "Process", OnImaginedGPU):
        gpu.main(["--parts", *parts, "--budget", "60", "--out", folder])
        found = gpu.saved(Path(folder))
    assert set(found) == set(parts), found.keys()
    for name, one in found.items():
        assert one["finished"], (name, one["problem"], one["output"][-3000:])
        assert not one["problem"], (name, one["problem"], one["output"][-3000:])
        assert one["rows"], name


def _profiled(activities: Any) -> Any:
    """Return a profiler of the CPU, as torch's build for CPUs has no other."""
    assert activities == [torch.profiler.ProfilerActivity.CUDA]
    return _PROFILE(activities=[torch.profiler.ProfilerActivity.CPU])


_PROFILE = torch.profiler.profile


@contextlib.contextmanager
def _compiled_without_triton() -> Iterator[None]:
    """Let torch's compiler trace, and run what it traced operator by operator."""
    compile_layer: Any = nn.Module.compile

    def traced(self: nn.Module, **options: Any) -> None:
        compile_layer(self, **{**options, "backend": "aot_eager"})

    backend = functools.partial(CudaBackend, compiler="aot_eager")
    with (
        mock.patch.object(graphed_step, "CudaBackend", backend),
        mock.patch.object(callback, "CudaBackend", backend),
        mock.patch.object(nn.Module, "compile", traced),
    ):
        yield


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


_FILES: list[Path] = []  # into which rows are written, in a process that ``command`` started


def rows_of(rows: Iterator[Any]) -> dict[str, float]:
    """Print rows as they come, and return them by case."""
    values: dict[str, float] = {}
    for row in rows:
        for file in _FILES:
            with file.open("a") as out:
                out.write(json.dumps(asdict(row)) + "\n")
        _say(f"  {row.case}: {row.value:.4g} {row.unit} {row.goal}".rstrip())
        assert not math.isnan(row.value), row
        values[row.case] = row.value
    assert values
    return values


_OF_THE_PAGE = (loss_kernels, loss_big_head, train_125m, train_7b, host_time, lightning_1b)
_OTHERS = (attention, attention_speed, cuda_graph, profile)
PARTS: dict[str, Callable[[], None]] = {
    one.__name__: one for one in (*_OF_THE_PAGE, *_OTHERS, nccl, nccl_all, command)
}


def run(name: str) -> None:
    """Run a part where a GPU is imagined."""
    with imagined_gpu(capability=(9, 0), name="NVIDIA H100 80GB HBM3"):
        PARTS[name]()


def run_into(name: str, file: Path) -> None:
    """Run a part and write its rows into a file, as ``benchmarks.gpu`` wants it."""
    _FILES[:] = [file]
    run(name)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="all, if there is none")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)  # in a process of ``command``
    arguments = parser.parse_args(argv)
    if arguments.serve:
        from benchmarks import gpu

        gpu.serve(run_into)
        return 0

    failed = []
    for name in arguments.parts or PARTS:
        _say(name)
        try:
            run(name)
        except Exception:
            traceback.print_exc()
            failed.append(name)
    _say(f"failed: {failed}" if failed else "all parts ran")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
