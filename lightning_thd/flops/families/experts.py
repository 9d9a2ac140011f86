"""A config -> which layers hold experts, and the terms of one such layer."""

from __future__ import annotations

from lightning_thd.flops.families import parts
from lightning_thd.flops.families.sizes import Sizes
from lightning_thd.flops.terms import Term

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def expert_layers(sizes: Sizes) -> set[int]:
    """Return the indices of the layers whose MLP is a mixture of experts."""
    count = sizes.num_layers
    if sizes.optional(*_NUM_EXPERTS) == 0 and not sizes.optional("shared_intermediate_size"):
        return set()
    if (named := sizes.get("moe_layers")) is not None:
        return set(named)
    if (kinds := sizes.get("mlp_layer_types")) is not None:
        return {index for index, kind in enumerate(kinds) if kind == "sparse"}
    if (dense := sizes.get("first_k_dense_replace", "num_dense_layers")) is not None:
        return set(range(dense, count))
    if (period := sizes.get("expert_layer_period")) is not None:
        if sizes.optional(*_NUM_EXPERTS) == 1:
            return set()
        offset = sizes.size("expert_layer_offset")
        return {index for index in range(count) if (index - offset) % period == 0}
    if (first := sizes.get("moe_layer_start_index")) is not None:
        step, end = sizes.size("moe_layer_interval"), sizes.size("moe_layer_end_index")
        return {index for index in range(first, end + 1) if (index + 1) % step == 0}
    step = sizes.size("decoder_sparse_step", default=1)
    dense_layers = set(sizes.get("mlp_only_layers", default=()))
    return {index for index in range(count) if index not in dense_layers and (index + 1) % step == 0}


def moe(sizes: Sizes, index: int, *, gated: bool) -> list[Term]:
    """Return the terms of one layer of experts."""
    hidden, shared = sizes.hidden, shared_size(sizes)
    num_experts = sizes.optional(*_NUM_EXPERTS)
    if num_experts == 0:  # granitemoehybrid without experts keeps the shared MLP
        return parts.mlp(hidden, shared, gated=gated, name="shared")
    return parts.experts(
        hidden,
        sizes.inner
        if sizes.model_type == "hunyuan_v1_moe"
        else sizes.size("moe_intermediate_size", default=sizes.inner),
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
    mean = sum(top_k) / len(top_k) if isinstance(top_k, (list, tuple)) else float(top_k)
    return mean / (sizes.optional(*_NUM_EXPERTS) or 1) or 1.0


def active_experts(sizes: Sizes, index: int) -> int:
    """Return how many routed experts a token goes through in layer ``index``."""
    given = sizes.get(*_TOP_K)
    return int(given[index]) if isinstance(given, (list, tuple)) else sizes.size(*_TOP_K)


def shared_size(sizes: Sizes) -> int:
    """Return the intermediate size of all shared experts together, 0 for none."""
    if sizes.model_type in ("llama4_text", "hunyuan_v1_moe"):
        return sizes.inner
    names = (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
    )
    if size := sizes.optional(*names):
        return size
    count = sizes.optional("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")
    return count * (sizes.optional("moe_intermediate_size") or sizes.inner)


_SHARED_GATE = ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")
