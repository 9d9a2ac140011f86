"""DeepSeek-V4's config -> layers that attend to compressed blocks and carry several residual streams.

Counted as transformers computes them, to the last projection; h is the hidden size, n the streams of the
hyper-connections, D the size of a head. A sequence of fewer tokens than a block has no compressed key.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_thd.flops.families import parts
from lightning_thd.flops.families.experts import active_experts
from lightning_thd.flops.families.sizes import Sizes
from lightning_thd.flops.terms import Layer, Term, matmul, recurrence, scores
from lightning_thd.stats import Blocks

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


def deepseek_v4(sizes: Sizes) -> list[Layer]:
    """Return the layers of DeepSeek-V4 between embedding and logits."""
    streams = sizes.size("hc_mult")
    layers = []
    for index, kind in enumerate(sizes.get("layer_types", default=())):
        experts = parts.experts(
            sizes.hidden,
            sizes.size("moe_intermediate_size"),
            num_experts=sizes.size("n_routed_experts", "num_local_experts"),
            top_k=active_experts(sizes, index),
            shared=sizes.size("moe_intermediate_size"),
        )
        terms = [
            *_streams(sizes.hidden, streams),
            *_attention(sizes, kind),
            # what the streams mix afterwards has to be there again in the backward
            *(replace(term, last=False) for term in experts),
            *_streams(sizes.hidden, streams, last=True),
        ]
        layers.append(Layer(path=f"layers.{index}", terms=tuple(terms)))
    joined = matmul("streams", streams * streams * sizes.hidden)
    return [*layers, Layer(path="hc_head", terms=(joined,), recomputable=False)]


def _streams(hidden: int, streams: int, *, last: bool = False) -> list[Term]:
    """Return a hyper-connection's terms: n + n + n^2 coefficients out of all streams, an n x n product."""
    mix = recurrence("stream_mix", 2 * streams**2 * hidden)
    return [
        matmul("stream_weights", (2 + streams) * streams * streams * hidden),
        replace(mix, last=last),
    ]


def _attention(sizes: Sizes, kind: str) -> list[Term]:
    """Return the terms of attention with one key head, a window, and compressed blocks."""
    hidden, heads, head_dim, rank = sizes.hidden, sizes.heads, sizes.head_dim, sizes.size("q_lora_rank")
    groups, group_rank = sizes.size("o_groups"), sizes.size("o_lora_rank")
    return [
        matmul("q", rank * (hidden + heads * head_dim)),
        matmul("kv", hidden * head_dim),
        *_compressed(sizes, kind),
        scores(heads, head_dim, head_dim, window=sizes.size("sliding_window")),
        matmul("out_groups", heads * head_dim * group_rank),
        matmul("out", groups * group_rank * hidden),
    ]


def _compressed(sizes: Sizes, kind: str) -> list[Term]:
    """Return the terms of attention to compressed keys: compressing, choosing blocks, and query-key pairs."""
    if kind == "sliding_attention":
        return []
    rates = sizes.get("compress_rates", default={_SPARSE: 4, _HEAVY: 128})
    if kind not in rates:
        raise ValueError(
            f"model_type={sizes.model_type!r} has a layer of type {kind!r}, for which compress_rates={rates} "
            "says nothing. Add the tokens of a block of that type."
        )
    sparse = kind == _SPARSE
    blocks = Blocks(rates[kind], sizes.size("index_topk") if sparse else None)
    heads, head_dim = sizes.heads, sizes.head_dim
    return [
        matmul("compressor", 2 * sizes.hidden * head_dim * (2 if sparse else 1)),
        *(_choice(sizes, rates[kind]) if sparse else ()),
        scores(heads, head_dim, head_dim, window=blocks, name="blocks"),
    ]


def _choice(sizes: Sizes, rate: int) -> list[Term]:
    """Return the terms of the indexer, which has its own compressor; no gradient passes a choice."""
    heads, head_dim = sizes.size("index_n_heads"), sizes.size("index_head_dim")
    projections = sizes.size("q_lora_rank") * heads * head_dim + sizes.hidden * (4 * head_dim + heads)
    terms = [
        matmul("indexer", projections),
        # the weighted sum over heads is one more product
        scores(heads, head_dim, 1, window=Blocks(rate), name="indexer_scores"),
    ]
    return [replace(term, input_grad=0, weight_grad=0) for term in terms]
