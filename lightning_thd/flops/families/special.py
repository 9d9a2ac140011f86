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

_SPARSE = "compressed_sparse_attention"
_HEAVY = "heavily_compressed_attention"


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
    weights = matmul("stream_weights", (2 + streams) * streams * streams * hidden)
    mix = recurrence("stream_mix", 2 * streams**2 * hidden)
    return [weights, replace(mix, last=last)]


def _v4_attention(sizes: Sizes, kind: str) -> list[Term]:
    """Return the terms of attention with one key head, a window, and compressed blocks."""
    hidden = sizes.hidden
    heads = sizes.heads
    head_dim = sizes.head_dim
    rank = sizes.size("q_lora_rank")
    groups = sizes.size("o_groups")
    group_rank = sizes.size("o_lora_rank")
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

    hidden = sizes.hidden
    head_dim = sizes.head_dim
    blocks = Blocks(rates[kind])
    if kind != _SPARSE:
        return [
            matmul("compressor", 2 * hidden * head_dim),
            scores(sizes.heads, head_dim, head_dim, window=blocks, name="blocks"),
        ]

    # The indexer has its own compressor, and scores all blocks, of which the attention reads the best.
    indexer = parts.indexer(
        hidden,
        sizes.size("q_lora_rank"),
        heads=sizes.size("index_n_heads"),
        head_dim=sizes.size("index_head_dim"),
        keys=4,
        window=blocks,
    )
    best_blocks = Blocks(rates[kind], sizes.size("index_topk"))
    return [
        matmul("compressor", 2 * 2 * hidden * head_dim),
        *indexer,
        scores(sizes.heads, head_dim, head_dim, window=best_blocks, name="blocks"),
    ]


def gemma3n(sizes: Sizes) -> list[Layer]:
    """Return Gemma 3n's layers between embedding and logits: n streams; attention and MLP run on one."""
    hidden = sizes.hidden
    streams = sizes.size("altup_num_inputs")
    widened = (streams - 1) * hidden * hidden  # multiply-adds from one stream to the others
    layers = [*_layer_inputs_projection(sizes), lone("altup_projections", matmul("altup_in", widened))]
    for index in range(sizes.num_layers):
        inner = sizes.get("intermediate_size")
        if not isinstance(inner, int):  # one number for each layer
            inner = inner[index]
        terms = [
            # Two routings, hidden -> n: n^2 coefficients predict the streams, n correct them.
            matmul("altup", 2 * hidden * streams + streams**3 + streams**2),
            recurrence("altup_mix", 2 * hidden * streams**2),
            matmul("laurel", 2 * hidden * sizes.size("laurel_rank")),
            *_gemma_attention(sizes, index, heads=sizes.kv_heads, head_dim=sizes.head_dim),
            *parts.mlp(hidden, inner, last=False),
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
    if not width:
        return []
    macs = sizes.hidden * width
    # Not last: a norm follows, and its backward needs the output of the projection.
    return [matmul("own_gate", macs), matmul("own_out", macs)]


def _gemma_attention(sizes: Sizes, index: int, *, heads: int, head_dim: int) -> list[Term]:
    """Return the terms of Gemma's attention with ``heads`` key heads."""
    kinds = sizes.get("layer_types")
    one_for_both = sizes.get("attention_k_eq_v") and kinds and kinds[index] == "full_attention"
    projections = 1 if one_for_both else 2  # those of keys and values
    if _shares_kv(sizes, index):
        projections = 0
    return [
        matmul("qkv", sizes.hidden * head_dim * (sizes.heads + projections * heads)),
        scores(sizes.heads, head_dim, head_dim, window=window_of(sizes, index)),
        matmul("out", sizes.heads * head_dim * sizes.hidden),
    ]


def _shares_kv(sizes: Sizes, index: int) -> bool:
    """Return whether a layer reads the keys and values of a layer before it."""
    return index >= sizes.num_layers - sizes.optional("num_kv_shared_layers")


def _gemma_heads(sizes: Sizes, index: int) -> tuple[int, int]:
    """Return the number of key heads and the size of a head of one of Gemma 4's layers."""
    kinds = sizes.get("layer_types")
    kind = kinds[index] if kinds else None
    table: Any = sizes.get("per_layer_config")
    if isinstance(table, Mapping):
        layer = Sizes(_entry_of_layer(table, index, kind))
        heads = layer.size("num_key_value_heads", default=sizes.kv_heads)
        return heads, layer.size("head_dim", default=sizes.head_dim)
    if table is not None:  # transformers' object, which has all sizes
        layer = Sizes(table[index])
        return layer.kv_heads, layer.head_dim

    if kind != "full_attention":
        return sizes.kv_heads, sizes.head_dim
    heads = sizes.kv_heads
    if sizes.get("attention_k_eq_v", default=True):
        heads = sizes.get("num_global_key_value_heads") or heads
    return heads, sizes.size("global_head_dim", default=512)


def _entry_of_layer(table: Mapping[Any, Any], index: int, kind: str | None) -> Any:
    """Return a layer's entry of a table, whose keys are layer numbers ("05") or kinds; {} without one."""
    for key, entry in table.items():
        if key == kind or (str(key).isdigit() and int(key) == index):
            return entry
    return {}


_TOWERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


def tower(config: Sizes) -> tuple[list[Layer], int, int | None]:
    """Return a tower's layers, how many patches merge into one, and a patch's edge in pixels or None."""
    sizes = config.sub("vision_config")
    if sizes is not None and config.model_type == "llava" and sizes.model_type == "clip_vision_model":
        return _clip(config, sizes)
    if sizes is None or config.model_type not in _TOWERS:
        return [], 4, None

    # Qwen2-VL's config calls the hidden size embed_dim, and the width of the text model hidden_size.
    edge = sizes.size("patch_size")
    if config.model_type == "qwen2_vl":
        hidden = sizes.size("embed_dim")
        inner = int(hidden * sizes.get("mlp_ratio", default=4))
        out = sizes.size("hidden_size")
    else:
        hidden = sizes.hidden
        inner = sizes.size("intermediate_size")
        out = sizes.size("out_hidden_size")

    pixels = edge**2 * sizes.size("temporal_patch_size", default=2)
    channels = sizes.size("in_channels", "in_chans", default=3)
    embed = matmul("patch_embed", channels * pixels * hidden, kind="vision", basis="patch")
    layers = [lone("visual.patch_embed", replace(embed, input_grad=0))]  # pixels take no gradient

    heads = sizes.size("num_heads")
    gated_and_windowed = config.model_type == "qwen2_5_vl"
    for index in range(sizes.size("depth")):
        window = None
        if gated_and_windowed and index not in sizes.get("fullatt_block_indexes", default=()):
            window = sizes.size("window_size") // edge
        terms = _vision_block(hidden, heads, inner, gated=gated_and_windowed, window=window)
        layers.append(Layer(path=f"visual.blocks.{index}", terms=terms))

    merge = sizes.size("spatial_merge_size") ** 2
    wide = hidden * merge
    projectors = 1 + len(sizes.get("deepstack_visual_indexes", default=()))
    macs = projectors * (wide * wide + wide * out)
    projector = matmul("projector", macs, kind="vision", basis="merged_patch")
    return [*layers, lone("visual.merger", projector)], merge, edge


def _clip(config: Sizes, sizes: Sizes) -> tuple[list[Layer], int, int | None]:
    """Return the layers of Llava's CLIP tower and projector: images of one size, with a class token each."""
    hidden = sizes.hidden
    edge = sizes.size("patch_size", default=32)
    patches = (sizes.size("image_size", default=224) // edge) ** 2
    tokens = Fraction(patches + 1, patches)  # the work of the class token is divided over the patches
    embed = matmul("patch_embed", 3 * edge**2 * hidden, kind="vision", basis="patch")
    block = _vision_block(hidden, sizes.heads, sizes.inner, tokens=tokens)

    # The projector reads the features of one or several layers; features 0 are the embedding's.
    chosen = config.get("vision_feature_layer", default=-2)
    if isinstance(chosen, int):
        chosen = [chosen]
    used = max(index % (sizes.num_layers + 1) for index in chosen)
    # Layers above the chosen ones run without a backward pass. No weight of a module has this path.
    without_backward = tuple(replace(term, input_grad=0, weight_grad=0) for term in block)
    unused = Layer(path="visual.unused", terms=without_backward, recomputable=False)

    text = (config.sub("text_config") or config).hidden
    wide = hidden * len(chosen)
    projector = matmul("projector", wide * text + text * text, kind="vision", basis="patch")
    layers = [
        lone("visual.patch_embed", replace(embed, input_grad=0)),
        *(Layer(path=f"visual.blocks.{index}", terms=block) for index in range(used)),
        *[unused] * (sizes.num_layers - used),
        lone("visual.merger", projector),
    ]
    return layers, 1, edge


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
    """Return a term with its FLOPs multiplied by a factor, rounded to whole numbers."""
    return replace(
        term,
        forward=round(term.forward * factor),
        input_grad=round(term.input_grad * factor),
        weight_grad=round(term.weight_grad * factor),
    )
