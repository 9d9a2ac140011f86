"""A job that trains on a stream and writes down what it uses, to be killed: see ``tests.chaos``."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_thd import Sequences, THDDataModule
from lightning_thd.data.streams import Stream
from tests.chaos_job import CAPACITY, PER_STEP, Ledger
from tests.tiny import quiet_trainer


def main() -> None:
    out, ranks, name, workers = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    module = Ledger(out / f"ledger-{name}-{os.environ.get('RANK', '0')}.txt")
    trainer = quiet_trainer(
        max_epochs=1,
        devices=ranks,
        strategy="thd_ddp" if ranks > 1 else "thd",
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(out / "checkpoints", every_n_train_steps=2, save_last=True)],
    )
    data = THDDataModule(
        Stream(source=f"{out}/*.jsonl", window=6, shuffle_buffer=12),
        capacity=CAPACITY,
        global_batch=Sequences(PER_STEP),
        num_workers=workers,
    )
    resume = (out / "checkpoints" / "last.ckpt").exists()
    trainer.fit(module, data, ckpt_path="last" if resume else None)


if __name__ == "__main__":
    main()
