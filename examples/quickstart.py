"""Train a small Qwen3 on packed text: Python's standard library, or your own.

python examples/quickstart.py --resume --steps 200               # go on from the last checkpoint
python examples/quickstart.py --data my.jsonl --text-key text    # or a folder of text files
python examples/quickstart.py --precision bf16-mixed --compile   # twice as fast where the CPU has bf16
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
from lightning_thd.callbacks import CompileLayers
from lightning_thd.data import ByteTokenizer, StdlibText
from lightning_thd.precision import fastest_precision
from lightning_thd.report import show
from lightning_thd.report.page import number


def make_model() -> torch.nn.Module:
    sizes = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 768, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(**sizes, **heads, vocab_size=ByteTokenizer.vocab_size)
    return AutoModelForCausalLM.from_config(config, attn_implementation="thd").train()


class TinyQwen3(L.LightningModule):
    def configure_model(self) -> None:
        self.model = make_model()

    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        loss = causal_lm_loss(self.model, batch)
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)


class OneLine(TQDMProgressBar):
    BAR_FORMAT = "{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"  # fits 80 columns

    def get_metrics(self, *args: object) -> dict[str, str]:
        found = super().get_metrics(*args)
        return {key.removeprefix("train/"): number(found[key]) for key in found if key != "v_num"}


def leave_out_advice_of_other_packages() -> None:
    warnings.filterwarnings("ignore", r"`isinstance\(treespec|.*does not have many workers")
    tips = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    tips.addFilter(lambda record: "litlogger" not in record.getMessage())
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", help="a .jsonl file, a text file or a folder of text files")
    parser.add_argument("--text-key", default="text", help="the key of the text in a JSONL object")
    parser.add_argument("--steps", type=int, default=100, help="of the whole run, a resumed one included")
    parser.add_argument("--out", default="runs/quickstart")
    parser.add_argument("--precision", default=fastest_precision(), help="that of the Trainer")
    parser.add_argument("--compile", action="store_true", help="compile the layers after 4 steps")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    args = parser.parse_args()
    if args.resume and not Path(args.out, "checkpoints", "last.ckpt").exists():
        parser.error(f"--resume: {args.out}/checkpoints holds no last.ckpt; one is written every 20 steps")

    leave_out_advice_of_other_packages()
    L.seed_everything(0)
    source = args.data or StdlibText(max_bytes=2048)
    data = THDDataModule(source, capacity=8_192, text_key=args.text_key, oversize="split")
    checkpoints = ModelCheckpoint(f"{args.out}/checkpoints", every_n_train_steps=20, save_last=True)
    callbacks = [THDThroughputMonitor(peak="measure", every_n_steps=5), checkpoints, OneLine()]
    callbacks += [CompileLayers(report=print)] if args.compile else []
    trainer = L.Trainer(
        max_steps=args.steps,
        precision=args.precision,
        max_epochs=1_000,
        enable_model_summary=False,
        callbacks=callbacks,
        logger=[TensorBoardLogger(args.out, name="tensorboard"), CSVLogger(args.out, name="csv")],
        log_every_n_steps=1,
        gradient_clip_val=1.0,
    )
    trainer.fit(TinyQwen3(), data, ckpt_path="last" if args.resume else None)
    show(args.out)


if __name__ == "__main__":
    main()
