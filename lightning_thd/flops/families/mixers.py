"""Config and layer index -> the terms that mix tokens: attention, state space, linear attention."""

from __future__ import annotations

from lightning_thd.flops.families import parts
from lightning_thd.flops.families.sizes import Sizes
from lightning_thd.flops.terms import Term
from lightning_thd.stats import Chunk, Window

# transformers 5.15 names DeepSeek's indexed attention after the family
_ATTENTION = (
    *("full_attention", "attention", "sliding_attention", "chunked_attention", "indexed_attention"),
    "deepseek_sparse_attention",
)


# families whose window is off until use_sliding_window says otherwise
_WINDOW_ASKED = ("qwen2", "qwen3", "smollm3")


def mixer(sizes: Sizes, index: int) -> list[Term]:
    """Return the terms by which layer ``index`` mixes its tokens."""
    if sizes.model_type == "falcon_h1":  # both in every layer, side by side
        return [*_mamba2(sizes), *_attention(sizes, index)]
    kinds = sizes.get("layers_block_type", "layer_types")
    kind = kinds[index] if kinds else "mamba" if sizes.model_type in _SCANS_ONLY else "full_attention"
    if sizes.model_type == "zamba2":
        return _mamba2(sizes)
    if kind in _ATTENTION:
        return _attention(sizes, index)
    if kind == "conv":
        return parts.short_conv(sizes.hidden, kernel=sizes.size("conv_L_cache"))
    if kind in ("linear_attention", "mamba") and sizes.model_type in _LINEAR:
        return _LINEAR[sizes.model_type](sizes)
    raise ValueError(
        f"Layer {index} of model_type={sizes.model_type!r} is a {kind!r}, for which no FLOP count is known. "
        f"Register the family: FlopsModel.register({sizes.model_type!r}, builder)."
    )


def window_of(sizes: Sizes, index: int) -> Window | None:
    """Return the attention window of layer ``index``; None when it sees its whole sequence."""
    kinds = sizes.get("layer_types")
    if kinds:
        if kinds[index] == "chunked_attention":
            return Chunk(sizes.size("attention_chunk_size"))
        windowed = kinds[index] == "sliding_attention"
    else:
        windowed = sizes.get("use_sliding_window", default=not sizes.model_type.startswith(_WINDOW_ASKED))
    size = sizes.get("sliding_window")
    return size if windowed and isinstance(size, int) and size > 0 else None


def _attention(sizes: Sizes, index: int) -> list[Term]:
    if sizes.get("kv_lora_rank"):
        latent = parts.latent_attention(
            sizes.hidden,
            sizes.heads,
            q_rank=sizes.get("q_lora_rank"),
            kv_rank=sizes.size("kv_lora_rank"),
            nope=sizes.size("qk_nope_head_dim"),
            rope=sizes.size("qk_rope_head_dim"),
            v_dim=sizes.size("v_head_dim"),
            top_k=sizes.get("index_topk"),
        )
        return [*_indexer(sizes, index), *latent]
    return parts.attention(
        sizes.hidden,
        sizes.heads,
        _kv_heads(sizes),
        sizes.head_dim,
        window=window_of(sizes, index),
        gate=sizes.model_type in _GATED_ATTENTION,
    )


_GATED_ATTENTION = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def _indexer(sizes: Sizes, index: int) -> list[Term]:
    """Return the terms of sparse attention's indexer, where a layer has one of its own."""
    kinds = sizes.get("indexer_types")
    if not sizes.get("index_topk") or (kinds and kinds[index] == "shared"):
        return []
    return parts.indexer(
        sizes.hidden,
        sizes.size("q_lora_rank"),
        heads=sizes.size("index_n_heads"),
        head_dim=sizes.size("index_head_dim"),
    )


def _kv_heads(sizes: Sizes) -> int:
    if sizes.model_type == "falcon":
        if sizes.get("new_decoder_architecture"):
            return sizes.size("num_kv_heads")
        return 1 if sizes.get("multi_query") else sizes.heads
    if sizes.model_type == "gpt_bigcode":  # its class may have counted the heads before they were set
        return 1 if sizes.get("multi_query", default=True) else sizes.heads
    return sizes.kv_heads


def _mamba1(sizes: Sizes) -> list[Term]:
    expand = sizes.size("mamba_expand", "expand", default=2)
    jamba = sizes.model_type == "jamba"
    return parts.mamba1(
        sizes.hidden,
        expand * sizes.hidden if jamba else sizes.size("intermediate_size", default=expand * sizes.hidden),
        state=sizes.size("mamba_d_state", "state_size"),
        dt_rank=sizes.size("mamba_dt_rank", "time_step_rank"),
    )


def _mamba2(sizes: Sizes) -> list[Term]:
    heads = sizes.size("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")
    names = ("mamba_d_head", "mamba_headdim", "mamba_head_dim", "head_dim")
    return parts.mamba2(
        sizes.hidden,
        heads,
        sizes.size(*names, default=sizes.optional("mamba_expand") * sizes.hidden // heads),
        groups=sizes.size("mamba_n_groups", "mamba_ngroups", "n_groups"),
        state=sizes.size("mamba_d_state", "ssm_state_size", "state_size"),
    )


def _gated_delta(sizes: Sizes) -> list[Term]:
    return parts.gated_delta(
        sizes.hidden,
        qk_heads=sizes.size("linear_num_key_heads"),
        qk_dim=sizes.size("linear_key_head_dim"),
        v_heads=sizes.size("linear_num_value_heads"),
        v_dim=sizes.size("linear_value_head_dim"),
        kernel=sizes.size("linear_conv_kernel_dim"),
    )


def _kimi_delta(sizes: Sizes) -> list[Term]:
    return parts.kimi_delta(
        sizes.hidden,
        heads=sizes.size("linear_num_heads"),
        head_dim=sizes.size("linear_head_dim"),
        kernel=sizes.size("linear_conv_kernel_dim"),
    )


_SCANS_ONLY = ("mamba", "mamba2", "falcon_mamba")
_LINEAR = {
    "kimi_linear": _kimi_delta,
    **dict.fromkeys(("bamba", "granitemoehybrid", "nemotron_h", "mamba2"), _mamba2),
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), _mamba1),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), _gated_delta),
}
