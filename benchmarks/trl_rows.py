"""TRL's DPO, reward and GRPO steps on the quickstart's documents: padded rows against one pack a batch.

``python -m benchmarks.trl_rows`` prints, for every trainer, real tokens a CPU second of both, taken in turns.
Its numbers are of a loaded or an idle machine alike, as CPU time is; TRL is needed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_thd.data import ByteTokenizer, StdlibText
from lightning_thd.integrations import packed_trainer

PROMPT, LONGEST = 32, 2048


def make_model(kind: str, folder: str) -> Any:
    """Build the quickstart's Qwen3 from a folder, as DPO builds its reference."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3Config

    config = Qwen3Config(
        num_hidden_layers=4,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=768,
        vocab_size=ByteTokenizer.vocab_size,
        pad_token_id=0,
        num_labels=1,
    )
    torch.manual_seed(0)
    auto = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    auto.from_config(config).save_pretrained(folder)
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def documents(count: int) -> list[list[int]]:
    """Draw documents of the quickstart, of at least a prompt."""
    data, rng = StdlibText(max_bytes=LONGEST), np.random.default_rng(0)
    rows = [
        [int(token) for token in data[int(i)]["input_ids"]] for i in rng.permutation(len(data))[: 2 * count]
    ]
    return [row for row in rows if len(row) > PROMPT][:count]


def batches(kind: str, pairs: int, steps: int) -> Iterator[dict[str, Tensor]]:
    """Yield padded batches as TRL's collators make them."""
    from trl.trainer.dpo_trainer import DataCollatorForPreference as Pairs
    from trl.trainer.reward_trainer import DataCollatorForPreference as Rewards

    rows = documents(2 * pairs * steps)
    for k in range(steps):
        part = rows[2 * pairs * k : 2 * pairs * (k + 1)]
        chosen, rejected = part[:pairs], part[pairs:]
        if kind == "reward":
            examples = [{"chosen_ids": a, "rejected_ids": b} for a, b in zip(chosen, rejected, strict=True)]
            yield Rewards(pad_token_id=0)(examples)
            continue
        examples = [
            {"prompt_ids": a[:PROMPT], "chosen_ids": a[PROMPT:], "rejected_ids": b[PROMPT:]}
            for a, b in zip(chosen, rejected, strict=True)
        ]
        yield Pairs(pad_token_id=0, max_length=None)(examples)


def step_of(kind: str, *, packed: bool) -> Callable[[dict[str, Tensor]], float]:
    """Return a function that runs a batch forward and backward, and its loss."""
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    base = {"dpo": trl.DPOTrainer, "reward": trl.RewardTrainer, "grpo": trl.GRPOTrainer}[kind]
    folder = tempfile.mkdtemp()
    args: dict[str, Any] = {"output_dir": folder, "use_cpu": True, "bf16": False, "report_to": []}
    args["gradient_checkpointing"] = False
    words = models.WordLevel({"<pad>": 0, "a": 1}, unk_token="<pad>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<pad>"
    )
    texts = {"prompt": "a", "chosen": "a a", "rejected": "a"}
    if kind == "reward":
        texts.pop("prompt")
    given: dict[str, Any] = {"reward_funcs": lambda completions, **_: [0.0] * len(completions)}
    trainer = (packed_trainer(base) if packed else base)(
        model=make_model(kind, folder),
        args=getattr(trl, base.__name__.replace("Trainer", "Config"))(**args),
        train_dataset=Dataset.from_list([texts] * 8),
        processing_class=tokenizer,
        **(given if kind == "grpo" else {}),
    )
    trainer.model.train()

    def run(batch: dict[str, Tensor]) -> float:
        if kind == "grpo":  # what a step does after it has generated
            mask, ids = batch["attention_mask"], batch["input_ids"]
            logp, *_ = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, mask, ids.shape[1] - PROMPT
            )
            loss = -(logp * mask[:, PROMPT:]).sum() / mask[:, PROMPT:].sum()
        else:
            loss = trainer.compute_loss(trainer.model, dict(batch))
        loss.backward()
        trainer.model.zero_grad()
        return float(loss.detach())

    return run


def measure(kind: str, pairs: int, steps: int) -> tuple[float, float, float, float]:
    """Return tokens a CPU second padded and packed, the padding's share, and the largest error of a loss."""
    rows, pack = step_of(kind, packed=False), step_of(kind, packed=True)
    times: dict[str, list[float]] = {"rows": [], "pack": []}
    tokens, slots, worst = 0, 0, 0.0
    for k, batch in enumerate(batches(kind, pairs, steps + 1)):
        losses = []
        for name, run in (("rows", rows), ("pack", pack)):
            start = time.process_time()
            losses.append(run(batch))
            if k:  # the first one warms up
                times[name].append(time.process_time() - start)
        worst = max(worst, abs(losses[1] - losses[0]) / abs(losses[0]))
        tokens += int(batch["attention_mask"].sum()) if k else 0
        slots += batch["attention_mask"].numel() if k else 0
    total = {name: statistics.fmean(found) * steps for name, found in times.items()}
    return tokens / total["rows"], tokens / total["pack"], 1 - tokens / slots, worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=["dpo", "reward", "grpo"])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for kind in arguments.only:
        rows, pack, padding, worst = measure(kind, arguments.pairs, arguments.steps)
        print(
            f"{kind}: {rows:,.0f} tokens a CPU second padded ({padding:.0%} padding), {pack:,.0f} packed: "
            f"{pack / rows:.2f}x; losses differ by {worst:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
