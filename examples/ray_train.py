"""Train on packs under Ray Train: steps of exactly 16 sequences, on any number of workers.

python examples/ray_train.py --workers 2             # run it again to continue from the last checkpoint
python examples/ray_train.py --workers 8 --least 4   # on 4 to 8 workers, as many as there are
python examples/ray_train.py --ray-data              # Ray Data reads; a restarted job reads from the start
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import ray
import ray.data
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_checkpoint, get_dataset_shard
from ray.train.lightning import (
    RayDDPStrategy,
    RayLightningEnvironment,
    RayTrainReportCallback,
    prepare_trainer,
)
from ray.train.torch import TorchTrainer

from lightning_thd import Sequences, THDDataModule, THDStrategyMixin, THDThroughputMonitor
from lightning_thd.module import CausalLMModule

MODEL = {"model_type": "qwen3", "vocab_size": 260, "hidden_size": 32, "intermediate_size": 64}
MODEL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


class PackedRay(THDStrategyMixin, RayDDPStrategy):
    """Runs the microbatches of a step on Ray's workers."""


class ReportEvery(RayTrainReportCallback):
    """Reports metrics and a checkpoint every n steps; Ray's own callback does so once an epoch."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: object) -> None:
        if trainer.global_step % self.steps == 0:
            super().on_train_epoch_end(trainer, module)

    def on_train_epoch_end(self, *_: object) -> None:
        pass


def rows_of_ray(part: int, parts: int) -> Iterator[dict]:
    """Read this worker's shard of a Ray dataset: as many parts as there are workers."""
    for row in get_dataset_shard("train").iter_rows():
        yield {"input_ids": row["input_ids"]}


def train_on_a_worker(given: dict) -> None:
    data = THDDataModule(given["rows"] or rows_of_ray, capacity=1_024, global_batch=Sequences(16))
    trainer = L.Trainer(
        max_steps=given["steps"],
        strategy=PackedRay(),
        plugins=[RayLightningEnvironment()],
        callbacks=[THDThroughputMonitor(peak="measure", every_n_steps=2), ReportEvery(2)],
        enable_checkpointing=False,  # Ray keeps the checkpoints
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        log_every_n_steps=1,
    )
    last = get_checkpoint()
    module = CausalLMModule(config=MODEL, lr=1e-3)
    path = None if last is None else Path(last.path, ReportEvery.CHECKPOINT_NAME)
    prepare_trainer(trainer).fit(module, data, ckpt_path=path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--least", type=int, help="the fewest workers on which to train")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ray-data", action="store_true", help="read by Ray Data")
    parser.add_argument("--out", default="runs/ray", help="a second run continues from the checkpoint here")
    args = parser.parse_args()
    ray.init(num_cpus=args.workers + 1, include_dashboard=False)  # in a cluster: ray.init()
    texts = [f"document {i} " * (1 + i % 20) for i in range(400)]
    rows = [{"input_ids": list(text.encode())} for text in texts]
    trainer = TorchTrainer(
        train_on_a_worker,
        train_loop_config={"steps": args.steps, "rows": None if args.ray_data else rows},
        datasets={"train": ray.data.from_items(rows)} if args.ray_data else None,
        scaling_config=ScalingConfig(
            num_workers=(args.least, args.workers) if args.least else args.workers,
            use_gpu=torch.cuda.is_available(),
        ),
        run_config=RunConfig(
            name="packed",
            storage_path=str(Path(args.out).resolve()),
            failure_config=FailureConfig(max_failures=2),
        ),
    )
    found = trainer.fit()
    print(
        f"Done: step {found.metrics['step']}, loss {found.metrics['train/loss']:.3f}, {found.checkpoint.path}"
    )


if __name__ == "__main__":
    main()
