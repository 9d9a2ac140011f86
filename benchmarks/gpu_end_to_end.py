"""Training steps on a GPU, AdamW included: tokens a second and MFU of 125M and of 7B, graphs on and off."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.gpu_parts import Row, part
from lightning_thd import FlopsModel, THDBatch, causal_lm_loss
from lightning_thd.callbacks.cuda_graph import GraphedStep, make_buckets
from lightning_thd.cuda_graph.optimizer import GraphedOptimizer
from lightning_thd.flops import SeqStats, peak_flops

VOCABULARY, STEPS = 32_000, 24
# layers, hidden, heads, key-value heads, intermediate
SMALL, LARGE = (12, 768, 12, 12, 2048), (32, 4096, 32, 8, 14_336)
# One H200, 125M, packs of 8 documents in 8,192 tokens, by their authors: dense mask 124k, unpacked 236k, flex
# attention 290k tokens/s; 7B unpacked at 4k 57.8 % MFU (KempnerForge pull 207).
GOAL_TOKENS, GOAL_MFU = 350_000.0, 0.60
UPDATE = " and update"  # the end of the name of a way that captures the optimizer's update
LARGE_GIB = 100  # 58 GB of weights, gradients and AdamW's state, and 36 GB of activations


def build(sizes: tuple[int, int, int, int, int]) -> nn.Module:
    """A Qwen3 with random weights in bf16 on the GPU."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    layers, hidden, heads, kv_heads, intermediate = sizes
    torch.manual_seed(0)
    config = Qwen3Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=intermediate,
        vocab_size=VOCABULARY,
        tie_word_embeddings=sizes == SMALL,
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="thd", dtype=torch.bfloat16)
    return model.train()


def packs(slots: int, documents: int) -> list[THDBatch]:
    """Packs of so many documents of random lengths that fill the slots."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(4):
        cuts = torch.randperm(slots - 1, generator=generator)[: documents - 1].add(1).sort().values.tolist()
        lengths = [b - a for a, b in zip([0, *cuts], [*cuts, slots], strict=True)]
        samples = [{"input_ids": torch.randint(0, VOCABULARY, (n,), generator=generator)} for n in lengths]
        made.append(THDBatch.collate(samples).to("cuda"))
    return made


def step_s(
    run: Callable[[THDBatch], Tensor], model: nn.Module, batches: list[THDBatch], *, captures_update: bool
) -> float:
    """Mean seconds of forward, backward and a fused AdamW, after a third of the steps to warm up.

    As in training, the host runs ahead of the device: nothing waits between two steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    begun, warm = 0.0, STEPS // 3
    with contextlib.ExitStack() as stack:
        if captures_update:
            assert isinstance(run, GraphedStep)
            stack.enter_context(GraphedOptimizer(optimizer, run))
        for k in range(STEPS):
            if k == warm:
                torch.cuda.synchronize()
                begun = time.perf_counter()
            run(batches[k % len(batches)]).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / (STEPS - warm)


def rates(name: str, sizes: tuple[int, int, int, int, int], slots: int, documents: int) -> Iterator[Row]:
    """Yield tokens a second, MFU and memory, eager and replayed."""
    model, batches = build(sizes), packs(slots, documents)
    flops = FlopsModel.from_config(model.config)  # type: ignore[arg-type]
    step_flops = statistics.mean(
        flops.training_flops(SeqStats.from_lengths(batch.lengths)).model for batch in batches
    )
    peak = peak_flops(torch.cuda.get_device_name(), torch.bfloat16)
    buckets = make_buckets((2 * documents,), slots=slots)
    ways: dict[str, Callable[[THDBatch], Tensor]] = {
        "eager": lambda batch: causal_lm_loss(model, batch),
        "graphs": GraphedStep(causal_lm_loss, model, buckets=buckets, keep_gradients=False),
    }
    if sizes == SMALL:
        for way in ("compiled, graphs", f"compiled, graphs{UPDATE}"):
            ways[way] = GraphedStep(
                causal_lm_loss, model, buckets=buckets, keep_gradients=False, compile_layers=True
            )
        ways["compiled"] = ways["eager"]
    for way, run in ways.items():
        if way == "compiled":
            for layer in model.model.layers:
                layer.compile(dynamic=True)
        torch.cuda.reset_peak_memory_stats()
        seconds = step_s(run, model, batches, captures_update=way.endswith(UPDATE))
        small = sizes == SMALL
        tokens, case = slots / seconds, f"{name}, {way}"
        met = tokens >= GOAL_TOKENS if small else None
        goal = f">= {GOAL_TOKENS:.0f}" if small else ""
        yield Row(case=f"{case}: tokens", value=tokens, unit="tokens/s", goal=goal, met=met)
        if peak is not None:
            mfu = step_flops / seconds / peak
            goal, met = ("", None) if small else (f">= {GOAL_MFU}", mfu >= GOAL_MFU)
            yield Row(case=f"{case}: MFU", value=mfu, unit="share", goal=goal, met=met)
        yield Row(case=f"{case}: peak", value=torch.cuda.max_memory_allocated() / 2**30, unit="GiB")
        if isinstance(run, GraphedStep):
            run.close()


@part(
    "train_125m",
    shows="125M, 8k packs of 8 documents: tokens/s and MFU, AdamW included",
    seconds=150,
    rank=42,
)
def train_small() -> Iterator[Row]:
    """The case others have published."""
    yield from rates("125M, 8 documents in 8,192", SMALL, 8192, 8)


@part("train_7b", shows="7B in bf16, packs of 2 and of 8 documents: MFU, AdamW included", seconds=60, rank=33)
def train_large() -> Iterator[Row]:
    """Long documents, as in the published case, and shorter ones."""
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    if memory < LARGE_GIB:
        yield Row(case=f"7B needs {LARGE_GIB} GiB, and this GPU has {memory:.0f}", value=0.0, unit="")
        return
    for documents in (2, 8):
        yield from rates(f"7B, {documents} documents in 8,192", LARGE, 8192, documents)
        gc.collect()  # the model, before the next one is built
        torch.cuda.empty_cache()
