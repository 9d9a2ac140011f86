"""Configs of Gemma 3n and Gemma 4 -> layers with inputs of their own, shared keys, and several streams.

Counted as transformers computes them, to the last projection; h is the hidden size, n the streams of AltUp
(Alternating Updates, arXiv:2301.13310), p the size of a layer's own input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_thd.flops.families import parts
from lightning_thd.flops.families.experts import active_experts
from lightning_thd.flops.families.mixers import window_of
from lightning_thd.flops.families.sizes import Sizes
from lightning_thd.flops.terms import Layer, Term, matmul, recurrence, scores


def gemma3n(sizes: Sizes) -> list[Layer]:
    """Return Gemma 3n's layers between embedding and logits: n streams, of which a layer computes one."""
    hidden, streams = sizes.hidden, sizes.size("altup_num_inputs")
    inner = sizes.get("intermediate_size")
    entry = Layer(
        path="altup_projections",
        terms=(matmul("altup_in", (streams - 1) * hidden * hidden),),
        recomputable=False,
    )
    layers = [*_own_inputs(sizes), entry]
    for index in range(sizes.num_layers):
        terms = [
            *_altup(hidden, streams),
            matmul("laurel", 2 * hidden * sizes.size("laurel_rank")),
            *_attention(sizes, index, heads=sizes.kv_heads, head_dim=sizes.head_dim),
            *parts.mlp(hidden, inner if isinstance(inner, int) else inner[index], last=False),
            *_own_input(sizes),
        ]
        layers.append(Layer(path=f"layers.{index}", terms=tuple(terms)))
    out = Layer(
        path="altup_unembed_projections",
        terms=(matmul("altup_out", (streams - 1) * hidden * hidden),),
        recomputable=False,
    )
    return [*layers, out]


def gemma4(sizes: Sizes) -> list[Layer]:
    """Return Gemma 4's layers between embedding and logits: wider heads where attention is global."""
    layers = _own_inputs(sizes)
    for index in range(sizes.num_layers):
        heads, head_dim = _heads(sizes, index)
        wide = 2 if sizes.get("use_double_wide_mlp") and _reads_others(sizes, index) else 1
        terms = [
            *_attention(sizes, index, heads=heads, head_dim=head_dim),
            *parts.mlp(sizes.hidden, wide * sizes.inner, last=False),
        ]
        if sizes.get("enable_moe_block"):
            terms += parts.experts(
                sizes.hidden,
                sizes.size("moe_intermediate_size"),
                num_experts=sizes.size("num_experts"),
                top_k=active_experts(sizes, index),
            )
        layers.append(Layer(path=f"layers.{index}", terms=(*terms, *_own_input(sizes))))
    return layers


def _own_inputs(sizes: Sizes) -> list[Layer]:
    """Return the projection of the embedding to each layer's own (per-layer) input."""
    width = sizes.optional("hidden_size_per_layer_input")
    if not width:
        return []
    term = matmul("own_inputs", sizes.hidden * sizes.num_layers * width)
    return [Layer(path="per_layer_model_projection", terms=(term,), recomputable=False)]


def _own_input(sizes: Sizes) -> list[Term]:
    """Return the terms of a layer's gate on its per-layer input, and of the projection back."""
    width = sizes.optional("hidden_size_per_layer_input")
    # a norm follows, which needs what the last of them gave
    return (
        [matmul("own_gate", sizes.hidden * width), matmul("own_out", width * sizes.hidden)] if width else []
    )


def _altup(hidden: int, streams: int) -> list[Term]:
    """Return the terms that predict and correct the streams: two routings and an n x n product."""
    return [
        matmul("altup", 2 * hidden * streams + streams**3 + streams**2),
        recurrence("altup_mix", 2 * hidden * streams**2),
    ]


def _attention(sizes: Sizes, index: int, *, heads: int, head_dim: int) -> list[Term]:
    hidden, queries = sizes.hidden, sizes.heads
    kinds = sizes.get("layer_types")
    one_for_both = sizes.get("attention_k_eq_v") and kinds and kinds[index] == "full_attention"
    made = 0 if _reads_others(sizes, index) else (1 if one_for_both else 2)
    return [
        matmul("qkv", hidden * head_dim * (queries + made * heads)),
        scores(queries, head_dim, head_dim, window=window_of(sizes, index)),
        matmul("out", queries * head_dim * hidden),
    ]


def _reads_others(sizes: Sizes, index: int) -> bool:
    """Return whether a layer uses the keys and values of an earlier one."""
    return index >= sizes.num_layers - sizes.optional("num_kv_shared_layers")


def _heads(sizes: Sizes, index: int) -> tuple[int, int]:
    """Return a layer's key heads and head size, which differ for global layers."""
    kinds = sizes.get("layer_types")
    kind = kinds[index] if kinds else None
    table: Any = sizes.get("per_layer_config")
    if table is not None and not isinstance(table, Mapping):  # transformers' view, which has every size
        own = Sizes(table[index])
        return own.kv_heads, own.head_dim
    if table is not None:
        own = Sizes(_row(table, index, kind))
        heads = own.size("num_key_value_heads", default=sizes.kv_heads)
        return heads, own.size("head_dim", default=sizes.head_dim)
    if kind != "full_attention":
        return sizes.kv_heads, sizes.head_dim
    shared = sizes.get("num_global_key_value_heads") if sizes.get("attention_k_eq_v", default=True) else None
    return shared or sizes.kv_heads, sizes.size("global_head_dim", default=512)


def _row(table: Mapping[Any, Any], index: int, kind: str | None) -> Any:
    """Return the entry of a saved table for a layer, by its number ("05") or its kind."""
    keys = (key for key in table if key == kind or (str(key).isdigit() and int(key) == index))
    return table[key] if (key := next(keys, None)) is not None else {}
