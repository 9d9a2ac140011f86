"""A config and a layer index -> the terms that mix tokens (attention, scans), and the terms of experts."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_thd.flops.families import parts
from lightning_thd.flops.families.sizes import Sizes
from lightning_thd.flops.terms import Term
from lightning_thd.stats import Chunk, Window

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def expert_layers(sizes: Sizes) -> set[int]:
    """Return the indices of the layers that ``moe`` describes: with experts, or with only a shared MLP."""
    if sizes.optional(*_NUM_EXPERTS) == 0 and not sizes.optional("shared_intermediate_size"):
        return set()

    # Each family has its own way to say it; at most one of these keys is in a config.
    count = sizes.num_layers
    listed = sizes.get("moe_layers")
    if listed is not None:
        return set(listed)
    kinds = sizes.get("mlp_layer_types")
    if kinds is not None:
        return {index for index, kind in enumerate(kinds) if kind == "sparse"}
    dense = sizes.get("first_k_dense_replace", "num_dense_layers")
    if dense is not None:
        return set(range(dense, count))
    period = sizes.get("expert_layer_period")
    if period is not None:
        if sizes.optional(*_NUM_EXPERTS) == 1:  # Jamba then builds plain MLPs
            return set()
        offset = sizes.size("expert_layer_offset")
        return {index for index in range(count) if (index - offset) % period == 0}
    first = sizes.get("moe_layer_start_index")
    if first is not None:
        interval = sizes.size("moe_layer_interval")
        last = sizes.size("moe_layer_end_index")
        return {index for index in range(first, last + 1) if (index + 1) % interval == 0}
    step = sizes.size("decoder_sparse_step", default=1)
    dense_layers = set(sizes.get("mlp_only_layers", default=()))
    return {index for index in range(count) if index not in dense_layers and (index + 1) % step == 0}


def moe(sizes: Sizes, index: int, *, gated: bool) -> list[Term]:
    """Return the terms of one layer of experts."""
    shared = shared_size(sizes)
    num_experts = sizes.optional(*_NUM_EXPERTS)
    if num_experts == 0:  # granitemoehybrid without experts keeps the shared MLP
        return parts.mlp(sizes.hidden, shared, gated=gated, name="shared")

    inner = sizes.size("moe_intermediate_size", default=sizes.inner)
    if sizes.model_type == "hunyuan_v1_moe":  # its experts have the size of a dense MLP
        inner = sizes.inner
    return parts.experts(
        sizes.hidden,
        inner,
        num_experts=num_experts,
        top_k=active_experts(sizes, index),
        gated=gated,
        shared=shared,
        shared_gate=bool(shared) and sizes.model_type in _SHARED_GATE,
        latent=sizes.get("moe_latent_size"),
        shared_last=sizes.model_type != "ernie4_5_moe",
    )


def active_share(sizes: Sizes) -> float:
    """Return the share of the routed experts that a token goes through; 1.0 without experts."""
    top_k = sizes.get(*_TOP_K, default=0)
    per_layer = top_k if isinstance(top_k, list | tuple) else [top_k]
    active = sum(per_layer) / len(per_layer)
    num_experts = sizes.optional(*_NUM_EXPERTS)
    if not active or not num_experts:
        return 1.0
    return active / num_experts


def active_experts(sizes: Sizes, index: int) -> int:
    """Return how many routed experts a token goes through in layer ``index``."""
    top_k = sizes.get(*_TOP_K)
    if isinstance(top_k, list | tuple):
        return int(top_k[index])
    return sizes.size(*_TOP_K)


def shared_size(sizes: Sizes) -> int:
    """Return the intermediate size of all shared experts together, 0 for none."""
    if sizes.model_type in ("llama4_text", "hunyuan_v1_moe"):
        return sizes.inner
    whole = sizes.optional(
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"
    )
    if whole:
        return whole
    count = sizes.optional("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")
    size_of_one = sizes.optional("moe_intermediate_size") or sizes.inner
    return count * size_of_one


_SHARED_GATE = ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")
_ATTENTION = ("full_attention", "attention", "sliding_attention", "chunked_attention", "indexed_attention")
# Families that ignore their window unless use_sliding_window is set: the beginnings of their model_type.
_WINDOW_OFF = ("qwen2", "qwen3", "smollm3")


def mixer(sizes: Sizes, index: int) -> list[Term]:
    """Return the terms by which layer ``index`` mixes its tokens."""
    if sizes.model_type == "falcon_h1":  # every layer runs both, side by side
        return [*_mamba2(sizes), *_attention(sizes, index)]
    if sizes.model_type == "zamba2":
        return _mamba2(sizes)

    kinds = sizes.get("layers_block_type", "layer_types")
    kind = "mamba" if sizes.model_type in _SCANS_ONLY else "full_attention"
    if kinds:
        kind = kinds[index]
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
    """Return the attention window of layer ``index``; None if its tokens see their whole sequence."""
    kinds = sizes.get("layer_types")
    if kinds:
        if kinds[index] == "chunked_attention":
            return Chunk(sizes.size("attention_chunk_size"))
        windowed = kinds[index] == "sliding_attention"
    else:
        windowed = sizes.get("use_sliding_window", default=not sizes.model_type.startswith(_WINDOW_OFF))

    size = sizes.get("sliding_window")
    if sizes.model_type == "modernbert":  # a token sees its own key, and half of local_attention on each side
        size = sizes.size("local_attention") // 2 + 1
    elif size and sees_both_ways(sizes) and isinstance(sizes.config, Mapping):
        size = size // 2 + 1  # as in Gemma 3's config class; the number in config.json covers both sides
    if not windowed or not isinstance(size, int) or size <= 0:  # some configs switch a window off by 0
        return None
    return size


def sees_both_ways(sizes: Sizes) -> bool:
    """Return whether a token sees later tokens; a window of W then holds W - 1 keys on each side."""
    encoder = sizes.model_type in ("modernbert", "eurobert")
    return encoder or sizes.get("use_bidirectional_attention") in (True, "all")


def _attention(sizes: Sizes, index: int) -> list[Term]:
    """Return the terms of a layer's attention, latent (with its indexer, if it has one) or grouped-query."""
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
        both_ways=sees_both_ways(sizes),
    )


_GATED_ATTENTION = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def _indexer(sizes: Sizes, index: int) -> list[Term]:
    """Return the terms of a layer's own indexer; a "shared" layer uses that of a layer before it."""
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
    """Return the number of key heads, which two families say in ways of their own."""
    if sizes.model_type == "falcon":
        if sizes.get("new_decoder_architecture"):
            return sizes.size("num_kv_heads")
        return 1 if sizes.get("multi_query") else sizes.heads
    if sizes.model_type == "gpt_bigcode":  # its config may hold an outdated number
        return 1 if sizes.get("multi_query", default=True) else sizes.heads
    return sizes.kv_heads


def _mamba1(sizes: Sizes) -> list[Term]:
    inner = sizes.size("mamba_expand", "expand", default=2) * sizes.hidden
    if sizes.model_type != "jamba":  # whose intermediate_size is that of its MLPs
        inner = sizes.size("intermediate_size", default=inner)
    return parts.mamba1(
        sizes.hidden,
        inner,
        state=sizes.size("mamba_d_state", "state_size"),
        dt_rank=sizes.size("mamba_dt_rank", "time_step_rank"),
    )


def _mamba2(sizes: Sizes) -> list[Term]:
    heads = sizes.size("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")
    names = ("mamba_d_head", "mamba_headdim", "mamba_head_dim", "head_dim")
    head_dim = sizes.size(*names, default=sizes.optional("mamba_expand") * sizes.hidden // heads)
    return parts.mamba2(
        sizes.hidden,
        heads,
        head_dim,
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
