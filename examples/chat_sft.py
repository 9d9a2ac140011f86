"""Fine-tune on conversations: no conversation sees another, and the loss counts the assistant's words.

python examples/chat_sft.py                     # questions about Python's own functions
python examples/chat_sft.py --data chats.jsonl  # lines of {"messages": [{"role": ..., "content": ...}, ...]}

Any tokenizer with a chat template works: tokenizer="the name of an instruction-tuned model". This script
trains a small tokenizer, so that nothing has to be downloaded.
"""

import argparse
import ast

import lightning as L
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from lightning_thd import THDDataModule, THDThroughputMonitor
from lightning_thd.data import stdlib_documents
from lightning_thd.module import CausalLMModule
from lightning_thd.precision import fastest_precision

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make_chats() -> list[dict[str, list[dict[str, str]]]]:
    """Make one conversation for every function of the standard library that has a docstring."""
    chats = []
    for source in stdlib_documents():
        node = ast.parse(source.lstrip()).body[0] if source.startswith("def ") else None
        if isinstance(node, ast.FunctionDef) and (answer := ast.get_docstring(node)):
            turns = {"user": f"What does {node.name} do?", "assistant": answer.split("\n\n")[0]}
            chats.append({"messages": [{"role": r, "content": text} for r, text in turns.items()]})
    return chats


def make_tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), ByteLevel()
    special = ["<|start|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2048, special_tokens=special, initial_alphabet=alphabet)
    bpe.train_from_iterator(stdlib_documents(max_bytes=512), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", help="a .jsonl file with messages, or prompt and completion")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()

    L.seed_everything(0)
    tokenizer = make_tokenizer()
    data = THDDataModule(args.data or make_chats(), tokenizer=tokenizer, capacity=2_048, oversize="drop")
    module = CausalLMModule(
        config={
            "model_type": "qwen3",
            "vocab_size": len(tokenizer),
            "num_hidden_layers": 2,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
        },
        lr=3e-3,
    )
    monitor = THDThroughputMonitor(peak="measure", every_n_steps=5)
    precision = fastest_precision()  # bf16-mixed on a GPU that has it
    trainer = L.Trainer(max_steps=args.steps, precision=precision, callbacks=[monitor], log_every_n_steps=5)
    trainer.fit(module, data)

    batch = next(iter(data.train_dataloader()))
    share = f"{batch.loss_tokens} of {sum(batch.lengths)} tokens learned"
    print(f"{len(batch.lengths)} conversations in a pack, {share}")
    ids, targets = batch.unpack(batch.input_ids)[0], batch.unpack(batch.targets)[0]
    print("all of the first: ", repr(tokenizer.decode(ids)))
    print("what is learned: ", repr(tokenizer.decode(targets[targets >= 0])))


if __name__ == "__main__":
    main()
