"""A transformers config class -> a config of the same family with two small layers, sub-configs included."""

from __future__ import annotations

import inspect
import re
from typing import Any

VOCAB = 128
HEADS, GROUPS, HEAD_SIZE = 4, 2, 8
HIDDEN = HEADS * HEAD_SIZE
LAYERS = 2
WINDOW = 8
END = 2  # of a sequence
MASK = 4  # a token that an encoder has to fill in

# By the names that configs share; a config takes those it has.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCAB),
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "dim",
            "embed_dim",
            "embedding_size",
            "word_embed_proj_dim",
            "out_hidden_size",
            "text_hidden_size",
        ),
        HIDDEN,
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "mlp_dim"),
        48,
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "num_layers",
            "n_layer",
            "n_layers",
            "encoder_layers",
            "decoder_layers",
            "depth",
        ),
        LAYERS,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
        ),
        HEADS,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), GROUPS),
    **dict.fromkeys(("head_dim", "attention_head_dim", "swa_head_dim", "global_head_dim", "d_kv"), HEAD_SIZE),
    **dict.fromkeys(
        ("sliding_window", "attention_window_size", "attention_chunk_size", "local_attention"), WINDOW
    ),
    **dict.fromkeys(
        (
            "attention_dropout",
            "attention_probs_dropout_prob",
            "hidden_dropout_prob",
            "hidden_dropout",
            "dropout",
            "attn_pdrop",
            "embd_pdrop",
            "resid_pdrop",
            "activation_dropout",
            "residual_dropout",
            "embedding_dropout",
            "attn_dropout",
            "layerdrop",
            "decoder_layerdrop",
            "encoder_layerdrop",
            "classifier_dropout",
            "dropout_rate",
            "resid_dropout",
            "embed_dropout",
        ),
        0.0,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2
    ),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), HEAD_SIZE),
    "qk_head_dim": 2 * HEAD_SIZE,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "floor_scale": WINDOW,
    "mask_token_id": MASK,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "image_size": 28,
    "patch_size": 14,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": END,
    "state_size": 8,
    "ssm_state_size": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_headdim": 16,
    "n_mamba_heads": 4,
    "mamba_ngroups": 1,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "mamba_expand": 2,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "mamba_dt_rank": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "lru_width": HIDDEN,
    "hidden_size_per_layer_input": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 4,
    "decoder_vocab_size": VOCAB,
}


# What the sizes above do not settle, by model_type.
_EXTRA: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
            for name in ("sliding_attention", "full_attention")
        },
    },
    # Sections of M-RoPE that only the model knows fit these head sizes.
    **{
        name: {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
        for name in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "paddleocr_vl_text")
    },
    "glm4v_text": {"hidden_size": HEADS * 64, "num_key_value_heads": GROUPS},
    "glm_ocr_text": {"head_dim": 64},
    "glm4v_moe_text": {"head_dim": 128},
    "cosmos3_edge_text": {"head_dim": 128},
    "ernie4_5_vl_moe_text": {"head_dim": 128},
    "hunyuan_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    },
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "glm5_next_text": {"index_kpool": 2},
    "molmo2_adapter": {"vision_feature_layer": [0, 1]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"head_dim": 16},
    "zamba": {
        "num_hidden_layers": 5,
        "layers_block_type": [*("linear_attention", "hybrid") * 2, "linear_attention"],
        "num_key_value_heads": 4,
        "head_dim": 16,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
    },
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "roc_bert": {
        "pronunciation_vocab_size": 16,
        "shape_vocab_size": 16,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "moshi": {"audio_vocab_size": 32},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "t5": {"decoder_start_token_id": 0},
    "xmod": {"default_language": "en_XX"},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "hidden_size": HIDDEN},
    },
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "nemotron_h": {"hybrid_override_pattern": "M*-", "num_hidden_layers": 3},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "block_size": 4},
}


def arguments_of(config_class: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """Give the arguments that make a config of a class small, without its inner configs."""
    known = _attributes(config_class)
    given = {name: value for name, value in _SIZES.items() if name in known}
    if "kv_lora_rank" in known:
        given["num_key_value_heads"] = HEADS
    return {**given, **_EXTRA.get(getattr(config_class, "model_type", ""), {}), **overrides}


def tiny(config_class: Any, overrides: dict[str, Any] | None = None) -> Any:
    """Build the smallest sensible config of a class; what it does not take is left out."""
    given = arguments_of(config_class, overrides or {})
    for name, inner in _inner_configs(config_class).items():
        given[name] = tiny(inner, given.get(name)).to_dict()
    while True:
        try:
            return config_class(**given)
        except Exception as error:
            field = re.search(r"Validation error for field '(\w+)'", str(error))
            if field is not None and field[1] in given:
                del given[field[1]]
            elif "num_key_value_heads" in str(error) and given.get("num_key_value_heads") == GROUPS:
                given["num_key_value_heads"] = HEADS
            else:
                raise


def _inner_configs(config_class: Any) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    try:
        default = config_class()
    except Exception:
        return {}
    return {
        name: type(value)
        for name in (getattr(config_class, "sub_configs", None) or {})
        if isinstance(value := getattr(default, name, None), PreTrainedConfig)
    }


def _attributes(config_class: Any) -> set[str]:
    known = set(inspect.signature(config_class.__init__).parameters)
    for base in config_class.__mro__:
        known |= set(vars(base).get("__annotations__", {}))
    return known | set(getattr(config_class, "attribute_map", {}))


def known(config_class: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return those overrides that a config class has a name for and that its family does not settle."""
    kind = getattr(config_class, "model_type", "")
    settled = _EXTRA.get(kind, {})
    names = _attributes(config_class)
    mine = {name: value for name, value in overrides.items() if name in names and name not in settled}
    text = _inner_configs(config_class).get("text_config")
    return mine if text is None else {**mine, "text_config": known(text, overrides)}
