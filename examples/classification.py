"""A sequence classifier in transformers' Trainer on packs, as run_glue trains one on padded rows.

python examples/classification.py

The task is made here: does a sentence of words name more colours or more numbers?
"""

import argparse
import random

import numpy as np
from transformers import AutoModelForSequenceClassification, BertConfig, EvalPrediction, TrainingArguments

from lightning_thd.integrations import packed_trainer
from lightning_thd.precision import fastest_precision

COLOURS, NUMBERS = ("red", "green", "blue", "black"), ("one", "two", "three", "four")
WORDS = ("[PAD]", "[CLS]", *COLOURS, *NUMBERS, "a", "the", "of", "and")


def rows(count: int, seed: int) -> list[dict]:
    """Return sentences of 3 to 40 words as ids, with the label of each."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        words = [draw.choice(WORDS[2:]) for _ in range(draw.randint(3, 40))]
        more = sum(word in COLOURS for word in words) > sum(word in NUMBERS for word in words)
        found.append({"input_ids": [1, *map(WORDS.index, words)], "label": int(more)})
    return found


def accuracy(found: EvalPrediction) -> dict[str, float]:
    """Return the share of sentences with the right label."""
    return {"accuracy": float(np.mean(found.predictions.argmax(-1) == found.label_ids))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", default="runs/classification")
    args = parser.parse_args()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    # Packed attention has no dropout.
    config = BertConfig(vocab_size=len(WORDS), num_labels=2, attention_probs_dropout_prob=0.0, **sizes)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="thd")
    trainer = packed_trainer()(
        model=model,
        args=TrainingArguments(
            args.out,
            max_steps=args.steps,
            learning_rate=1e-3,
            logging_steps=50,
            save_strategy="no",
            report_to="none",
            bf16=fastest_precision() == "bf16-mixed",
        ),
        train_dataset=rows(4_000, seed=0),
        eval_dataset=rows(500, seed=1),
        compute_metrics=accuracy,
        capacity=1_024,
    )
    trainer.train()
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
