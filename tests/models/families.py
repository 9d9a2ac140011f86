"""Tiny models of every supported family, built from their configs: two layers of each kind, hidden 32."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from benchmarks.tiny_configs import arguments_of

VOCAB = 64
_DELTA = {"layer_types": ["linear_attention", "full_attention"]}
_CONV = {"layer_types": ["conv", "full_attention"]}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
# Family -> its config class in transformers, its kind, and what the sizes that configs share do not settle.
_TABLE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "dense", {}),
    "mistral": ("MistralConfig", "window", {}),
    "qwen2": ("Qwen2Config", "dense", {}),
    "qwen3": ("Qwen3Config", "dense", {}),
    "gemma2": ("Gemma2Config", "window", {"attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3TextConfig", "window", _SLIDING),
    "cohere2": ("Cohere2Config", "window", {}),
    "phi3": ("Phi3Config", "dense", {}),
    "olmo2": ("Olmo2Config", "dense", {}),
    "glm4": ("Glm4Config", "dense", {}),
    "granite": ("GraniteConfig", "dense", {}),
    "smollm3": ("SmolLM3Config", "dense", {}),
    "starcoder2": ("Starcoder2Config", "dense", {}),
    "stablelm": ("StableLmConfig", "no kwargs", {}),
    "nemotron": ("NemotronConfig", "no kwargs", {}),
    "gpt2": ("GPT2Config", "dense", {}),
    "gpt_neox": ("GPTNeoXConfig", "dense", {}),
    "opt": ("OPTConfig", "dense", {}),
    "olmoe": ("OlmoeConfig", "moe", {}),
    "qwen2_moe": ("Qwen2MoeConfig", "moe", {"use_sliding_window": True, "max_window_layers": 2}),
    "helium": ("HeliumConfig", "dense", {}),
    "exaone4": ("Exaone4Config", "window", {"sliding_window_pattern": 2}),
    "xlstm": ("xLSTMConfig", "ssm", {"num_heads": 2, "chunk_size": 16}),
    "lfm3": ("Lfm3Config", "conv", _CONV),
    "mixtral": ("MixtralConfig", "moe", {}),
    "qwen3_moe": ("Qwen3MoeConfig", "moe", {}),
    "gpt_oss": ("GptOssConfig", "sinks", _SLIDING),
    "deepseek_v3": ("DeepseekV3Config", "mla", {"num_key_value_heads": 4}),
    "mamba": ("MambaConfig", "ssm", {}),
    "falcon_mamba": ("FalconMambaConfig", "ssm", {}),
    "mamba2": ("Mamba2Config", "ssm", {}),
    "bamba": ("BambaConfig", "ssm", {}),
    "granitemoehybrid": ("GraniteMoeHybridConfig", "ssm", {}),
    "falcon_h1": ("FalconH1Config", "ssm", {}),
    "nemotron_h": ("NemotronHConfig", "ssm", {}),
    "zamba2": ("Zamba2Config", "ssm", {}),
    "jamba": ("JambaConfig", "ssm", {}),
    "qwen3_next": ("Qwen3NextConfig", "delta", _DELTA),
    "qwen3_5": ("Qwen3_5TextConfig", "delta", _DELTA),
    "lfm2": ("Lfm2Config", "conv", _CONV),
    "recurrent_gemma": ("RecurrentGemmaConfig", "ssm", {}),
    "minimax": ("MiniMaxConfig", "delta", {}),
    "olmo_hybrid": ("OlmoHybridConfig", "delta", _DELTA),
    "kimi_linear": (
        "KimiLinearConfig",
        "delta",
        {**_DELTA, "num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse"]},
    ),
}


class Family(NamedTuple):
    """A model family: its config class in transformers, its kind, and the arguments that make it tiny."""

    config: str
    kind: str
    arguments: dict[str, Any]

    @property
    def experts(self) -> bool:
        return any("experts" in name for name in self.arguments) and self.config != "NemotronHConfig"


def _family(config: str, kind: str, own: dict[str, Any]) -> Family:
    arguments = arguments_of(getattr(transformers, config), {"vocab_size": VOCAB, **own})
    window = {name: 5 for name in arguments if name in ("sliding_window", "attention_window_size")}
    return Family(config, kind, arguments | window)


# The oldest transformers that is supported lacks some.
FAMILIES = {name: _family(*row) for name, row in _TABLE.items() if hasattr(transformers, row[0])}


def build(name: str, attention: str, *, seed: int = 0, **options: Any) -> nn.Module:
    """Build one family with random weights, the same for every ``attention``."""
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**family.arguments)
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, **options)
    model: nn.Module = made
    return model


def build_in_double(name: str) -> nn.Module:
    """Build one family in fp64 for training; "eager" experts, as grouped products know no fp64."""
    return build(name, "thd", experts_implementation="eager").double().train()
