"""A training job that writes down what it uses, to be killed.

``python -m tests.chaos_job OUT RANKS NAME [WORKERS [FAULT]]``; a fault is ``disk:STEP``, from which on no
file may grow beyond 20 kB, or ``clock``, which jumps by days.
"""

from __future__ import annotations

import os
import random
import resource
import sys
import time
import warnings
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_thd import Sequences, THDBatch, THDDataModule
from lightning_thd.data.streams import Stream
from tests.tiny import TinyModule, quiet_trainer, sequences

SEQUENCES = 120
PER_STEP = 6
CAPACITY = 48


class Ledger(TinyModule):
    """Appends a line for every microbatch: its step and its sequences."""

    def __init__(self, file: Path | None = None, disk_full_from: int | None = None) -> None:
        super().__init__()
        self.file = file
        self.disk_full_from = disk_full_from

    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        if self.disk_full_from is not None and self.global_step >= self.disk_full_from:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        if self.file is not None:
            with self.file.open("a") as ledger:
                ledger.write(f"{self.global_step} {' '.join(map(str, batch.sequence_ids))}\n")
        return super().training_step(batch, batch_idx)


def train(module: TinyModule, out: Path, ranks: int, *, num_workers: int) -> None:
    """Train one epoch, from the last checkpoint in ``out`` if there is one."""
    trainer = quiet_trainer(
        max_epochs=1,
        devices=ranks,
        strategy="thd_ddp" if ranks > 1 else "thd",
        enable_checkpointing=True,
        gradient_clip_val=0.5,
        callbacks=[ModelCheckpoint(out / "checkpoints", every_n_train_steps=2, save_last=True)],
    )

    stream = Stream(f"{out}/*.jsonl", window=6, shuffle_buffer=12)
    data = THDDataModule(
        stream if any(out.glob("*.jsonl")) else sequences(SEQUENCES, labels=True),
        capacity=CAPACITY,
        global_batch=Sequences(PER_STEP),
        num_workers=num_workers,
    )

    resume = (out / "checkpoints" / "last.ckpt").exists()
    trainer.fit(module, data, ckpt_path="last" if resume else None)


def jumping_clock() -> None:
    """Let ``time.time`` be wrong by a day either way, at random, from now on."""
    right = time.time
    rng = random.Random(0)
    time.time = lambda: right() + rng.choice([-86_400, 0, 86_400])


def main() -> None:
    out = Path(sys.argv[1])
    ranks = int(sys.argv[2])
    name = sys.argv[3]
    workers = int(sys.argv[4]) if len(sys.argv) > 4 else 2
    fault, _, step = (sys.argv[5] if len(sys.argv) > 5 else "").partition(":")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if fault == "clock":
        jumping_clock()
    rank = os.environ.get("RANK", "0")
    module = Ledger(out / f"ledger-{name}-{rank}.txt", int(step) if fault == "disk" else None)
    train(module, out, ranks, num_workers=workers)

    if rank == "0":
        torch.save({n: p.detach() for n, p in module.model.named_parameters()}, out / "final.tmp")
        (out / "final.tmp").rename(out / "final.pt")


if __name__ == "__main__":
    main()
