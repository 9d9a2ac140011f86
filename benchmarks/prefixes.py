"""Groups of answers to one prompt, with shared prefixes and without: time, memory, and the bound.

``python -m benchmarks.prefixes`` runs Qwen3 (hidden 256, 4 layers, heads of 64, vocabulary 260, fp32) forward
and backward over groups of 2, 8 and 16 answers, with shared prefixes, as a pack without, and as TRL's padded
log-probabilities (GRPO's). A prompt is 1/4 to 16 times as long as an answer. Times are CPU seconds of one
thread, the collation included. Memory is what autograd keeps between forward and backward. The bound is that
of the FLOPs counted for distinct tokens and pairs. ``--quick`` runs only the groups with a goal, without TRL.
``--keys`` counts instead how many keys planned packs gather: a CUDA graph would gather a fixed number.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.results import faster, less
from lightning_thd import FlopsModel, Packs, THDBatch, causal_lm_loss
from lightning_thd.packing.prefixes import PrefixPlanner

VOCABULARY = 260
# (group, prompt, answer, groups in the pack): times as fast as without, share of the memory. The last shares
# nothing. The bound of one pair of equal halves falls with their length, from 1.33 to 1.28 at 512 tokens.
GOALS = {
    (8, 1024, 128, 1): (3.0, 1 / 3),
    (2, 512, 512, 1): (1.3, None),
    (2, 128, 128, 8): (1.3, None),
    (1, 0, 1152, 1): (0.97, None),
}
FURTHER = [(g, p, a, 1) for g in (2, 8, 16) for p, a in ((128, 512), (256, 256), (512, 128), (1024, 64))]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, head_dim=64,
        intermediate_size=768, vocab_size=VOCABULARY,
    )  # fmt: skip
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="thd")
    return model


def group(size: int, prompt: int, answer: int, seed: int) -> list[dict[str, Any]]:
    """Return the answers to one prompt, learned only; a group of one is eight strangers."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCABULARY, prompt)
    rows = [np.concatenate([shared, rng.integers(0, VOCABULARY, answer)]) for _ in range(max(size, 2))]
    if size == 1:
        rows = [np.concatenate([[i], rng.integers(0, VOCABULARY, answer - 1)]) for i in range(8)]
    return [{"input_ids": row, "labels": np.where(np.arange(len(row)) < prompt, -100, row)} for row in rows]


def kept_bytes(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Return the bytes that autograd keeps for the backward pass, without the weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        # A graph that holds a tensor of its own is never freed, so it gets a detached one.
        detached = x.detach()
        kept.setdefault(x.untyped_storage().data_ptr(), detached)
        return detached

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = run()
    total = sum(x.untyped_storage().nbytes() for at, x in kept.items() if at not in weights)
    del loss
    return total


def best(ways: Sequence[Callable[[], object]], rounds: int, seconds: float, least: int) -> list[float]:
    """Return the least CPU seconds of each way, in at least ``least`` turns and some ``seconds``."""
    found, begun = [float("inf")] * len(ways), time.process_time()
    for number in range(rounds + 1):
        for way, work in enumerate(ways):
            start = time.process_time()
            work()
            if number:  # the first round warms up
                found[way] = min(found[way], time.process_time() - start)
        if number >= least and time.process_time() - begun > seconds:
            break
    return found


def ways_of(
    model: nn.Module, padded: nn.Module | None, samples: list[dict[str, Any]]
) -> list[Callable[[], Tensor]]:
    """Return the functions that compute the loss of the samples: unshared, shared, and TRL's."""

    def packed(share: bool) -> Tensor:
        return causal_lm_loss(model, THDBatch.collate(samples, share_prefixes=share))

    def trl() -> Tensor:
        assert padded is not None
        ids, labels = (
            torch.from_numpy(np.stack([x[key] for x in samples])) for key in ("input_ids", "labels")
        )
        output = padded(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, fused_lm_head=True)
        return -output.log_probs.sum() / (labels[:, 1:] != -100).sum()

    return [partial(packed, share=False), partial(packed, share=True), *([] if padded is None else [trl])]


def measure(
    model: nn.Module, padded: nn.Module | None, shape: tuple[int, int, int, int], rounds: int, seconds: float
) -> None:
    """Print and keep the figures of a pack; each of its two measurements takes some ``seconds``."""
    size, prompt, answer, groups = shape
    samples = [row for seed in range(groups) for row in group(size, prompt, answer, seed)]
    ways = ways_of(model, padded, samples)
    losses = [way().detach() for way in ways]
    assert all(torch.allclose(loss, losses[0], rtol=1e-4) for loss in losses), losses

    def step(way: Callable[[], Tensor]) -> None:
        model.zero_grad()
        way().backward()

    @torch.no_grad()
    def forward(way: Callable[[], Tensor]) -> None:
        way()

    plain, shared = (THDBatch.collate(samples, share_prefixes=share) for share in (False, True))
    flops = FlopsModel.from_config(model.config)
    bound = flops.training_flops(plain.stats).model / flops.training_flops(shared.stats).model
    least = 6 if shape in GOALS else 1  # The least of two rounds is off by 5 % on a busy host.
    times, passes = (
        best([partial(run, way) for way in ways], rounds, seconds, least) for run in (step, forward)
    )
    memory = [kept_bytes(model if i < 2 else padded or model, way) for i, way in enumerate(ways)]
    line = f"{groups:>6} {size:>5} {prompt:>6} {answer:>6}"
    line += f" {times[1]:>8.2f} {memory[1] / 2**20:>7.0f} {bound:>6.2f}"
    for other in (0, 2)[: len(ways) - 1]:
        line += f" | {times[other] / times[1]:>6.2f} {passes[other] / passes[1]:>8.2f}"
        line += f" {memory[other] / memory[1]:>7.2f}"
    print(line, flush=True)
    if shape in GOALS:
        wanted, most = GOALS[shape]
        what = f"prefixes, {f'{groups} groups of' if groups > 1 else 'group'} {size}, "
        what += f"prompt {prompt}, answer {answer}"
        faster(f"{what}: a step", times[1], times[0], "CPU s", wanted, precision="fp32")
        if most is not None:
            less(f"{what}: memory kept", memory[1] / memory[0], "of unshared", most, precision="fp32")


# Name -> answers to a prompt, and the medians of the lengths of prompts and answers, which are lognormal.
DRAWN = {
    "2 answers of 512 to 512": (2, 512, 512),
    "8 answers of 512 to 512": (8, 512, 512),
    "16 answers of 256 to 1,024": (16, 1_024, 256),
}
CAPACITY, ROWS = 8_192, 3_200


def count_keys() -> None:
    """Print how many keys the packs of some plans gather, and what one or two fixed numbers would add."""
    rng = np.random.default_rng(0)
    print(f"packs of {CAPACITY:,} slots         keys: P50     P99     max | of the mean, one bucket   two")
    for name, (size, prompt, answer) in DRAWN.items():
        rows = []
        for _ in range(ROWS // size):
            shared = rng.integers(0, 30_000, 1 + int(rng.lognormal(np.log(prompt), 0.6)))
            for _ in range(size):
                own = rng.integers(0, 30_000, 1 + int(rng.lognormal(np.log(answer), 0.8)))
                rows.append(np.concatenate([shared, own])[:CAPACITY])
        ids = [row.astype("<i4").tobytes() for row in rows]
        planner = PrefixPlanner(list(map(len, rows)), CAPACITY, ids=ids.__getitem__, global_batch=Packs(1))
        counts = []
        for step in range(len(planner)):
            members = planner.step(0, step, 1).spans.index
            samples = [{"input_ids": rows[i]} for i in members]
            batch = THDBatch.collate(samples, share_prefixes=True, pad_to=CAPACITY)
            counts.append(CAPACITY if batch.prefixes is None else len(batch.prefixes.keys))
        keys = np.array(counts)
        median, most = np.quantile(keys, [0.5, 0.99]).astype(int).tolist()
        fitting = keys[keys <= most]
        two = np.where(fitting <= median, median, most).mean() / fitting.mean()
        print(
            f"{name:<28}{median:>13,}{most:>8,}{keys.max():>8,} |{most / fitting.mean():>22.2f}x{two:>6.2f}x"
        )


def padded_model() -> nn.Module | None:
    """Return the same model with TRL's head for log-probabilities; None without TRL."""
    if find_spec("trl") is None:
        print("TRL is not installed and is left out")
        return None
    from trl.trainer.utils import add_fused_lm_head

    model: Any = model_of()
    add_fused_lm_head(model)
    model.set_attn_implementation("sdpa")
    return model


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=10, help="at most; large groups take fewer")
    torch.set_num_threads(1)  # Threads that wait for each other count as CPU time.
    parser.add_argument("--minutes", type=float, default=10.0, help="of CPU time for all groups, roughly")
    parser.add_argument("--keys", action="store_true", help="count the keys of packs, and measure nothing")
    given = parser.parse_args(argv)
    if given.keys:
        count_keys()
        return
    shapes = [*GOALS, *([] if given.quick else FURTHER)]
    model, padded = model_of(), None if given.quick else padded_model()
    print("Of the shared run: CPU s a step, MiB kept; then how many times as much the others take.")
    others = " |  step x forward x  memory x" + (
        "" if given.quick else " |  step x forward x  memory x (TRL)"
    )
    print("groups  size prompt answer shared s     MiB  bound" + others)
    each = 60 * given.minutes / (len(shapes) + 2 * len(GOALS)) / 2
    for shape in shapes:  # three times as long for those with a goal
        measure(model, padded, shape, given.rounds, each * (3 if shape in GOALS else 1))


if __name__ == "__main__":
    main()
