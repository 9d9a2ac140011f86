"""Bytes that ranks send for a token, with tokens sent to experts and with all experts brought to tokens.

``python -m benchmarks.expert_bytes`` trains a Qwen3-MoE (hidden 256, 2 layers, 128 experts of 96, 8 for each
token, vocabulary 260, fp32) for two steps on 2 gloo ranks. Three layouts hold half of the experts' weights on
each rank: ``expert_parallel_size=2`` sends tokens to their experts, FSDP2 over 2 ranks gathers the weights,
and ``tensor_parallel_size=2`` runs all tokens on both ranks, each with its half of the experts, and adds up
the outputs. Collectives are counted, not timed: what all ranks send in the second step with ring algorithms,
divided by the tokens of the step. Weights that are gathered cost the less for each token, the more tokens a
rank has. The 512 tokens of a rank are to the experts' weights what 4,096 tokens are to Qwen3-30B-A3B's.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections import Counter
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.results import faster
from lightning_thd import Packs, THDBatch, THDDataModule, causal_lm_loss
from lightning_thd.strategies import THDModelParallelStrategy
from tests.ranks import run_ranks

TOKENS = 512  # of a rank in a step; of both together under tensor parallelism
OURS = "tokens sent to experts"
LAYOUTS: dict[str, dict[str, Any]] = {
    OURS: {"expert_parallel_size": 2},
    "weights gathered by FSDP2": {},
    "whole experts on tensor ranks": {"tensor_parallel_size": 2},
}
# How many times as many bytes the other layouts are to send. On 2 ranks a sum over tensor ranks moves each
# token once, and 8 chosen experts of a token are 4 rows to the other rank: at most twice as many bytes.
GOALS = {"weights gathered by FSDP2": 1.0, "whole experts on tensor ranks": 0.5}
CONFIG = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 96,
    "vocab_size": 260,
    "experts_implementation": "eager",
}


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends in collectives, by operator, with ring algorithms."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        if space.startswith(("c10d", "_c10d_functional")) and "wait" not in name:
            self.bytes[name.strip("_")] += sent_by(name, args, found)
        return found


def sizes_of(value: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in lists of any depth."""
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(sizes_of, value)) if isinstance(value, list | tuple) else 0


def sent_by(name: str, args: tuple[Any, ...], found: Any) -> int:
    """Return the bytes that one of two ranks sends in a collective; 0 for one of other kinds."""
    if "all_to_all" in name or "alltoall" in name:
        rows, splits = args_of_exchange(name, args)
        own = splits[dist.get_rank()]
        return rows.nbytes * (sum(splits) - own) // max(1, sum(splits))
    if "allgather" in name or "all_gather" in name:
        inputs = args[1] if name.startswith(("_allgather", "allgather")) else args[0]
        return sizes_of(inputs)  # to the other rank
    if "reduce_scatter" in name:
        inputs = args[1] if name.startswith(("_reduce_scatter", "reduce_scatter_")) else args[0]
        return sizes_of(inputs) // 2
    if "allreduce" in name or "all_reduce" in name:
        return sizes_of(args[0])  # half of it in each of two passes
    return 0


def args_of_exchange(name: str, args: tuple[Any, ...]) -> tuple[Tensor, list[int]]:
    """Return the rows that an all-to-all sends, and how many go to each rank."""
    if name.startswith("alltoall_base"):
        rows, splits = args[1], args[4]
    else:  # all_to_all_single(input, output_split_sizes, input_split_sizes, group)
        rows, splits = args[0], args[2]
    ranks = dist.get_world_size()
    return rows, list(splits) or [len(rows) // ranks] * ranks


class Module(L.LightningModule):
    """Trains the model, and keeps what the second step sends."""

    def __init__(self, sent: Sent) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = Qwen3MoeConfig(**CONFIG)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="thd")
        self.sent = sent

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Count from here."""
        self.sent.bytes.clear()

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        """Return the loss."""
        return causal_lm_loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer without states."""
        return torch.optim.SGD(self.model.parameters(), lr=1e-3)


def count(layouts: dict[str, dict[str, Any]], tokens: int) -> dict[str, dict[str, int]]:
    """Return what this rank sends in the second step of every layout, by operator."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found = {}
    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(0, 260, tokens // 8)} for _ in range(64)]
    for name, options in layouts.items():
        strategy = THDModelParallelStrategy(**options)
        ranks = 1 if "tensor_parallel_size" in options else 2
        data = THDDataModule(rows, capacity=tokens, global_batch=Packs(ranks))
        quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(
            accelerator="cpu", devices=2, strategy=strategy, max_steps=2, enable_model_summary=False, **quiet
        )
        with Sent() as sent:
            trainer.fit(Module(sent), data)
            found[name] = dict(sent.bytes)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    given = parser.parse_args(argv)
    ranks = run_ranks(count, 2, LAYOUTS, given.tokens, timeout_s=900.0)
    totals = {}
    print(f"{'layout':<32}{'bytes a token':>14}  by operator")
    for name, options in LAYOUTS.items():
        of_step = given.tokens * (1 if "tensor_parallel_size" in options else 2)
        by_operator = sum((Counter(rank[name]) for rank in ranks), Counter[str]())
        totals[name] = by_operator.total() / of_step
        parts = ", ".join(f"{what} {size / of_step:,.0f}" for what, size in by_operator.most_common() if size)
        print(f"{name:<32}{totals[name]:>14,.0f}  {parts}")
    ours = totals[OURS]
    for name, goal in GOALS.items():
        what = f"{OURS} / {name}: bytes that 2 ranks send for a token, by count"
        faster(what, ours, totals[name], "bytes", goal, precision="fp32")


if __name__ == "__main__":
    main()
