"""Pretrain on streams over several nodes: context and tensor parallelism, requeued jobs, no shared cache.

One process:        python examples/slurm_streams.py
Two, kill one:      torchrun --nproc-per-node 2 examples/slurm_streams.py --cp 2
                    torchrun --nproc-per-node 2 examples/slurm_streams.py --tp 2        (continues)
SLURM:              sbatch examples/slurm_streams.sbatch

Started again, it continues after the last checkpoint in --out, in any layout. The files of --data must have
the same names on every node: addresses (s3://bucket/*.jsonl.gz), a shared folder, or copies in one place.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from transformers import AutoModelForCausalLM, Qwen3Config

from lightning_thd import Sequences, THDBatch, THDDataModule, THDModelParallelStrategy, causal_lm_loss
from lightning_thd.data import stdlib_documents
from lightning_thd.data.streams import Stream
from lightning_thd.precision import fastest_precision

SHARDS = 8  # files; more than data-parallel ranks, so that every rank has its own


class LanguageModel(L.LightningModule):
    """A model written for one process; the strategy shards it."""

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        sizes = {"vocab_size": 264, "hidden_size": 128, "intermediate_size": 256, "head_dim": 16}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
        config = Qwen3Config(num_hidden_layers=2, **sizes, **heads)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="thd")

    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        loss = causal_lm_loss(self.model, batch)
        self.log("train/loss", loss.detach(), sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


class PrintLoss(Callback):
    """Print the loss of every step, once for all ranks."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        if trainer.is_global_zero:
            loss = float(trainer.callback_metrics["train/loss"])
            print(f"step {trainer.global_step}: loss {loss:.5f}", flush=True)


def write_shards(folder: Path) -> str:
    """Write files of text on this node, and return their glob; every rank writes the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text}) for text in stdlib_documents(max_bytes=512)[:4_000]]
    for number in range(SHARDS):
        unfinished = folder / f"shard-{number}.{os.getpid()}"
        unfinished.write_text("\n".join(lines[number::SHARDS]) + "\n")
        unfinished.replace(folder / f"shard-{number}.jsonl")  # at once, because other ranks may read it
    return f"{folder}/shard-*.jsonl"


def processes_of_node() -> int:
    """Return how many processes torchrun or SLURM has started on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", help="a glob of .jsonl or .parquet files; text of Python's library if none")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=2, help="steps between checkpoints")
    parser.add_argument("--out", default="runs/slurm_streams", help="checkpoints; all nodes must see it")
    parser.add_argument("--scratch", default="/tmp/slurm_streams", help="written shards, on this node only")
    args = parser.parse_args()

    L.seed_everything(0, verbose=False)
    strategy = THDModelParallelStrategy(
        context_parallel_size=args.cp,
        tensor_parallel_size=args.tp,
        sequence_parallel=args.tp > 1,
    )
    keep = ModelCheckpoint(args.out, every_n_train_steps=args.every, save_last="link")
    trainer = L.Trainer(
        strategy=strategy,
        devices=processes_of_node(),
        num_nodes=args.nodes,
        accelerator="auto",
        # Lightning's ModelParallelStrategy has no 16-mixed.
        precision="bf16-mixed" if fastest_precision() == "bf16-mixed" else "32-true",
        max_steps=args.steps,
        gradient_clip_val=1.0,
        callbacks=[keep, PrintLoss()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    stream = Stream(args.data or write_shards(Path(args.scratch, "shards")))
    data = THDDataModule(stream, capacity=2_048, global_batch=Sequences(32))
    trainer.fit(LanguageModel(), data, ckpt_path="last")  # from the start if there is none


if __name__ == "__main__":
    main()
