"""Hugging Face's Trainer on packs. Run it with python examples/hf_trainer.py or torchrun."""

import argparse

from quickstart import make_model
from transformers import TrainingArguments

from lightning_thd.data import StdlibText
from lightning_thd.integrations import packed_trainer
from lightning_thd.precision import fastest_precision


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=100, help="100 take three to five minutes on two CPU cores"
    )
    parser.add_argument("--out", default="runs/hf_trainer")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    documents = StdlibText(max_bytes=2048)
    precision = fastest_precision()  # bf16-mixed on a GPU that has it
    trainer = packed_trainer()(
        model=make_model(),
        args=TrainingArguments(
            output_dir=args.out,
            max_steps=args.steps,
            learning_rate=2e-3,
            logging_steps=5,
            save_steps=20,
            report_to=["tensorboard"],
            bf16=precision == "bf16-mixed",
            fp16=precision == "16-mixed",
        ),
        train_dataset=documents,
        capacity=8_192,
        peak="measure",
    )
    trainer.train(resume_from_checkpoint=args.resume)


if __name__ == "__main__":
    main()
