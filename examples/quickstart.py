"""Train a small Qwen3 on packed text: Python's standard library, or your own.

python examples/quickstart.py --resume --steps 200               # continue from the last checkpoint
python examples/quickstart.py --data my.jsonl --text-key text    # or a folder of text files
python examples/quickstart.py --precision bf16-mixed --compile   # faster if the CPU multiplies bf16
"""

import argparse
import logging
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from transformers import AutoModelForCausalLM, Qwen3Config

from lightning_thd import THDBatch, THDDataModule, THDThroughputMonitor, causal_lm_loss
from lightning_thd.data import ByteTokenizer, StdlibText
from lightning_thd.parallel.fsdp import layers_of
from lightning_thd.precision import fastest_precision
from lightning_thd.report import show
from lightning_thd.report.page import number, processor


def make_model() -> torch.nn.Module:
    sizes = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 768, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": ByteTokenizer.vocab_size}
    return AutoModelForCausalLM.from_config(Qwen3Config(**sizes, **heads), attn_implementation="thd").train()


class TinyQwen3(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        loss = causal_lm_loss(self.model, batch)
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)


class OneLine(TQDMProgressBar):
    BAR_FORMAT = "{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"  # fits 80 columns

    @property
    def total_train_batches(self) -> int | float:  # the steps of the run, if the epoch has more
        done = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready - self.trainer.global_step
        return min(self.trainer.num_training_batches, done + self.trainer.max_steps)

    def on_train_start(self, *args: object) -> None:
        super().on_train_start(*args)
        self.train_progress_bar.total = self.total_train_batches  # a resumed epoch does not start again

    def get_metrics(self, *args: object) -> dict[str, str]:
        found = super().get_metrics(*args)
        shown = {key.removeprefix("train/"): number(found[key]) for key in found if key != "v_num"}
        return shown | ({"MFU": f"{found['MFU']:.1%}"} if "MFU" in found else {})


def leave_out_advice_of_other_packages() -> None:
    warnings.filterwarnings("ignore", r"`isinstance\(treespec|.*does not have many workers")
    advice = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    advice.addFilter(lambda record: "litlogger" not in record.getMessage())
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", help="a .jsonl file, a text file or a folder of text files")
    parser.add_argument("--text-key", default="text", help="the key of the text in a JSONL object")
    parser.add_argument("--steps", type=int, default=100, help="of the whole run, also if it is resumed")
    parser.add_argument("--out", default="runs/quickstart")
    parser.add_argument("--precision", default=fastest_precision(), help="the Trainer's precision")
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out")
    args = parser.parse_args()
    if args.resume and not Path(args.out, "checkpoints", "last.ckpt").exists():
        parser.error(f"--resume: {args.out}/checkpoints holds no last.ckpt; one is written every 20 steps")

    leave_out_advice_of_other_packages()
    L.seed_everything(0)
    source = args.data or StdlibText(max_bytes=2048)
    data = THDDataModule(source, capacity=8_192, text_key=args.text_key, oversize="split")
    checkpoints = ModelCheckpoint(f"{args.out}/checkpoints", every_n_train_steps=20, save_last=True)
    callbacks = [THDThroughputMonitor(peak="measure", every_n_steps=5), checkpoints, OneLine()]
    trainer = L.Trainer(
        max_steps=args.steps,
        precision=args.precision,
        enable_model_summary=False,
        callbacks=callbacks,
        logger=[TensorBoardLogger(args.out, name="tensorboard"), CSVLogger(args.out, name="csv")],
        log_every_n_steps=1,
        gradient_clip_val=1.0,
    )
    module = TinyQwen3()
    if args.compile:
        for layer in layers_of(module):
            layer.compile(dynamic=True)
    size = sum(p.numel() for p in module.parameters()) / 1e6
    print(f"{size:.1f}M parameters, {trainer.strategy.root_device}, {args.precision}, {args.steps} steps")
    trainer.fit(module, data, ckpt_path="last" if args.resume else None)
    show(args.out)
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    print(f"Peak measured on {name}.")
    print(f"Done. Next: open {args.out}/report.html, or train on your text with --data my.jsonl.")


if __name__ == "__main__":
    main()
