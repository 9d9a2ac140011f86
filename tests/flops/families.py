"""Small configs of many model families, and torch's own count of their matmuls on the meta device."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.flop_counter import FlopCounterMode

_BASE = {
    "vocab_size": 211, "hidden_size": 96, "intermediate_size": 136, "num_hidden_layers": 4, "head_dim": 24,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MOE = {"num_experts_per_tok": 2, "num_local_experts": 4}
_MLA = {
    "num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 28, "qk_rope_head_dim": 8, "head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 18, "moe_intermediate_size": 40, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
_DSA = {**_MLA, "index_topk": 16, "index_n_heads": 3, "index_head_dim": 20}
_HYBRID = {"layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]}
_DELTA = {
    **_HYBRID, "linear_key_head_dim": 10, "linear_value_head_dim": 14, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 44,
    "num_experts_per_tok": 2, "num_experts": 8,
}  # fmt: skip
_MAMBA2 = {
    "mamba_n_heads": 12, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_expand": 2,
    "mamba_chunk_size": 8,
}  # fmt: skip

_ROUTED = {"moe_intermediate_size": 40, "num_experts_per_tok": 2}
_EXPERTS = {**_ROUTED, "num_experts": 8}
_N_ROUTED = {**_ROUTED, "n_routed_experts": 8}
_GROUPED = {**_N_ROUTED, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_WINDOW = {"sliding_window": 16}
_PLAIN: dict[str, Any] = {}
_NO_HEAD: dict[str, Any] = {"head_dim": None}
_EQUAL_HEADS = {**_NO_HEAD, "num_key_value_heads": None}
_OWN_WIDTH = {**_EQUAL_HEADS, "intermediate_size": None}
_WINDOW_NO_HEAD = {**_NO_HEAD, **_WINDOW}
_OLMOE = {**_NO_HEAD, "num_experts_per_tok": 2, "num_experts": 8}
_MAMBA = {**_EQUAL_HEADS, "num_attention_heads": None, "state_size": 10, "time_step_rank": 6}
_DELTA_SIZES = {"linear_key_head_dim": 10, "linear_value_head_dim": 14, "linear_num_value_heads": 4}

# family -> what is unlike _BASE; None drops a key
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "qwen3", "gemma", "nemotron", "arcee", "glm", "glm4", "cwm"), _PLAIN),
    **dict.fromkeys(("hyperclovax", "internlm3", "iquestcoder", "jais2", "nanochat", "ernie4_5"), _PLAIN),
    **dict.fromkeys(("seed_oss", "hunyuan_v1_dense", "ministral3"), _PLAIN),
    **dict.fromkeys(("mistral", "gemma2", "cohere2", "granite_swa", "vaultgemma", "ministral"), _WINDOW),
    **dict.fromkeys(("phi", "phi3", "stablelm", "olmo2", "granite", "cohere", "apertus"), _NO_HEAD),
    **dict.fromkeys(("smollm3", "bitnet", "phi4_multimodal", "olmo"), _NO_HEAD),
    **dict.fromkeys(("gpt_neox", "biogpt", "persimmon"), _EQUAL_HEADS),
    **dict.fromkeys(("bloom", "gpt_bigcode"), _OWN_WIDTH),
    **dict.fromkeys(("starcoder2", "olmo3"), _WINDOW_NO_HEAD),
    **dict.fromkeys(("mixtral", "minimax_m2"), _MOE),
    **dict.fromkeys(("olmoe", "flex_olmo"), _OLMOE),
    **dict.fromkeys(("hy_v3", "mellum"), _EXPERTS),
    **dict.fromkeys(("glm4_moe_lite", "axk1", "deepseek_v2", "deepseek_v3"), _MLA),
    **dict.fromkeys(("glm_moe_dsa", "deepseek_v32"), _DSA),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text"), _DELTA),
    **dict.fromkeys(("mamba", "falcon_mamba"), _MAMBA),
    "qwen2": {**_WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 56, "mlp_only_layers": [1]},
    "qwen3_moe": {**_ROUTED, "num_local_experts": 8},
    "gemma3_text": {**_WINDOW, "sliding_window_pattern": 2},
    "phimoe": {**_MOE, **_NO_HEAD},
    "gpt2": {**_OWN_WIDTH, "pad_token_id": None},
    "gptj": {**_OWN_WIDTH, "rotary_dim": 8},
    "opt": {**_OWN_WIDTH, "ffn_dim": 136, "word_embed_proj_dim": 96},
    "falcon": {**_OWN_WIDTH, "ffn_hidden_size": 136},
    "granitemoe": {**_MOE, **_NO_HEAD},
    "granitemoeshared": {**_MOE, **_NO_HEAD, "shared_intermediate_size": 50},
    "cohere2_moe": {**_WINDOW, "num_experts_per_tok": 2, "num_experts": 4},
    "exaone_moe": {**_EXPERTS, **_WINDOW},
    "granitemoe_swa": {**_MOE, **_WINDOW},
    "kimi_linear": {
        **_MLA,
        **_HYBRID,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "q_lora_rank": None,
        "num_local_experts": 8,
        "linear_head_dim": 12,
        "linear_num_heads": 5,
    },
    "lfm2": {**_NO_HEAD, "layer_types": ["conv", "full_attention", "conv", "conv"]},
    "lfm2_moe": {
        **_EXPERTS,
        **_NO_HEAD,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "num_dense_layers": 1,
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": [1, 2, 2, 1]},
    "gemma3n_text": {
        **_WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [136, 120, 136, 104],
        "vocab_size_per_layer_input": 211,
        "hidden_size_per_layer_input": 20,
        "altup_num_inputs": 3,
        "num_kv_shared_layers": 2,
        "laurel_rank": 7,
        "activation_sparsity_pattern": [0.0] * 4,  # its threshold is read from the device
    },
    "gemma4_text": {
        **_WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": 211,
        "hidden_size_per_layer_input": 20,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 40,
    },
    "gemma4_unified_text": {
        **_WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
        "global_head_dim": 32,
    },
    "deepseek_v4": {
        **_N_ROUTED,
        **_WINDOW,
        "num_key_value_heads": 1,
        "q_lora_rank": 20,
        "layer_types": [
            *("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"),
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "hc_mult": 3,
        "o_groups": 2,
        "o_lora_rank": 14,
        "index_n_heads": 3,
        "index_head_dim": 16,
        "index_topk": 5,
        "num_nextn_predict_layers": 0,
        "intermediate_size": None,
    },
    "minicpm3": {key: value for key, value in _MLA.items() if "expert" not in key and "group" not in key},
    "olmo_hybrid": {
        **_HYBRID,
        **_NO_HEAD,
        **_DELTA_SIZES,
        "linear_num_key_heads": 4,
        "linear_conv_kernel_dim": 4,
    },
    "solar_open": _N_ROUTED,
    "glm4_moe": {**_GROUPED, "num_nextn_predict_layers": 0},
    "dots1": {**_GROUPED, "n_shared_experts": 1},
    "exaone4": {**_NO_HEAD, **_WINDOW, "sliding_window_pattern": 4},
    "gpt_oss": {**_MOE, **_WINDOW},
    "llama4_text": {
        "num_experts_per_tok": 1, "num_local_experts": 4, "intermediate_size_mlp": 200,
        "interleave_moe_layer_step": 2, "attention_chunk_size": 16,
    },
    "qwen3_5_text": {k: v for k, v in _DELTA.items() if "exp" not in k and "moe" not in k},
    "helium": {"head_dim": 16},
    "ernie4_5_moe": {
        "moe_intermediate_size": 40, "moe_k": 2, "moe_num_experts": 8, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1, "moe_layer_end_index": 3,
    },
    "codegen": {**_OWN_WIDTH, "rotary_dim": 8, "num_attention_heads": 8},
    "mamba2": {
        "state_size": 10, "num_heads": 12, "head_dim": 16, "n_groups": 2, "chunk_size": 8,
        "num_attention_heads": None, "num_key_value_heads": None,
    },
    "bamba": {**_MAMBA2, **_NO_HEAD, "attn_layer_indices": [2]},
    "granitemoehybrid": {**_MAMBA2, **_MOE, **_HYBRID, **_NO_HEAD, "shared_intermediate_size": 50},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 192, "head_dim": 16},
    "nemotron_h": {
        **_ROUTED, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "ssm_state_size": 10, "mamba_num_heads": 12, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8,
        "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 52,
    },
    "jamba": {
        **_NO_HEAD, "num_experts_per_tok": 2, "num_experts": 4, "attn_layer_period": 2,
        "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "mamba_d_state": 10, "mamba_dt_rank": 6, "use_mamba_kernels": False,
    },
    "zamba2": {
        **_NO_HEAD, "mamba_d_state": 10, "n_mamba_heads": 12, "mamba_ngroups": 2, "chunk_size": 8,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_key_value_heads": 6, "adapter_rank": 5,
    },
}  # fmt: skip


_ROPE = {"rope_type": "default", "mrope_section": [4, 4, 4], "rope_theta": 10000.0}
_TEXT = {**_BASE, "rope_parameters": _ROPE}
_TOWER = {
    "depth": 3,
    "hidden_size": 48,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
}
_WIDE_TOWER = {**_TOWER, "intermediate_size": 56, "out_hidden_size": 96}
_PLACED_TOWER = {**_WIDE_TOWER, "num_position_embeddings": 64}
# multimodal family -> its text and vision config
VISION: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (_TEXT, {**_TOWER, "embed_dim": 48, "hidden_size": 96, "mlp_ratio": 3}),
    "qwen2_5_vl": (_TEXT, {**_WIDE_TOWER, "fullatt_block_indexes": [1], "window_size": 56}),
    "qwen3_vl": (_TEXT, {**_PLACED_TOWER, "deepstack_visual_indexes": [0, 1]}),
    "qwen3_vl_moe": ({**_TEXT, **_EXPERTS}, {**_PLACED_TOWER, "deepstack_visual_indexes": [0]}),
    "qwen3_5": ({**_TEXT, **FAMILIES["qwen3_5_text"]}, _PLACED_TOWER),
    "qwen3_5_moe": ({**_TEXT, **_DELTA}, _PLACED_TOWER),
}


def vision_config(family: str) -> Any:
    """A small config of a multimodal family."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    text, tower = VISION[family]
    return CONFIG_MAPPING[family](text_config=text, vision_config=tower)


def small_config(family: str, **changes: Any) -> Any:
    """A config of ``family`` whose sizes differ enough that no two terms can be confused."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    settings = {k: v for k, v in {**_BASE, **FAMILIES[family], **changes}.items() if v is not None}
    return CONFIG_MAPPING[family](**settings)


def meta_model(config: Any) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="batched_mm"
        )
    return model.eval()


ENCODERS = (
    *("bert", "roberta", "xlm-roberta", "camembert", "ernie", "data2vec-text", "modernbert", "eurobert"),
    *("distilbert", "mpnet"),
)


def encoder(family: str, **changes: Any) -> tuple[Any, torch.nn.Module]:
    """A small config of an encoder, and its masked-language model on the meta device."""
    from transformers import AutoModelForMaskedLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    dropped = ("head_dim", "num_key_value_heads")
    settings = {key: value for key, value in _BASE.items() if key not in dropped}
    if family == "distilbert":
        names = {"hidden_size": "dim", "intermediate_size": "hidden_dim"}
        names |= {"num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
        settings = {names.get(key, key): value for key, value in settings.items()}
    config = CONFIG_MAPPING[family](**{**settings, **changes})
    with torch.device("meta"):
        model = AutoModelForMaskedLM.from_config(config, attn_implementation="eager")
    return config, model.eval()


def counted(model: torch.nn.Module, total: int, *, backward: bool = False) -> Counter[str]:
    """Torch's FLOPs of one row of ``total`` tokens, by operator: mm and addmm are projections."""
    ids = torch.zeros(1, total, dtype=torch.long, device="meta")
    # transformers looks for packs in the position ids, which reads the device: tell it that there are none
    no_packs = patch("transformers.masking_utils.find_packed_sequence_indices", lambda _: None)

    with no_packs, FlopCounterMode(display=False) as counter:
        out = model(input_ids=ids, use_cache=False)
        if backward:
            out.logits.sum().backward()

    by_op: Counter[str] = Counter()
    counts = counter.get_flop_counts()
    for op, flops in counts["Global"].items():
        by_op[str(op).split(".")[-1]] += flops

    # older transformers multiply positions by frequencies as matrices; newer ones element by element
    for part in (name for name in counts if "rotary" in name.rpartition(".")[2]):
        for op, flops in counts[part].items():
            by_op[str(op).split(".")[-1]] -= flops

    return by_op


def attended_flops(config: Any, lengths: list[int]) -> int:
    """FLOPs of the scores of one forward pass, from the masks the model's own code builds.

    The attention function is replaced by one that reads its mask: 2 FLOPs x heads x (query size + value
    size) for every pair (query, key) that a layer allows. 0 for models that do not ask for the function.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    found = 0

    def probe(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> Any:
        nonlocal found
        batch, heads, total, qk_dim = query.shape
        assert batch == 1
        allowed = total * key.shape[2] if mask is None else (mask[0, 0] == 0).sum().item()
        found += 2 * heads * (qk_dim + value.shape[-1]) * allowed
        return query.new_zeros(1, total, heads, value.shape[-1]), None

    AttentionInterface.register("flops_probe", probe)
    AttentionMaskInterface.register("flops_probe", eager_mask)
    auto = AutoModelForMaskedLM if config.model_type in ENCODERS else AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="flops_probe").eval()
    with torch.no_grad():
        for length in lengths:
            ids = torch.full((1, length), 7)
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return found
