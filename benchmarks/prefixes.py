"""Groups of answers to one prompt, with shared prefixes and without: time, memory, and the bound.

``python -m benchmarks.prefixes`` runs Qwen3 (hidden 256, 4 layers, heads of 64, vocabulary 260, fp32) forward
and backward over groups of 2, 8 and 16 answers. A prompt is 1/4 to 16 times as long as an answer. Times are
CPU seconds, the collation included; ``--quick`` runs only the groups with a goal. Memory is what autograd
keeps between forward and backward. The bound is that of the FLOPs counted for distinct tokens and pairs.
``--trl`` adds the padded log-probabilities of TRL's GRPO.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.results import faster, less
from lightning_thd import FlopsModel, THDBatch, causal_lm_loss

VOCABULARY = 260
# (group, prompt, answer): times as fast as without, share of the memory. The last shares nothing.
GOALS = {(8, 1024, 128): (3.0, 1 / 3), (2, 512, 512): (1.3, None), (1, 0, 1152): (0.97, None)}
FURTHER = [(g, p, a) for g in (2, 8, 16) for p, a in ((128, 512), (256, 256), (512, 128), (1024, 64))]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, head_dim=64,
        intermediate_size=768, vocab_size=VOCABULARY,
    )  # fmt: skip
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="thd")
    return model


def group(size: int, prompt: int, answer: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return the answers to one prompt, learned only; a group of one is eight strangers."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCABULARY, prompt)
    rows = [np.concatenate([shared, rng.integers(0, VOCABULARY, answer)]) for _ in range(max(size, 2))]
    if size == 1:
        rows = [np.concatenate([[i], rng.integers(0, VOCABULARY, answer - 1)]) for i in range(8)]
    return [{"input_ids": row, "labels": np.where(np.arange(len(row)) < prompt, -100, row)} for row in rows]


def kept_bytes(model: nn.Module, batch: THDBatch) -> int:
    """Return the bytes that autograd keeps for the backward pass, without the weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        kept.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = causal_lm_loss(model, batch)
    total = sum(x.untyped_storage().nbytes() for at, x in kept.items() if at not in weights)
    del loss
    return total


def best(work: Callable[[bool], object], rounds: int) -> tuple[float, float]:
    """Return the least CPU seconds of both ways, which take turns."""
    found = [float("inf"), float("inf")]
    for number in range(rounds + 1):
        for way in (0, 1):
            start = time.process_time()
            work(bool(way))
            if number:  # the first round warms up
                found[way] = min(found[way], time.process_time() - start)
    return found[0], found[1]


def measure(model: nn.Module, shape: tuple[int, int, int], rounds: int) -> None:
    samples = group(*shape)

    def step(share: bool) -> None:
        model.zero_grad()
        causal_lm_loss(model, THDBatch.collate(samples, share_prefixes=share)).backward()

    @torch.no_grad()
    def forward(share: bool) -> None:
        causal_lm_loss(model, THDBatch.collate(samples, share_prefixes=share))

    plain, shared = (THDBatch.collate(samples, share_prefixes=share) for share in (False, True))
    flops = FlopsModel.from_config(model.config)
    bound = flops.training_flops(plain.stats).model / flops.training_flops(shared.stats).model
    times, passes = best(step, rounds), best(forward, rounds)
    memory = kept_bytes(model, shared) / kept_bytes(model, plain)
    print(
        f"{shape[0]:>5} {shape[1]:>6} {shape[2]:>6} {times[0]:>9.2f} {times[1]:>9.2f} "
        f"{times[0] / times[1]:>6.2f} {bound:>6.2f} {passes[0] / passes[1]:>8.2f} {memory:>7.2f}"
    )
    if shape in GOALS:
        wanted, most = GOALS[shape]
        what = f"prefixes, group {shape[0]}, prompt {shape[1]}, answer {shape[2]}"
        faster(f"{what}: a step", times[1], times[0], "CPU s", wanted, precision="fp32")
        if most is not None:
            less(f"{what}: memory kept", memory, "of unshared", most, precision="fp32")


def against_trl(rounds: int) -> None:
    """Print the CPU seconds of GRPO's log-probabilities and gradients, padded and shared."""
    from trl.trainer.utils import add_fused_lm_head

    from lightning_thd.integrations.hf_rows import pack_rows

    samples = group(8, 1024, 128)
    ids = torch.from_numpy(np.stack([sample["input_ids"] for sample in samples]))
    labels = torch.from_numpy(np.stack([sample["labels"] for sample in samples]))
    models = [model_of(), model_of()]
    for model, share in zip(models, (False, True), strict=True):
        add_fused_lm_head(model)
        if share:
            pack_rows(model, share_prefixes=True)
        else:
            model.set_attn_implementation("sdpa")

    def run(share: bool) -> None:
        given = {"attention_mask": torch.ones_like(ids), "labels": labels, "fused_lm_head": True}
        models[share](input_ids=ids, **given).log_probs.sum().backward()

    padded, shared = best(run, rounds)
    times = padded / shared
    print(f"TRL, 8 answers of 128 to 1,024: padded {padded:.2f} s, shared {shared:.2f} s, {times:.2f}x")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--trl", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(argv)
    model = model_of()
    print("group prompt answer  unshared    shared  times  bound  forward  memory")
    for shape in [*GOALS, *([] if given.quick else FURTHER)]:
        measure(model, shape, given.rounds)
    if given.trl:
        against_trl(given.rounds)


if __name__ == "__main__":
    main()
