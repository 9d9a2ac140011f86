"""One tiny configuration a family of Hugging Face models, with what each does to its logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCAB = 96
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "Gemma2": {"head_dim": 8, "final_logit_softcapping": 3.0},
    "Granite": {"logits_scaling": 3.0},
    "Cohere": {"logit_scale": 0.25},
    "StableLm": {},
    "GPT2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
    "Mixtral": {"output_router_logits": True, **_MOE},
    "Qwen3Moe": {
        "output_router_logits": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "router_aux_loss_coef": 0.5,
    },
    "GraniteMoe": {"logits_scaling": 6.0, "output_router_logits": True, **_MOE},
    "MiniCPM3": {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "dim_model_base": 16,
    },
    "HyperCLOVAX": {"logits_scaling": 0.5},
    "NanoChat": {"final_logit_softcapping": 2.5},
}


def build(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    """Make a family's tiny model with random weights large enough for caps and scales to matter."""
    import transformers

    config_class = getattr(transformers, f"{name}Config", None) or getattr(transformers, f"{name}TextConfig")
    model_class = getattr(transformers, name.replace("Text", "") + "ForCausalLM", None)
    if model_class is None:
        model_class = getattr(transformers, f"{name}LMHeadModel")
    torch.manual_seed(0)
    config = config_class(**{**_COMMON, **FAMILIES[name], **changes})
    config._experts_implementation = "eager"  # the grouped kernel has no fp64
    model: nn.Module = model_class._from_config(config, attn_implementation="thd")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20.0)
    return model.to(dtype)


def names() -> list[str]:
    import transformers

    return [name for name in FAMILIES if hasattr(transformers, f"{name}Config")]
