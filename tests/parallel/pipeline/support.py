"""Tiny models of several families for tests of pipelines."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import transformers
from torch import nn

from lightning_thd.parallel.pipeline import Op

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "balanced": (
        "Qwen3MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.5,
            "mlp_only_layers": [0, 1],
        },
    ),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8, "tie_word_embeddings": True}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"]}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 5, "n_head": 4, "vocab_size": 64}),
}


def make_model(family: str) -> nn.Module:
    name, extra = FAMILIES[family]
    sizes = {} if family == "gpt2" else SIZES
    config = getattr(transformers, name)(**{**sizes, **extra})
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="thd", experts_implementation="eager"
    )
    return model.double().eval()  # no dropout


def in_flight(program: tuple[Op, ...]) -> int:
    """Count the most forward passes whose activations a rank holds at once."""
    return max(accumulate(1 if op.forward else -1 for op in program))
