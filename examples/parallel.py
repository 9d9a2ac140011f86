"""Pretrain a small Qwen3 on Python's own source with data, context and tensor parallelism.

One process:        python examples/parallel.py
Four on one node:   torchrun --nproc-per-node 4 examples/parallel.py --cp 2            (dp 2 x cp 2)
                    torchrun --nproc-per-node 4 examples/parallel.py --cp 2 --tp 2     (cp 2 x tp 2)
                    torchrun --nproc-per-node 4 examples/parallel.py --tp 2            (dp 2 x tp 2)
Two nodes of two:   torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
                        examples/parallel.py --nodes 2 --cp 2                           (on each node)
SLURM:              #SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8
                    srun python examples/parallel.py --nodes 2 --cp 4 --tp 2
"""

from __future__ import annotations

import argparse
import os

import lightning.pytorch as L
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from lightning_thd import Sequences, THDBatch, THDDataModule, causal_lm_loss
from lightning_thd.data import StdlibText
from lightning_thd.precision import fastest_precision
from lightning_thd.strategies import THDModelParallelStrategy


class LanguageModel(L.LightningModule):
    """A model written for one process; the strategy shards it."""

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        config = Qwen3Config(
            vocab_size=264,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=16,
        )
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="thd")

    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        loss = causal_lm_loss(self.model, batch)
        self.log("train/loss", loss.detach(), sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    L.seed_everything(0, verbose=False)
    processes = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or "1"
    trainer = L.Trainer(
        strategy=THDModelParallelStrategy(
            context_parallel_size=args.cp,
            tensor_parallel_size=args.tp,
            sequence_parallel=args.tp > 1,
        ),
        devices=int(processes),
        num_nodes=args.nodes,
        accelerator="auto",
        # Lightning's ModelParallelStrategy has no 16-mixed.
        precision="bf16-mixed" if fastest_precision() == "bf16-mixed" else "32-true",
        max_steps=args.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = THDDataModule(StdlibText(max_bytes=512), capacity=2_048, global_batch=Sequences(32))
    trainer.fit(LanguageModel(), data)
    if trainer.is_global_zero:
        loss, sizes = float(trainer.callback_metrics["train/loss"]), trainer.strategy.sizes
        axes = f"dp {sizes.data} x cp {sizes.context} x tp {sizes.tensor}"
        print(f"{axes}: step {trainer.global_step}, loss {loss:.4f}")


if __name__ == "__main__":
    main()
