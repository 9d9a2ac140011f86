"""Milliseconds of a step on a GPU by kind of kernel, for the ways of ``gpu_lightning``; or those of the host.

``python -m benchmarks.gpu_profile --case 1B`` trains each way and profiles ``STEPS`` steps after the first
ones. A row is a kind of kernel: its launches and milliseconds a step. ``--host`` prints instead the host's
milliseconds in the parts of a replayed step of the 125M case, and its slowest functions.
"""

from __future__ import annotations

import argparse
import collections
import cProfile
import gc
import io
import pstats
import statistics
import time
from typing import Any

import lightning as L
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import gpu_lightning
from benchmarks.gpu_end_to_end import SMALL, build, packs
from lightning_thd import causal_lm_loss
from lightning_thd.callbacks.cuda_graph import GraphedStep, make_buckets

STEPS = 6
KINDS = {
    "attention": ("flash", "fmha", "attention"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk"),
    "optimizer": ("multi_tensor", "adam"),
    "copies": ("memcpy", "memset", "copy_kernel", "copy_device"),
    "indexing": ("index", "gather", "scatter", "embedding"),
    "concatenation": ("catarray",),
    "reductions": ("reduce", "softmax", "norm", "cunn", "logsumexp"),
    "elementwise": ("elementwise",),
}


def kind_of(kernel: str) -> str:
    """Name the kind of a kernel."""
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")


class Profiled(L.Callback):
    """Profiles the device from the end of the first steps on, and measures the wall time of as many steps."""

    def __init__(self) -> None:
        self.profile, self.steps = profile(activities=[ProfilerActivity.CUDA]), 0
        self.seconds, self.host = 0.0, 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        """Begin and end."""
        self.steps += 1
        first = gpu_lightning.WARM
        if self.steps == first:
            torch.cuda.synchronize()
            self._start = time.perf_counter()
            self._cpu = time.process_time()
        elif self.steps == first + STEPS:
            self.host = (time.perf_counter() - self._start) / STEPS
            torch.cuda.synchronize()
            self.seconds = (time.perf_counter() - self._start) / STEPS
            self.profile.__enter__()
        elif self.steps == first + 2 * STEPS:
            torch.cuda.synchronize()
            self.profile.__exit__(None, None, None)


def device_rows(case: str, only: list[str]) -> None:
    """Print a table for each way."""
    gpu_lightning._quiet()
    for name, attention, data, callbacks in gpu_lightning.ways(case):
        if only and name not in only:
            continue
        profiled = Profiled()
        steps = gpu_lightning.WARM + 2 * STEPS
        trainer = gpu_lightning.make_trainer(steps, [*callbacks[1:], profiled])
        model = gpu_lightning.build(case, attention)
        trainer.fit(gpu_lightning.Module(model), data)
        kinds: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        names: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        for row in profiled.profile.key_averages():
            for table, key in ((kinds, kind_of(row.key)), (names, row.key)):
                table[key][0] += row.count / STEPS
                table[key][1] += row.self_device_time_total / STEPS / 1e3
        total = sum(ms for _, ms in kinds.values())
        print(f"\n{case}, {name}: {profiled.seconds * 1e3:.1f} ms a step, launched after "
              f"{profiled.host * 1e3:.1f} ms; kernels {total:.1f} ms")  # fmt: skip
        for key, (count, ms) in sorted(kinds.items(), key=lambda item: -item[1][1]):
            print(f"  {key:<16}{count:>8.1f} launches{ms:>10.2f} ms")
        for key, (count, ms) in sorted(names.items(), key=lambda item: -item[1][1])[:25]:
            print(f"    {count:>7.1f} {ms:>9.3f} ms  {key[:150]}")
        del model, trainer, data
        gc.collect()
        torch.cuda.empty_cache()


def host_rows() -> None:
    """Print the host's milliseconds in the parts of a replayed step, without waiting between them."""
    model, batches = build(SMALL), packs(8192, 8)
    graphs = GraphedStep(causal_lm_loss, model, buckets=make_buckets((16,), slots=8192))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    parts: dict[str, list[float]] = collections.defaultdict(list)

    def step(k: int) -> None:
        times = [time.perf_counter()]
        loss = graphs(batches[k % len(batches)])
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        times.append(time.perf_counter())
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter())
        for name, a, b in zip(("step", "backward", "AdamW", "zero_grad"), times, times[1:], strict=False):
            parts[name].append((b - a) * 1e3)

    for k in range(12):
        step(k)
    parts.clear()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for k in range(24):
        step(k)
    launched = time.perf_counter() - begun
    torch.cuda.synchronize()
    whole = time.perf_counter() - begun
    print(f"\n125M replayed: {whole / 24e-3:.2f} ms a step, launched after {launched / 24e-3:.2f} ms; "
          f"replays {graphs.stats.replays}")  # fmt: skip
    for name, times in parts.items():
        print(f"  {name:<12}{statistics.median(times):>8.2f} ms")
    tracked = cProfile.Profile()
    tracked.enable()
    for k in range(8):
        step(k)
    tracked.disable()
    torch.cuda.synchronize()
    out = io.StringIO()
    pstats.Stats(tracked, stream=out).sort_stats("tottime").print_stats(22)
    print(out.getvalue())
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for k in range(4):
            step(k)
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    for row in rows[:20]:
        print(f"    {row.count / 4:>7.1f} {row.self_device_time_total / 4e3:>9.3f} ms  {row.key[:150]}")


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", choices=list(gpu_lightning.CASES), default="1B")
    parser.add_argument("--only", nargs="+", default=[], help="names of ways")
    parser.add_argument("--host", action="store_true")
    args = parser.parse_args()
    if args.host:
        host_rows()
    else:
        device_rows(args.case, args.only)


if __name__ == "__main__":
    main()
