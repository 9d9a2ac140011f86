"""What the throughput monitor costs the host per microbatch of 512 sequences, beside Lightning's own.

Both callbacks run inside the same real ``Trainer.fit`` of a model that does nothing, and every hook of theirs
is timed, logging included. ``python -m benchmarks.throughput_overhead``, about a minute on one core.
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from benchmarks.results import less
from lightning_thd.batch import THDBatch
from lightning_thd.callbacks import THDThroughputMonitor
from lightning_thd.flops import FlopsModel, SeqStats

SEQUENCES, STEPS, INTERVAL = 512, 600, 50
GOAL_US = {
    "ours, no window": 15.0,
    "ours, windows counted by the collator": 15.0,
    "ours, windows counted by the monitor": 20.0,
}
CONFIG = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 512,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2,
}
READS = ("_local_scalar_dense", "item", "is_nonzero", "equal")


class Batches(Dataset[THDBatch]):
    """The same lengths over and over; windows counted by the collator if it is told to."""

    def __init__(self, lengths: np.ndarray, windows: tuple[Any, ...] | None) -> None:
        batch = THDBatch.collate([{"input_ids": [1] * int(length)} for length in lengths])
        if windows is not None:
            batch = batch.replace(stats=SeqStats.from_lengths(lengths, windows=windows))
        self.batch = batch

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> THDBatch:
        return self.batch


class Nothing(L.LightningModule):
    """One parameter and no work, so that nothing hides in its shadow."""

    def __init__(self, flops: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.flops_per_batch = flops

    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        """No work."""
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """No change."""
        return torch.optim.SGD(self.parameters(), 0.0)


class Spy(TorchDispatchMode):
    """Counts operators and those that read the device."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        self.reads += any(name in str(func) for name in READS)
        return func(*args, **(kwargs or {}))


def hooks(callback: L.Callback, *, spy: bool) -> dict[str, Any]:
    """Time, or watch, every call of the two hooks a step has."""
    seen: dict[str, Any] = {"ns": [], "operators": [], "reads": []}
    for name in ("on_train_batch_start", "on_train_batch_end"):
        original = getattr(callback, name)

        def timed(*args: Any, original: Any = original) -> None:
            start = time.thread_time_ns()
            original(*args)
            seen["ns"].append(time.thread_time_ns() - start)

        def watched(*args: Any, original: Any = original) -> None:
            with Spy() as watch:
                original(*args)
            seen["operators"].append(watch.operators)
            seen["reads"].append(watch.reads)

        setattr(callback, name, watched if spy else timed)
    return seen


def fit(callback: L.Callback, data: Batches, flops: int, *, log: bool = True) -> None:
    """Run ``STEPS`` steps, with a CSV logger or none."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            callbacks=[callback],
            logger=CSVLogger(folder) if log else False,
            log_every_n_steps=INTERVAL,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            use_distributed_sampler=False,
        )
        trainer.fit(Nothing(flops), DataLoader(data, batch_size=None))


def ours(model: FlopsModel) -> THDThroughputMonitor:
    """The monitor as a user has it, with a peak."""
    return THDThroughputMonitor(peak=1e12, flops_model=model)


def lightnings() -> ThroughputMonitor:
    """Lightning's, with what it needs to count tokens."""
    return ThroughputMonitor(
        batch_size_fn=lambda batch: len(batch.lengths),
        length_fn=lambda batch: batch.input_ids.numel(),
        window_size=INTERVAL,
    )


class Idle(L.Callback):
    """Hooks that do nothing: what timing them costs is taken off."""


def per_step_us(make: Any, data: Batches, flops: int, *, log: bool) -> tuple[float, float]:
    """CPU microseconds of the two hooks together: (a step with its share of the reduction, one without).

    Medians over the steps that reduce and those that do not, after the first interval: on a shared machine a
    mean measures the neighbours.
    """
    steady = {}
    for name, callback in (("idle", Idle()), ("watched", make())):
        seen = hooks(callback, spy=False)
        fit(callback, data, flops, log=log)
        both = np.array(seen["ns"], dtype=float).reshape(-1, 2).sum(axis=1) / 1e3
        steady[name] = both[INTERVAL:]  # the first interval resolves what is counted
    timing = float(np.median(steady["idle"]))
    reduces = np.arange(1, len(steady["watched"]) + 1) % INTERVAL == 0
    plain = float(np.median(steady["watched"][~reduces])) - timing
    reducing = float(np.median(steady["watched"][reduces])) - timing
    return plain + (reducing - plain) / INTERVAL, plain


def reads_between_logs(make: Any, data: Batches, flops: int) -> int:
    """Operators that read the device in the steps that do not log."""
    callback = make()
    seen = hooks(callback, spy=True)
    fit(callback, data, flops)
    return sum(reads for call, reads in enumerate(seen["reads"]) if (call // 2 + 1) % INTERVAL)


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    lengths = np.random.default_rng(0).integers(1, 64, SEQUENCES)
    windowed = FlopsModel.from_config(CONFIG)
    plain = FlopsModel.from_config(
        {**CONFIG, "model_type": "llama", "layer_types": None, "sliding_window": None}
    )
    flops = plain.training_flops(SeqStats.from_lengths(lengths)).model
    cases: list[tuple[str, Any, tuple[Any, ...] | None]] = [
        ("ours, no window", lambda: ours(plain), None),
        ("ours, windows counted by the collator", lambda: ours(windowed), windowed.windows),
        ("ours, windows counted by the monitor", lambda: ours(windowed), None),
        ("Lightning's ThroughputMonitor", lightnings, None),
    ]
    print(f"{SEQUENCES} sequences a microbatch, {STEPS} steps, an interval of {INTERVAL}, one core; CPU us")
    print(f"{'':<40}{'counting':>10}{'+ CSV log':>10}{'no log':>8}{'reads':>7}{'goal':>6}")
    counting = {}
    for name, make, windows in cases:
        data = Batches(lengths, windows)
        counting[name], between = per_step_us(make, data, flops, log=False)
        logged, _ = per_step_us(make, data, flops, log=True)
        reads = reads_between_logs(make, data, flops)
        goal = f"{GOAL_US[name]:.0f}" if name in GOAL_US else ""
        print(f"{name:<40}{counting[name]:>10.1f}{logged:>10.1f}{between:>8.1f}{reads:>7}{goal:>6}")
    peer = counting["Lightning's ThroughputMonitor"]
    for name, cost in counting.items():
        if name in GOAL_US:
            met = "met" if cost <= GOAL_US[name] else "missed"
            print(f"{name}: {cost / peer:.2f} x Lightning's, goal {met}")
            less(f"CPU a microbatch, {name}", cost, "us", GOAL_US[name], peer=peer)
    print("counting: a step and its share of an interval's reduction; no log: a step between two of them")
    for kind, given in (("list", lengths.tolist()), ("array", lengths)):
        start = time.perf_counter()
        for _ in range(2000):
            SeqStats.from_lengths(given)
        print(f"SeqStats.from_lengths of a {kind}: {(time.perf_counter() - start) / 2000 * 1e6:.1f} us")


if __name__ == "__main__":
    main()
