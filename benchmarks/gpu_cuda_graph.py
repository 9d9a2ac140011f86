"""CUDA graphs on a GPU: eager, ours, torch.compile and its reduce-overhead mode, at 0.1B and 1B parameters.

A part of ``python -m benchmarks.gpu``. Forward and backward of one microbatch in bf16, sequences drawn from
the published distribution of a packed corpus; a step's time is the median of device events.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.gpu_parts import Row, part
from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.callbacks.cuda_graph import GraphedStep, make_buckets
from lightning_thd.cuda_graph.buckets import BatchShape
from lightning_thd.cuda_graph.graph_choice import plan_graphs
from lightning_thd.packing import pack_lengths

VOCABULARY = 32_000
# name -> layers, hidden, heads, key-value heads, intermediate: 0.11e9 and 1.1e9 parameters.
SIZES = {"0.1B": (12, 640, 10, 5, 2048), "1B": (20, 2048, 16, 8, 6144)}
TOKENS = (2048, 8192, 32_768)
TELLING = (("0.1B", 2048), ("1B", 8192))
BATCHES = 6
# torch.compile takes up to a minute a model; what does not fit is left out and said so.
COMPILE_UNTIL_S = 110.0


def build(size: str, device: str) -> nn.Module:
    """A Qwen3 with random weights in bf16."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    layers, hidden, heads, kv_heads, intermediate = SIZES[size]
    torch.manual_seed(0)
    config = Qwen3Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=intermediate,
        vocab_size=VOCABULARY,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="thd", dtype=torch.bfloat16)
    return model.train()


def draw(tokens: int, device: str) -> list[THDBatch]:
    """Packs of log-normal lengths, a median of 170 tokens in 2,048 (12 sequences), longest a pack."""
    rng = np.random.default_rng(tokens)
    lengths = np.clip(rng.lognormal(np.log(tokens / 16), 1.0, 16 * BATCHES * 8), 8, tokens).astype(int)
    packing = pack_lengths(lengths, tokens)
    packs = [packing.indices[a:b] for a, b in zip(packing.offsets, packing.offsets[1:], strict=False)]
    chosen = rng.choice(len(packs) - 1, BATCHES, replace=False)
    return [
        THDBatch.collate(
            [{"input_ids": rng.integers(0, VOCABULARY, int(lengths[i]))} for i in packs[k]], pad_to=None
        ).to(device)
        for k in chosen
    ]


def graphs_for(model: nn.Module, batches: list[THDBatch], tokens: int) -> GraphedStep:
    """Our step, with the buckets that the plan chooses for these batches."""
    shapes = [BatchShape.of_batch(batch) for batch in batches]
    plan = plan_graphs(shapes, slots=tokens, max_seqlen=tokens)
    buckets = plan.buckets() or make_buckets((64,), slots=tokens)
    return GraphedStep(causal_lm_loss, model, buckets=buckets, require=True)


def step_ms(run: Callable[[THDBatch], Tensor], model: nn.Module, batches: list[THDBatch]) -> float:
    """Median milliseconds of forward and backward over the batches, twice around, after one round."""
    times = []
    for round_ in range(3):
        for batch in batches:
            model.zero_grad(set_to_none=True)
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            run(batch).backward()
            stop.record()
            torch.cuda.synchronize()
            if round_:
                times.append(start.elapsed_time(stop))
    return statistics.median(times)


def idle_share(run: Callable[[THDBatch], Tensor], model: nn.Module, batches: list[THDBatch]) -> float:
    """Share of a step in which no kernel runs, by the profiler's kernel times."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for batch in batches:
            model.zero_grad(set_to_none=True)
            run(batch).backward()
        stop.record()
        torch.cuda.synchronize()
    busy_ms = sum(e.self_device_time_total for e in profile.key_averages()) / 1000
    return max(0.0, 1.0 - busy_ms / start.elapsed_time(stop))


def ways(
    model: nn.Module, batches: list[THDBatch], tokens: int, *, compiled: bool
) -> Iterator[tuple[str, Any]]:
    """Ways to run a step, built one after the other."""
    yield "eager", lambda batch: causal_lm_loss(model, batch)
    yield "ours", graphs_for(model, batches, tokens)
    if compiled:
        for mode in ("default", "reduce-overhead"):
            torch._dynamo.reset()
            fast = torch.compile(model, mode=mode, dynamic=True)

            def run(batch: THDBatch, fast: Any = fast) -> Tensor:
                torch.compiler.cudagraph_mark_step_begin()
                return causal_lm_loss(fast, batch)

            yield f"compile {mode}", run


def measured(cases: tuple[tuple[str, int], ...], *, compiled: bool) -> Iterator[Row]:
    """Yield the comparison for every size and length."""
    began = time.monotonic()
    for size, tokens in cases:
        model, batches = build(size, "cuda"), draw(tokens, "cuda")
        also = compiled and time.monotonic() - began < COMPILE_UNTIL_S
        yield from compare(size, tokens, model, batches, compiled=also)
        del model
        gc.collect()
        torch.cuda.empty_cache()


@part(
    "cuda_graph",
    shows="step time, idle share, capture time and memory: eager, ours, torch.compile, reduce-overhead",
    seconds=110,
    rank=42,
)
def cuda_graph() -> Iterator[Row]:
    """A launch-bound case and a large one; the goals are 1.5 x eager at 0.1B / 2k, and no loss at 1B / 8k."""
    yield from measured(TELLING, compiled=True)


@part("cuda_graph_lengths", shows="the same for the other sizes and lengths", seconds=60, rank=50)
def lengths() -> Iterator[Row]:
    """The goal is nowhere slower than eager by over 1 %."""
    others = tuple((size, tokens) for size in SIZES for tokens in TOKENS if (size, tokens) not in TELLING)
    yield from measured(others, compiled=False)


def compare(
    size: str, tokens: int, model: nn.Module, batches: list[THDBatch], *, compiled: bool
) -> Iterator[Row]:
    """Measure the ways on one model and length."""
    case, eager_ms = f"{size} {tokens}", float("nan")
    for way, run in ways(model, batches, tokens, compiled=compiled):
        gc.collect()
        torch.cuda.empty_cache()  # or the memory of the way before would count
        torch.cuda.reset_peak_memory_stats()
        try:
            ms = step_ms(run, model, batches)
        except Exception as error:  # a peer that cannot run this model says so and the rest goes on
            if way in ("eager", "ours"):
                raise
            yield Row(case=f"{case} {way}: {type(error).__name__}", value=float("nan"), unit="ms")
            continue
        yield Row(case=f"{case} {way}", value=ms, unit="ms")
        yield Row(case=f"{case} {way} idle", value=idle_share(run, model, batches), unit="share")
        yield Row(case=f"{case} {way} reserved", value=torch.cuda.max_memory_reserved() / 2**30, unit="GiB")
        if way == "eager":
            eager_ms = ms
            continue
        speedup = eager_ms / ms
        goal, met = "", None
        if way == "ours":
            wanted = 1.5 if (size, tokens) == ("0.1B", 2048) else 0.99
            goal, met = f">= {wanted}", speedup >= wanted
            yield Row(case=f"{case} ours capture", value=run.stats.capture_s, unit="s")
            yield Row(case=f"{case} ours replayed", value=run.stats.hit_rate, unit="share")
        yield Row(case=f"{case} {way} / eager", value=speedup, unit="x", goal=goal, met=met)
        if way == "ours":
            found = largest_difference(run, model, batches)
            name = f"{case} ours vs eager loss"
            yield Row(case=name, value=found, unit="relative", goal="<= 0.01", met=found <= 0.01)
            run.close()


def largest_difference(step: GraphedStep, model: nn.Module, batches: list[THDBatch]) -> float:
    """Largest relative difference of the losses of a replay and of eager."""
    worst = 0.0
    for batch in batches:
        loss, eager = step(batch).detach(), causal_lm_loss(model, batch).detach()
        worst = max(worst, float((loss - eager).abs() / eager.abs()))
    return worst
