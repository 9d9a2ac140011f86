"""Forty packs through CUDA graphs with compiled layers on an imagined GPU: one graph, captured compiled."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
import torch._dynamo
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Qwen3Config

from lightning_thd import causal_lm_loss
from lightning_thd.callbacks.cuda_graph import GraphedStep, make_buckets
from lightning_thd.cuda_graph.backend import CudaBackend
from lightning_thd.parallel.fsdp import layers_of
from tests.cuda_graph.support import random_batch
from tests.imagined.gpu import data, imagined_gpu

PACKS = 40
LAYERS = 3
BUCKETS = make_buckets((8, 11, 14), slots=128, max_seqlen=24)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
RUNS: Counter[bool] = Counter()  # compiled graphs that ran, by whether a CUDA graph was being captured


class Untimed(CudaBackend):
    """Has no times, which say nothing here."""

    def time_s(self, function: Any, **_: Any) -> float | None:  # type: ignore[override]
        return None


def counted(graph: Any, inputs: Any) -> Any:
    from functorch.compile import make_boxed_func

    def run(*args: Any) -> Any:
        RUNS[torch.cuda.is_current_stream_capturing()] += 1
        return graph(*args)

    return make_boxed_func(run)


def losses_and_gradients(step: Any, model: Any) -> list[torch.Tensor]:
    tensors = []
    for seed in range(PACKS):
        batch = random_batch(seed).to("cuda")
        if batch.input_ids.numel() < 2:
            continue
        model.zero_grad()
        loss = step(batch)
        loss.backward()
        tensors += [data(loss.detach()).clone(), *(data(p.grad).clone() for p in model.parameters())]
    return tensors


def main(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 100}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=LAYERS)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="thd", dtype=dtype).train()
    expected = losses_and_gradients(lambda batch: causal_lm_loss(model, batch), model)
    backend = Untimed(compiler=aot_autograd(fw_compiler=counted, bw_compiler=counted))
    options: Any = {"require": True, "compile_layers": True, "keep_gradients": False}
    step = GraphedStep(causal_lm_loss, model, buckets=BUCKETS, backend=backend, **options)
    actual = losses_and_gradients(step, model)
    largest = max(float(x.double().norm()) for x in expected)

    for ours, theirs in zip(actual, expected, strict=True):
        error = float((ours.double() - theirs.double()).norm())
        assert error <= TOLERANCES[dtype] * max(float(theirs.double().norm()), 1e-2 * largest), error

    assert step.stats.replays > PACKS // 2, step.stats
    assert step.stats.fallbacks["tokens"] > 0, step.stats
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (1, {})
    assert RUNS[True] == 2 * LAYERS * len(BUCKETS), RUNS  # forward and backward
    assert RUNS[False] == 2 * RUNS[True], RUNS  # the first and the last warm-up, and no run after them
    assert not any("forward" in vars(layer) for layer in layers_of(model))

    sys.stdout.write(f"compiled once, captured {RUNS[True]} times, {step.stats.replays} replays: equal\n")


if __name__ == "__main__":
    with imagined_gpu(capability=(9, 0), name="NVIDIA H100 80GB HBM3"):
        main(getattr(torch, sys.argv[1]))
