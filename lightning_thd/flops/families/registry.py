"""A transformers config -> the layers of its model, by ``model_type``.

Most families share one decoder, whose variants (windows, experts, latent attention, state-space layers) are
read from the config. ``register`` adds families that are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_thd.flops.families import parts
from lightning_thd.flops.families.layers import expert_layers, mixer, moe, sees_both_ways
from lightning_thd.flops.families.sizes import Sizes, completed
from lightning_thd.flops.families.special import deepseek_v4, gemma3n, gemma4, tower
from lightning_thd.flops.terms import Layer, Term, lone, matmul

Read = Callable[[Sizes], list[Layer]]  # gives the layers between embedding and logits


def read_config(config: Any) -> tuple[str, tuple[Layer, ...], int, int | None]:
    """Return model type, layers, the number of patches that merge into one, and a patch's edge or None."""
    raw_sizes = Sizes(config)
    builder = _REGISTERED.get(raw_sizes.model_type)
    if builder is not None:
        vision_sizes = raw_sizes.sub("vision_config")
        patch = None if vision_sizes is None else vision_sizes.get("patch_size")
        return raw_sizes.model_type, tuple(builder(config)), 4, patch

    sizes = Sizes(completed(config, _FAMILIES))
    text = sizes.sub("text_config") or sizes
    read = _FAMILIES.get(text.model_type) or _FAMILIES.get(sizes.model_type)
    if read is None:
        raise ValueError(
            f"No FLOP count is known for model_type={sizes.model_type!r}. Register one with "
            f"FlopsModel.register({sizes.model_type!r}, builder), or count with FlopsModel.from_module."
        )
    if text.model_type.startswith("gemma4") and sees_both_ways(text):
        raise ValueError(
            f"model_type={text.model_type!r} with use_bidirectional_attention sees both ways, for which no "
            f"FLOP count is known. Register one: FlopsModel.register({text.model_type!r}, builder)."
        )

    table = text.size("vocab_size") * text.token_width  # multiply-adds of a token with the whole table
    embedding = lone("embed_tokens", matmul("embedding", table, kind="embedding"))
    layers = [embedding, *read(text), lone("lm_head", matmul("logits", table, kind="logits"))]
    vision, merge, patch = tower(sizes)
    return sizes.model_type, (*vision, *layers), merge, patch


def register(model_type: str, builder: Callable[[Any], Sequence[Layer]]) -> None:
    """Register a function with which ``FlopsModel.from_config`` reads another model family.

    ``builder`` returns the layers of a config; use ``flops.terms`` and ``flops.families.parts``.
    """
    if not model_type or not callable(builder):
        raise ValueError(
            f"register({model_type!r}, {builder!r}) needs a model_type and a function from config to layers."
        )
    _REGISTERED[model_type] = builder


_REGISTERED: dict[str, Callable[[Any], Sequence[Layer]]] = {}


def _decoder(sizes: Sizes, *, gated: bool = True) -> list[Layer]:
    """Return the layers that most families have: each mixes tokens, then runs an MLP or experts."""
    with_experts = expert_layers(sizes)
    layers = _between_widths(sizes, "project_in")
    for index in range(sizes.num_layers):
        if index in with_experts:
            feed_forward = moe(sizes, index, gated=gated)
        else:
            feed_forward = parts.mlp(sizes.hidden, _dense_inner(sizes), gated=gated)
        terms = (*mixer(sizes, index), *feed_forward)
        if _ends_after_matmul(sizes, index):
            terms = tuple(replace(term, last=False) for term in terms)
        layers.append(Layer(path=f"layers.{index}", terms=terms))
    return [*layers, *_between_widths(sizes, "project_out")]


def _ends_after_matmul(sizes: Sizes, index: int) -> bool:
    """Return whether a norm or dropout follows a layer's last matmul: checkpointing then runs that again."""
    if sizes.model_type in _NORM_AFTER or sizes.get("use_post_norm", default=False):
        return True
    dropouts = ("resid_pdrop", "residual_dropout", "hidden_dropout", "hidden_dropout_prob", "dropout")
    if sizes.get(*dropouts, default=0.0) > 0:
        return True
    if sizes.model_type != "olmo_hybrid":
        return False
    kinds = sizes.get("layer_types", default=())
    return index < len(kinds) and kinds[index] == "full_attention"


def _mixers_only(sizes: Sizes) -> list[Layer]:
    """Return Mamba's layers, which have no MLP."""
    return [
        Layer(path=f"layers.{index}", terms=_mark_end(mixer(sizes, index)))
        for index in range(sizes.num_layers)
    ]


def _one_part_a_layer(sizes: Sizes) -> list[Layer]:
    """Return Nemotron-H's layers; each is a state-space layer, an attention, an MLP or experts."""
    layers = []
    for index, kind in enumerate(sizes.get("layers_block_type", "layer_types", default=())):
        if kind == "mlp":
            terms = tuple(parts.mlp(sizes.hidden, sizes.inner, gated=False))
        elif kind == "moe":
            terms = tuple(moe(sizes, index, gated=False))
        else:
            terms = _mark_end(mixer(sizes, index))
        layers.append(Layer(path=f"layers.{index}", terms=terms))
    return layers


def _zamba2(sizes: Sizes) -> list[Layer]:
    """Return Zamba 2's layers: each is a Mamba 2; hybrid layers first run a shared transformer."""
    layers = []
    for index, kind in enumerate(sizes.get("layers_block_type", "layer_types", default=())):
        terms = _mark_end(mixer(sizes, index))
        if kind == "hybrid":
            terms = (*_zamba2_shared(sizes), *terms)
        layers.append(Layer(path=f"layers.{index}", terms=terms))
    return layers


def _zamba2_shared(sizes: Sizes) -> list[Term]:
    """Return the terms of Zamba 2's shared transformer, whose input is twice as wide as the hidden size."""
    hidden = sizes.hidden
    inner = sizes.inner
    rank = sizes.size("adapter_rank", default=0)
    head_dim = sizes.size("attention_head_dim", default=2 * hidden // sizes.heads)
    terms = parts.attention(hidden, sizes.heads, sizes.kv_heads, head_dim, input_size=2 * hidden)
    if sizes.get("use_shared_attention_adapter"):
        # The adapters of q, k and v each map from twice the hidden size to twice the hidden size.
        terms.append(matmul("qkv_adapter", 3 * 2 * 2 * hidden * rank))
    return [
        *terms,
        *parts.mlp(hidden, inner, last=False),
        matmul("mlp_adapter", hidden * rank + rank * 2 * inner),
        matmul("joint", hidden * hidden),
    ]


def _mllama(sizes: Sizes) -> list[Layer]:
    """Return the text layers of Llama 3.2 Vision, some of which attend to the image instead of the text."""
    crossing = set(sizes.get("cross_attention_layers", default=()))
    layers = []
    shape = (sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_dim)
    for index in range(sizes.num_layers):
        attention = parts.cross_attention(*shape) if index in crossing else parts.attention(*shape)
        terms = (*attention, *parts.mlp(sizes.hidden, sizes.inner))
        layers.append(Layer(path=f"layers.{index}", terms=terms))
    return layers


def _encoder(sizes: Sizes) -> list[Layer]:
    """Return BERT with its masked-language head; every token sees all others of its sequence."""
    attention = parts.attention(sizes.hidden, sizes.heads, sizes.heads, sizes.head_dim, both_ways=True)
    terms = (*attention, *parts.mlp(sizes.hidden, sizes.inner, gated=False, last=False))
    layers = [Layer(path=f"layers.{index}", terms=terms) for index in range(sizes.num_layers)]
    return [*layers, lone("transform", matmul("transform", sizes.hidden * sizes.hidden, kind="logits"))]


def _modernbert(sizes: Sizes) -> list[Layer]:
    """Return ModernBERT with its masked-language head."""
    head = matmul("transform", sizes.hidden * sizes.hidden, kind="logits")
    return [*_decoder(sizes), lone("transform", head)]


def _mark_end(terms: list[Term]) -> tuple[Term, ...]:
    """Mark the last term as the layer's last operation."""
    return (*terms[:-1], replace(terms[-1], last=True))


def _dense_inner(sizes: Sizes) -> int:
    """Return the intermediate size of a dense layer; LFM2 computes it from other settings."""
    if sizes.model_type == "llama4_text":
        return sizes.size("intermediate_size_mlp")
    inner = sizes.inner
    if sizes.model_type == "lfm2" and sizes.get("block_auto_adjust_ff_dim"):
        inner = int(2 * inner / 3 * sizes.get("block_ffn_dim_multiplier", default=1.0))
        multiple = sizes.size("block_multiple_of")
        inner = -(-inner // multiple) * multiple
    return inner


def _between_widths(sizes: Sizes, path: str) -> list[Layer]:
    """Return the projection between the layers and an embedding of another width (OPT-350m), if any."""
    if sizes.token_width == sizes.hidden:
        return []
    return [lone(path, matmul(path, sizes.token_width * sizes.hidden))]


_NORM_AFTER = ("gemma2", "gemma3_text", "olmo2", "olmo3", "glm4", "exaone4")  # a norm after the MLP
_DENSE = (
    "llama mistral ministral ministral3 qwen2 qwen3 gemma gemma2 gemma3_text phi3 phi4_multimodal olmo olmo2 "
    "olmo3 granite stablelm cohere cohere2 smollm3 glm glm4 ernie4_5 seed_oss hunyuan_v1_dense exaone4 "
    "helium qwen2_vl_text qwen2_5_vl_text qwen3_vl_text qwen3_5_text lfm2 cwm bitnet granite_swa vaultgemma "
    "hyperclovax internlm3 iquestcoder minicpm3 olmo_hybrid eurobert"
)
_EXPERTS = (
    "mixtral phimoe qwen2_moe qwen3_moe olmoe granitemoe granitemoeshared glm4_moe deepseek_v2 "
    "deepseek_v3 gpt_oss llama4_text dots1 ernie4_5_moe minimax_m2 qwen3_next qwen3_5_moe_text "
    "qwen3_vl_moe_text flex_olmo cohere2_moe exaone_moe granitemoe_swa hy_v3 glm4_moe_lite axk1 glm_moe_dsa "
    "deepseek_v32 kimi_linear lfm2_moe hunyuan_v1_moe mellum solar_open"
)
_ENCODERS = "bert roberta xlm-roberta camembert ernie data2vec-text distilbert mpnet"
_HYBRID = "bamba granitemoehybrid falcon_h1 jamba"
_UNGATED = (
    "gpt2 gpt_neox gptj gpt_bigcode opt bloom falcon phi starcoder2 nemotron arcee apertus codegen persimmon "
    "jais2 biogpt nanochat"
)

_FAMILIES: Mapping[str, Read] = {
    **dict.fromkeys(f"{_DENSE} {_EXPERTS} {_HYBRID}".split(), _decoder),
    **dict.fromkeys(_UNGATED.split(), partial(_decoder, gated=False)),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), _mixers_only),
    "deepseek_v4": deepseek_v4,
    "gemma3n_text": gemma3n,
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), gemma4),
    "nemotron_h": _one_part_a_layer,
    "zamba2": _zamba2,
    "mllama_text_model": _mllama,
    **dict.fromkeys(_ENCODERS.split(), _encoder),
    "modernbert": _modernbert,
}
