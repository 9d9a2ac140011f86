"""A padded and a packed run on the same documents -> TensorBoard's page as pictures.

``python docs/pictures/tensorboard_page.py`` trains both in a minute on two cores. It
starts TensorBoard, and takes its page with a headless Chromium, which must be on the
path.
"""
# ruff: noqa: ANN001, ANN201, ANN202, ANN204, D101, D102

import argparse
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Qwen3Config

from lightning_thd import THDDataModule, THDThroughputMonitor, causal_lm_loss

HERE = Path(__file__).parent
STEPS, CAPACITY, ROWS = 40, 4_096, 8
# One chart above the other: 400 pixels of a phone show all 600, with letters of 8.
PHONE = (600, 735)
# The cards of the page, as TensorBoard filters them.
CARDS = "packing/fill|train/loss"


def documents():
    """Return documents of 14 to 1,400 bytes, most of them short."""
    lengths = random.Random(0)
    repeats = [
        min(100, int(lengths.lognormvariate(2.2, 1.0)) + 1) for _ in range(4_000)
    ]
    return [
        {"input_ids": list(f"document {i} ".encode()) * count}
        for i, count in enumerate(repeats)
    ]


def padded(dataset):
    """Return a loader of 8 rows, padded to the longest."""

    def collate(rows):
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
        filled = pad_sequence(ids, batch_first=True)
        labels = filled.masked_fill(mask == 0, -100)
        return {"input_ids": filled, "attention_mask": mask, "labels": labels}

    return DataLoader(dataset, batch_size=ROWS, shuffle=True, collate_fn=collate)


class Module(L.LightningModule):
    def __init__(self, attention):
        super().__init__()
        sizes = {"vocab_size": 260, "hidden_size": 128, "intermediate_size": 256}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        config = Qwen3Config(num_hidden_layers=2, **sizes, **heads)
        self.model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention
        ).train()

    def training_step(self, batch, batch_idx):
        if isinstance(batch, dict):
            loss = self.model(**batch).loss
        else:
            loss = causal_lm_loss(self.model, batch)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(name, attention, data, folder):
    """Train one run, logged under its name."""
    L.seed_everything(0)
    trainer = L.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=TensorBoardLogger(folder, name="", version=name),
        callbacks=[THDThroughputMonitor(peak="measure", every_n_steps=3)],
        log_every_n_steps=3,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(attention), data)


def photograph(folder, width, height):
    """Start TensorBoard on the runs and take its page in both themes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", "."]
    board = subprocess.Popen(
        [*command, "--port", str(port), "--load_fast=false"], cwd=folder
    )
    try:
        _wait(port)
        for theme, dark in (("light", "false"), ("dark", "true")):
            page = f"http://127.0.0.1:{port}/?darkMode={dark}#scalars&_smoothingWeight=0&tagFilter={quote(CARDS)}"
            _take(page, HERE / f"tensorboard-{theme}.png", width, height)
    finally:
        board.terminate()
        board.wait()


def _wait(port, seconds=60.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with socket.socket() as asked:
            if asked.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise TimeoutError(f"TensorBoard did not answer within {seconds:.0f} s.")


def _take(page, file, width, height):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise FileNotFoundError("No chromium is on the path: apt-get install chromium.")
    subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--window-size={width},{height}",
            "--force-device-scale-factor=1.5",  # sharp on phones and dense screens
            "--virtual-time-budget=20000",
            f"--screenshot={file}",
            page,
        ],
        check=True,
        capture_output=True,
        timeout=180,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, nargs=2, default=PHONE)
    parser.add_argument("--runs", help="keep the runs here, or show those that are")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as passing:
        folder = args.runs or passing
        if not list(Path(folder).rglob("*.tfevents.*")):
            dataset = documents()
            train("padded", "sdpa", padded(dataset), folder)
            train("packed", "thd", THDDataModule(dataset, capacity=CAPACITY), folder)
        photograph(folder, *args.size)


if __name__ == "__main__":
    main()
