"""Tiny models of every supported family, built from their configs: two layers of each kind, hidden 32."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

VOCAB = 64
_DENSE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}
_MOE = {
    **_DENSE,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_SLIDING = {"head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_MAMBA1 = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}


class Family(NamedTuple):
    """A model family: its config class in transformers and the arguments that make it tiny."""

    config: str
    arguments: dict[str, Any]
    kind: str = "dense"

    @property
    def experts(self) -> bool:
        return "num_experts" in self.arguments or "n_routed_experts" in self.arguments


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaConfig", _DENSE),
    "mistral": Family("MistralConfig", {**_DENSE, "sliding_window": 5}, "window"),
    "qwen2": Family("Qwen2Config", _DENSE),
    "qwen3": Family("Qwen3Config", {**_DENSE, "head_dim": 8}),
    "gemma2": Family(
        "Gemma2Config",
        {**_DENSE, "head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 5.0},
        "window",
    ),
    "gemma3": Family("Gemma3TextConfig", {**_DENSE, **_SLIDING}, "window"),
    "cohere2": Family("Cohere2Config", {**_DENSE, "sliding_window": 5}, "window"),
    "phi3": Family("Phi3Config", _DENSE),
    "olmo2": Family("Olmo2Config", _DENSE),
    "glm4": Family("Glm4Config", {**_DENSE, "head_dim": 8}),
    "granite": Family("GraniteConfig", _DENSE),
    "smollm3": Family("SmolLM3Config", _DENSE),
    "starcoder2": Family("Starcoder2Config", {**_DENSE, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "stablelm": Family("StableLmConfig", _DENSE, "no kwargs"),
    "nemotron": Family("NemotronConfig", _DENSE, "no kwargs"),
    "gpt2": Family(
        "GPT2Config",
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 512,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        },
    ),
    "gpt_neox": Family("GPTNeoXConfig", _DENSE),
    "opt": Family("OPTConfig", {**_DENSE, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "olmoe": Family("OlmoeConfig", _MOE, "moe"),
    "qwen2_moe": Family(
        "Qwen2MoeConfig",
        {
            **_MOE,
            "shared_expert_intermediate_size": 24,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 2,
        },
        "moe",
    ),
    "helium": Family("HeliumConfig", {**_DENSE, "head_dim": 8}),
    "exaone4": Family(
        "Exaone4Config", {**_DENSE, "sliding_window": 5, "sliding_window_pattern": 2}, "window"
    ),
    "xlstm": Family(
        "xLSTMConfig",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "chunk_size": 16},
        "ssm",
    ),
    "lfm3": Family(
        "Lfm3Config", {**_DENSE, "head_dim": 8, "layer_types": ["conv", "full_attention"]}, "conv"
    ),
    "mixtral": Family("MixtralConfig", _MOE, "moe"),
    "qwen3_moe": Family("Qwen3MoeConfig", {**_MOE, "head_dim": 8}, "moe"),
    "gpt_oss": Family("GptOssConfig", {**_MOE, **_SLIDING}, "sinks"),
    "deepseek_v3": Family(
        "DeepseekV3Config",
        {
            **_DENSE,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
        "mla",
    ),
    "mamba": Family("MambaConfig", _MAMBA1, "ssm"),
    "falcon_mamba": Family("FalconMambaConfig", _MAMBA1, "ssm"),
    "mamba2": Family(
        "Mamba2Config", {**_MAMBA1, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8}, "ssm"
    ),
    "bamba": Family("BambaConfig", {**_DENSE, **_MAMBA2, "attn_layer_indices": [1]}, "ssm"),
    "granitemoehybrid": Family(
        "GraniteMoeHybridConfig",
        {**_MOE, **_MAMBA2, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 24},
        "ssm",
    ),
    "falcon_h1": Family("FalconH1Config", {**_DENSE, **_MAMBA2, "mamba_d_ssm": 64}, "ssm"),
    "nemotron_h": Family(
        "NemotronHConfig",
        {
            **_DENSE,
            "hybrid_override_pattern": "M*-",
            "num_hidden_layers": 3,
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 8,
            "chunk_size": 8,
        },
        "ssm",
    ),
    "zamba2": Family(
        "Zamba2Config",
        {
            **_DENSE,
            "num_hidden_layers": 3,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
            "num_mem_blocks": 1,
            "mamba_d_state": 8,
            "mamba_headdim": 16,
            "n_mamba_heads": 4,
            "mamba_ngroups": 1,
            "chunk_size": 8,
        },
        "ssm",
    ),
    "jamba": Family(
        "JambaConfig",
        {
            **_DENSE,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
        "ssm",
    ),
    "qwen3_next": Family(
        "Qwen3NextConfig",
        {**_MOE, **_DELTA, **_LINEAR, "head_dim": 8, "shared_expert_intermediate_size": 24},
        "delta",
    ),
    "qwen3_5": Family("Qwen3_5TextConfig", {**_DENSE, **_DELTA, **_LINEAR, "head_dim": 8}, "delta"),
    "lfm2": Family(
        "Lfm2Config", {**_DENSE, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3}, "conv"
    ),
    "recurrent_gemma": Family(
        "RecurrentGemmaConfig",
        {**_DENSE, "num_hidden_layers": 3, "head_dim": 8, "lru_width": 32, "attention_window_size": 5},
        "ssm",
    ),
    "minimax": Family("MiniMaxConfig", {**_MOE, **_LINEAR, "head_dim": 8, "block_size": 4}, "delta"),
    "olmo_hybrid": Family("OlmoHybridConfig", {**_DENSE, **_DELTA, **_LINEAR}, "delta"),
    "kimi_linear": Family(
        "KimiLinearConfig",
        {
            **_MOE,
            **_LINEAR,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "qk_head_dim": 16,
            "v_head_dim": 12,
            "linear_num_heads": 2,
            "linear_head_dim": 8,
            "num_experts_per_token": 2,
            "mlp_layer_types": ["dense", "sparse"],
        },
        "delta",
    ),
}
# What the installed transformers does not have yet: the oldest one that is supported lacks some.
for _name in [name for name, family in FAMILIES.items() if not hasattr(transformers, family.config)]:
    del FAMILIES[_name]


def build(name: str, attention: str, *, seed: int = 0) -> nn.Module:
    """Build one family with random weights, the same for every ``attention``."""
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**family.arguments)
    torch.manual_seed(seed)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model


def build_in_double(name: str) -> nn.Module:
    """Build one family in fp64 for training; "eager" experts, as grouped products know no fp64."""
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**family.arguments)
    torch.manual_seed(0)
    options = {"attn_implementation": "thd", "experts_implementation": "eager"}
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, **options)
    return model.double().train()
