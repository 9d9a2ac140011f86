"""Messages about what cannot be counted that no other test of the room meets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_thd.flops import FlopsModel, Member, SeqStats, join, measure_flops, throughput

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 12,
}


def model(**how: Any) -> FlopsModel:
    return FlopsModel.from_config(LLAMA, **how)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "layer of an unknown kind": (
        lambda: FlopsModel.from_config({**LLAMA, "model_type": "qwen3", "layer_types": ["retention"]}),
        r"Layer 0 of model_type='qwen3' is a 'retention', for which no FLOP count is known. Register",
    ),
    "peak of integer products": (
        lambda: measure_flops(dtype=torch.int8, device="cpu", seconds=0.01),
        r"dtype=torch.int8: peaks are of floating products. Pass torch.bfloat16",
    ),
    "no model": (lambda: join([]), "No model was given to count. Give one or more members"),
    "models counted in two ways": (
        lambda: join(
            [
                Member(name="policy", model=model()),
                Member(name="reference", model=model(causal="full"), training=0.0, forward=1.0),
            ]
        ),
        r"policy, reference count under different conventions .*Build all of them with the same",
    ),
    "another kind of work": (
        lambda: throughput(SeqStats.from_lengths([4]), seconds=1.0, work="backward"),  # type: ignore[arg-type]
        "work='backward'; wanted one of training, forward",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case: str) -> None:
    call, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        call()
