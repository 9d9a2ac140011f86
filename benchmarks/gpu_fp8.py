"""FP8 on a GPU: the time of a 1B model on packs of 16k slots, in every recipe the device has, beside bf16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from benchmarks.gpu_parts import Row, median_us, part
from lightning_thd._imports import available
from lightning_thd.batch import THDBatch
from lightning_thd.loss import causal_lm_loss
from lightning_thd.precision import convert_linear, fp8_context

SLOTS, GOAL = 16_384, 1.2
SIZES = {
    "vocab_size": 32_768,
    "hidden_size": 2_048,
    "intermediate_size": 8_192,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
ENGINES = {"te": "transformer_engine.pytorch", "torchao": "torchao.float8"}
RECIPES = (
    *(("te", name) for name in ("current", "delayed", "blockwise", "mxfp8", "nvfp4")),
    *(("torchao", name) for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")),
)


def _model() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**SIZES), attn_implementation="thd", dtype=torch.bfloat16
        )
    return model.train()


def _batch() -> THDBatch:
    rng = np.random.default_rng(0)
    lengths = np.full(SLOTS // 1_024, 1_024)
    return THDBatch.collate([{"input_ids": rng.integers(0, 32_768, n).tolist()} for n in lengths]).to("cuda")


def _time(model: Any, batch: THDBatch) -> float:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        with fp8_context(model):
            loss = causal_lm_loss(model, batch)
        loss.backward()

    return median_us(run, repeats=10)


@part("fp8_1b", shows="1B at 16k slots, forward and backward: FP8 beside bf16", seconds=150, rank=36)
def one_billion() -> Iterator[Row]:
    """A row a recipe; torchao's layers are compiled, as its speed needs."""
    batch = _batch()
    plain = _time(_model(), batch)
    yield Row(case="bf16", value=plain / 1e3, unit="ms")
    for engine, recipe in RECIPES:
        if not available(ENGINES[engine]):
            continue
        model = _model()
        try:
            convert_linear(model, recipe=recipe, engine=engine)
        except MisconfigurationException:  # the device lacks it
            continue
        if engine == "torchao":
            for layer in model.model.layers:
                layer.compile(dynamic=False)
        times = plain / _time(model, batch)
        first = (engine, recipe) in (("te", "current"), ("torchao", "tensorwise"))
        goal = f">= {GOAL}x" if first else ""
        met = times >= GOAL if first else None
        yield Row(case=f"{engine} {recipe}", value=times, unit="x bf16", goal=goal, met=met)
        del model
        torch.cuda.empty_cache()
