"""Encoders: attention to both sides stays inside its sequence, windows included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from lightning_thd.models import register_thd
from tests.models.matrix import packs, relative_error

register_thd()
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.1,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
}
ENCODERS = {
    "bert": ("BertConfig", TINY),
    "modernbert": (
        "ModernBertConfig",
        {**TINY, "local_attention": 6, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


def build(name: str, attention: str) -> Any:
    config_name, arguments = ENCODERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**arguments)
    return transformers.AutoModelForMaskedLM.from_config(config, attn_implementation=attention).eval()


@pytest.mark.parametrize("name", ENCODERS)
def test_packed_encoders_equal_unpacked_ones(name: str) -> None:
    stock, packed = build(name, "eager"), build(name, "thd")
    for batch in packs():
        got = batch.unpack(packed(**batch.hf_kwargs()).logits)
        for ids, logits in zip(batch.unpack(batch.input_ids), got, strict=True):
            want = stock(ids[None]).logits[0]
            assert relative_error(logits, want) <= 1e-5
            if len(ids) > 3:  # later tokens do reach earlier ones
                assert not torch.allclose(stock(ids[None, :-1]).logits[0, :1], want[:1], atol=1e-4)
