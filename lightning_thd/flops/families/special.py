"""Configs of DeepSeek-V4, Gemma 3n, Gemma 4, and the vision towers of Qwen-VL and Llava -> their layers.

Every projection that transformers computes is counted. Vision towers are counted as in Megatron-Bridge:
attention runs between all patches of a frame, or of a window in Qwen2.5-VL's windowed blocks, and is not
halved. The tower and every deepstack layer have a projector. The convolution that makes patches counts too.
Below, n is the number of streams of DeepSeek-V4's hyper-connections or of Gemma's AltUp (arXiv:2301.13310).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from lightning_thd.flops.families import parts
from lightning_thd.flops.families.layers import active_experts, window_of
from lightning_thd.flops.families.sizes import Sizes
from lightning_thd.flops.terms import Layer, Term, lone, matmul, recurrence, scores
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
            *_v4_attention(sizes, kind),
            # Not last: the backward needs the outputs, which the streams mix, so checkpointing reruns them.
            *(replace(term, last=False) for term in experts),
            *_streams(sizes.hidden, streams, last=True),
        ]
        layers.append(Layer(path=f"layers.{index}", terms=tuple(terms)))
    return [*layers, lone("hc_head", matmul("streams", streams * streams * sizes.hidden))]


def _streams(hidden: int, streams: int, *, last: bool = False) -> list[Term]:
    """Return a hyper-connection's terms: a projection of n streams to 2 n + n^2 weights, and n x n mixing."""
    mix = recurrence("stream_mix", 2 * streams**2 * hidden)
    return [matmul("stream_weights", (2 + streams) * streams * streams * hidden), replace(mix, last=last)]


def _v4_attention(sizes: Sizes, kind: str) -> list[Term]:
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
            "has no entry. Add the number of tokens per block of that type."
        )
    hidden, heads, head_dim, indexer = sizes.hidden, sizes.heads, sizes.head_dim, list[Term]()
    sparse, blocks = kind == _SPARSE, Blocks(rates[kind])
    if sparse:  # the indexer has its own compressor
        shape = {"heads": sizes.size("index_n_heads"), "head_dim": sizes.size("index_head_dim")}
        indexer = parts.indexer(hidden, sizes.size("q_lora_rank"), keys=4, window=blocks, **shape)
        blocks = Blocks(rates[kind], sizes.size("index_topk"))
    return [
        matmul("compressor", 2 * hidden * head_dim * (2 if sparse else 1)),
        *indexer,
        scores(heads, head_dim, head_dim, window=blocks, name="blocks"),
    ]


def gemma3n(sizes: Sizes) -> list[Layer]:
    """Return Gemma 3n's layers between embedding and logits: n streams; attention and MLP run on one."""
    hidden, streams = sizes.hidden, sizes.size("altup_num_inputs")
    inner = sizes.get("intermediate_size")
    widened = (streams - 1) * hidden * hidden
    layers = [*_layer_inputs_projection(sizes), lone("altup_projections", matmul("altup_in", widened))]
    for index in range(sizes.num_layers):
        terms = [
            # Two routings, hidden -> n: n^2 coefficients predict the streams, n correct them.
            matmul("altup", 2 * hidden * streams + streams**3 + streams**2),
            recurrence("altup_mix", 2 * hidden * streams**2),
            matmul("laurel", 2 * hidden * sizes.size("laurel_rank")),
            *_gemma_attention(sizes, index, heads=sizes.kv_heads, head_dim=sizes.head_dim),
            *parts.mlp(hidden, inner if isinstance(inner, int) else inner[index], last=False),
            *_layer_input(sizes),
        ]
        layers.append(Layer(path=f"layers.{index}", terms=tuple(terms)))
    return [*layers, lone("altup_unembed_projections", matmul("altup_out", widened))]


def gemma4(sizes: Sizes) -> list[Layer]:
    """Return Gemma 4's layers between embedding and logits: heads are wider in layers of global attention."""
    layers = _layer_inputs_projection(sizes)
    for index in range(sizes.num_layers):
        heads, head_dim = _gemma_heads(sizes, index)
        wide = 2 if sizes.get("use_double_wide_mlp") and _shares_kv(sizes, index) else 1
        terms = [
            *_gemma_attention(sizes, index, heads=heads, head_dim=head_dim),
            *parts.mlp(sizes.hidden, wide * sizes.inner, last=False),
        ]
        if sizes.get("enable_moe_block"):
            terms += parts.experts(
                sizes.hidden,
                sizes.size("moe_intermediate_size"),
                num_experts=sizes.size("num_experts"),
                top_k=active_experts(sizes, index),
            )
        layers.append(Layer(path=f"layers.{index}", terms=(*terms, *_layer_input(sizes))))
    return layers


def _layer_inputs_projection(sizes: Sizes) -> list[Layer]:
    """Return the projection of the embedding to the additional inputs of all layers, if there are any."""
    width = sizes.optional("hidden_size_per_layer_input")
    if not width:
        return []
    return [lone("per_layer_model_projection", matmul("own_inputs", sizes.hidden * sizes.num_layers * width))]


def _layer_input(sizes: Sizes) -> list[Term]:
    """Return the terms of the gate on a layer's additional input, and of the projection back."""
    width = sizes.optional("hidden_size_per_layer_input")
    macs = sizes.hidden * width
    # Not last: a norm follows, and its backward needs the output of the projection.
    return [matmul("own_gate", macs), matmul("own_out", macs)] if width else []


def _gemma_attention(sizes: Sizes, index: int, *, heads: int, head_dim: int) -> list[Term]:
    hidden, queries = sizes.hidden, sizes.heads
    kinds = sizes.get("layer_types")
    one_for_both = sizes.get("attention_k_eq_v") and kinds and kinds[index] == "full_attention"
    projections = 0 if _shares_kv(sizes, index) else (1 if one_for_both else 2)
    return [
        matmul("qkv", hidden * head_dim * (queries + projections * heads)),
        scores(queries, head_dim, head_dim, window=window_of(sizes, index)),
        matmul("out", queries * head_dim * hidden),
    ]


def _shares_kv(sizes: Sizes, index: int) -> bool:
    return index >= sizes.num_layers - sizes.optional("num_kv_shared_layers")


def _gemma_heads(sizes: Sizes, index: int) -> tuple[int, int]:
    kinds = sizes.get("layer_types")
    kind = kinds[index] if kinds else None
    table: Any = sizes.get("per_layer_config")
    if table is not None and not isinstance(table, Mapping):  # transformers' object, which has all sizes
        layer = Sizes(table[index])
        return layer.kv_heads, layer.head_dim
    if table is not None:  # its keys are layer numbers ("05") or kinds of layers
        keys = (key for key in table if key == kind or (str(key).isdigit() and int(key) == index))
        layer = Sizes(table[key] if (key := next(keys, None)) is not None else {})
        heads = layer.size("num_key_value_heads", default=sizes.kv_heads)
        return heads, layer.size("head_dim", default=sizes.head_dim)
    if kind != "full_attention":
        return sizes.kv_heads, sizes.head_dim
    shared = sizes.get("num_global_key_value_heads") if sizes.get("attention_k_eq_v", default=True) else None
    return shared or sizes.kv_heads, sizes.size("global_head_dim", default=512)


_TOWERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


def tower(config: Sizes) -> tuple[list[Layer], int, int | None]:
    """Return a tower's layers, how many patches merge into one, and a patch's edge in pixels or None."""
    sizes = config.sub("vision_config")
    if sizes is not None and config.model_type == "llava" and sizes.model_type == "clip_vision_model":
        return _clip(config, sizes)
    if sizes is None or config.model_type not in _TOWERS:
        return [], 4, None
    older = config.model_type == "qwen2_vl"
    hidden = sizes.size("embed_dim") if older else sizes.hidden
    patch = sizes.size("patch_size") ** 2 * sizes.size("temporal_patch_size", default=2)
    channels = sizes.size("in_channels", "in_chans", default=3)
    embed = matmul("patch_embed", channels * patch * hidden, kind="vision", basis="patch")
    layers = [lone("visual.patch_embed", replace(embed, input_grad=0))]  # pixels take no gradient
    heads, gated = sizes.size("num_heads"), config.model_type == "qwen2_5_vl"
    inner = int(hidden * sizes.get("mlp_ratio", default=4)) if older else sizes.size("intermediate_size")
    for index in range(sizes.size("depth")):
        window = None
        if gated and index not in sizes.get("fullatt_block_indexes", default=()):
            window = sizes.size("window_size") // sizes.size("patch_size")
        terms = _vision_block(hidden, heads, inner, gated=gated, window=window)
        layers.append(Layer(path=f"visual.blocks.{index}", terms=terms))
    merge = sizes.size("spatial_merge_size") ** 2
    wide = hidden * merge
    out = sizes.size("hidden_size" if older else "out_hidden_size")
    projectors = 1 + len(sizes.get("deepstack_visual_indexes", default=()))
    macs = projectors * (wide * wide + wide * out)
    projector = matmul("projector", macs, kind="vision", basis="merged_patch")
    return [*layers, lone("visual.merger", projector)], merge, sizes.size("patch_size")


def _clip(config: Sizes, sizes: Sizes) -> tuple[list[Layer], int, int | None]:
    """Return the layers of Llava's CLIP tower and projector: images of one size, with a class token each."""
    hidden, patch, heads = sizes.hidden, sizes.size("patch_size", default=32), sizes.heads
    patches = (sizes.size("image_size", default=224) // patch) ** 2
    tokens = Fraction(patches + 1, patches)  # the work of the class token is divided over the patches
    embed = matmul("patch_embed", 3 * patch**2 * hidden, kind="vision", basis="patch")
    block = _vision_block(hidden, heads, sizes.inner, tokens=tokens)
    chosen = config.get("vision_feature_layer", default=-2)
    chosen = [chosen] if isinstance(chosen, int) else chosen
    used = max(index % (sizes.num_layers + 1) for index in chosen)  # features 0 are the embedding's
    unused = tuple(replace(term, input_grad=0, weight_grad=0) for term in block)
    text = (config.sub("text_config") or config).hidden
    wide = hidden * len(chosen)
    projector = matmul("projector", wide * text + text * text, kind="vision", basis="patch")
    layers = [
        lone("visual.patch_embed", replace(embed, input_grad=0)),
        *(Layer(path=f"visual.blocks.{index}", terms=block) for index in range(used)),
        # Layers above the chosen ones run without a backward pass. No weight of a module has this path.
        *[Layer(path="visual.unused", terms=unused, recomputable=False)] * (sizes.num_layers - used),
        lone("visual.merger", projector),
    ]
    return layers, 1, patch


def _vision_block(
    hidden: int,
    heads: int,
    inner: int,
    *,
    gated: bool = False,
    window: int | None = None,
    tokens: Fraction = Fraction(1),  # tokens per patch
) -> tuple[Term, ...]:
    """Return the terms of a tower's block: attention between the patches of a frame or window, and an MLP."""
    common: Any = {"kind": "vision", "basis": "patch_pair" if window is None else "patch_window_pair"}
    pairs = scores(heads, hidden // heads, hidden // heads, window=window, name="vision_attention", **common)
    terms = [
        matmul("vision_qkv", 3 * hidden * hidden, kind="vision", basis="patch"),
        matmul("vision_out", hidden * hidden, kind="vision", basis="patch"),
        *parts.mlp(hidden, inner, gated=gated, name="vision_mlp", kind="vision", basis="patch"),
    ]
    return (_scaled(pairs, tokens**2), *(_scaled(term, tokens) for term in terms))


def _scaled(term: Term, factor: Fraction) -> Term:
    costs = (term.forward, term.input_grad, term.weight_grad)
    forward, input_grad, weight_grad = (round(cost * factor) for cost in costs)
    return replace(term, forward=forward, input_grad=input_grad, weight_grad=weight_grad)
