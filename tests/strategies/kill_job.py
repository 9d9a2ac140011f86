"""A job of four ranks to be killed: python -m tests.strategies.kill_job OUT, under torchrun."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_thd import Sequences, THDBatch, THDDataModule
from lightning_thd.strategies import THDModelParallelStrategy
from tests.strategies.jobs import Job, data, full_parameters
from tests.strategies.test_prefix_layouts import BATCH, CAPACITY, rows
from tests.tiny import quiet_trainer

STEPS = 12
FAMILY = "qwen3@4t"  # of pipelines


class Slow(Job):
    """A job that writes down the step it is about to run, and ends at one where it is told to."""

    ledger: Path | None = None

    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        if self.ledger is not None:
            with self.ledger.open("a") as lines:
                ids = ",".join(map(str, batch.sequence_ids))
                lines.write(f"{os.getpid()} {self.global_step} {ids}\n")
        first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if f"{os.environ.get('RANK')}:{self.global_step}" == os.environ.get("KILL_AT") and first_start:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def main() -> None:
    """Train on dp x cp x pp ranks, and resume if there is a checkpoint; save the final weights."""
    out = Path(sys.argv[1])
    dp, cp, *more = map(int, sys.argv[2:])
    pp = more[0] if more else 1
    most_ranks = int(os.environ.get("MOST_RANKS", "0"))  # that share a sequence, under dynamic degrees
    is_killed = "KILL_AT" in os.environ
    rank = os.environ.get("RANK", "0")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    module = Slow(FAMILY if pp > 1 else "qwen3")
    module.ledger = out / f"ledger-{rank}.txt"
    trainer = quiet_trainer(
        strategy=THDModelParallelStrategy(
            context_parallel_size="dynamic" if most_ranks else cp,
            max_context_parallel_size=most_ranks or None,
            pipeline_parallel_size=pp,
            timeout=timedelta(seconds=120 if is_killed else 20),
            asynchronous_checkpoints=is_killed,
        ),
        max_steps=STEPS,
        devices=dp * cp * pp,
        gradient_clip_val=0.5,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(out / "checkpoints", every_n_train_steps=2, save_last=True)],
    )
    module_data = data(Sequences(12))
    if "SHARE_PREFIXES" in os.environ:
        module_data = THDDataModule(rows(), capacity=CAPACITY, global_batch=BATCH, share_prefixes=True)
    resumes = (out / "checkpoints" / "last.ckpt").exists()
    trainer.fit(module, module_data, ckpt_path="last" if resumes else None)

    parameters = full_parameters(module.model)
    if pp > 1:  # every stage has layers of its own
        torch.save(parameters, out / f"final-{rank}.pt")
    elif rank == "0":
        torch.save(parameters, out / "final.pt")


if __name__ == "__main__":
    main()
