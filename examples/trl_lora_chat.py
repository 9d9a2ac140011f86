"""TRL's SFTTrainer with LoRA on packs of chats: which tokens are learned, evaluation, resuming.

python examples/trl_lora_chat.py                      # questions about Python's own functions
python examples/trl_lora_chat.py --data chats.jsonl   # lines of {"messages": [{"role": ..., "content": ...}]}
python examples/trl_lora_chat.py --resume --steps 60  # continues from the last checkpoint

With a model of your own, call AutoModelForCausalLM.from_pretrained(name, attn_implementation="thd").
"""

import argparse
import json
from pathlib import Path

from chat_sft import make_chats, make_tokenizer
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
from trl import SFTConfig, SFTTrainer

from lightning_thd.integrations import packed_trainer
from lightning_thd.precision import fastest_precision


def write_chats(folder: Path) -> tuple[Path, Path]:
    """Write conversations to train on, and some to evaluate on."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(chat) + "\n" for chat in make_chats()]
    train, held_out = folder / "train.jsonl", folder / "eval.jsonl"
    train.write_text("".join(lines[50:]))
    held_out.write_text("".join(lines[:50]))
    return train, held_out


def make_model(tokenizer: PreTrainedTokenizerFast) -> AutoModelForCausalLM:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads)
    return AutoModelForCausalLM.from_config(config, attn_implementation="thd")


def show_learned(row: dict[str, list[int]], tokenizer: PreTrainedTokenizerFast) -> None:
    """Print a conversation, and the part of it that the loss counts."""
    learned = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label >= 0]
    print("all:    ", repr(tokenizer.decode(row["input_ids"])))
    print("learned:", repr(tokenizer.decode(learned)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", help="a .jsonl file with messages; a few of its chats are not held out")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", default="runs/trl_lora_chat")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    tokenizer = make_tokenizer()
    train, held_out = write_chats(Path(args.out))
    trainer = packed_trainer(SFTTrainer)(
        model=make_model(tokenizer),
        args=SFTConfig(
            output_dir=args.out,
            max_steps=args.steps,
            max_length=None,  # TRL would cut at 1,024 tokens; here capacity and oversize decide
            learning_rate=1e-3,
            logging_steps=5,
            save_steps=10,
            bf16=fastest_precision() == "bf16-mixed",
            report_to=["tensorboard"],
        ),
        train_dataset=args.data or str(train),
        eval_dataset=str(held_out),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
        capacity=2_048,
        peak="measure",
        data_kwargs={"oversize": "drop"},
    )
    show_learned(trainer.train_dataset[0], tokenizer)
    trainer.train(resume_from_checkpoint=args.resume)
    print(f"eval_loss {trainer.evaluate()['eval_loss']:.3f}")
    trainer.save_model(f"{args.out}/adapters")  # a few MB: only the adapters


if __name__ == "__main__":
    main()
