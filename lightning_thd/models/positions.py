"""Layers that use positions -> the same layers, which count positions inside every sequence of a pack.

Classes are patched once. Without a pack they work as before.

- Position embeddings of the RoBERTa kind start at ``padding_idx + 1`` and skip padding tokens.
- Longrope and dynamic ropes depend on the longest position in the whole call. So each sequence that is
  longer than the trained length gets a separate call.
- ESM scales a row by its share of masked tokens, and Llama 4 scales queries by their slot in the row. Here
  each sequence has its own share, and slots count from its start.
- Gemma3n's padding token has a zero embedding, at which a norm has an infinite gradient. Multiplied by the
  zero gradient of a trailing pad, that gives NaN. So zeros become tiny numbers.
Legend: T slots in a pack.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_thd._patches import layer_classes, patch_forward
from lightning_thd._static import shapes_are_static
from lightning_thd.batch.upload import uploaded
from lightning_thd.models.pack import Pack, current_pack, model_pack
from lightning_thd.parallel.context.layout import gather_pack

_FROM_TOKENS_NAME = "create_position_ids_from_input_ids"
_FROM_TOKENS = re.compile(rf"{_FROM_TOKENS_NAME}\(\s*input_ids,\s*self\.padding_idx")


def adopt_position_tables(model_class: type) -> None:
    """Patch a model class's RoBERTa position embeddings to restart in every sequence of a pack."""
    for cls in layer_classes(model_class):
        called = getattr(inspect.unwrap(cls.forward), "__code__", None)  # faster than reading the source
        if _FROM_TOKENS_NAME not in getattr(called, "co_names", ()) or hasattr(cls.forward, "_thd_positions"):
            continue
        names = inspect.signature(cls.forward).parameters
        taken = {"input_ids", "inputs_embeds", "position_ids"} <= names.keys()
        if not taken or not _FROM_TOKENS.search(inspect.getsource(cls.forward)):
            raise ValueError(
                f"{cls.__name__} counts positions from padding tokens and, in this release of transformers, "
                f"takes {', '.join(list(names)[1:])}, so 'thd' cannot give it positions inside sequences. "
                "Use a release that `lightning-thd doctor` lists as tested, or padded rows with "
                "attn_implementation='eager'."
            )
        patch_forward("position tables", cls, "_thd_positions", _from_padding_index)


def _from_padding_index(forward: Callable[..., Any]) -> Callable[..., Any]:
    names = list(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def forward_in_pack(self: Any, *args: Any, **kwargs: Any) -> Any:
        pack = model_pack()
        if pack is None:
            return forward(self, *args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        input_ids = given.get("input_ids")
        given["position_ids"] = padded_positions(input_ids, given.get("position_ids"), self.padding_idx, pack)
        if input_ids is not None and getattr(self, "token_dropout", False):
            embeds = given.get("inputs_embeds")
            embeds = self.word_embeddings(input_ids) if embeds is None else embeds
            pack.refuse_shard(self, "its token_dropout counts the masked tokens of whole sequences")
            embeds = _without_masked(embeds, input_ids == self.mask_token_id, pack)
            given |= {"input_ids": None, "inputs_embeds": embeds}
        return forward(self, **given)

    return forward_in_pack


def padded_positions(
    input_ids: Tensor | None, position_ids: Tensor | None, padding_idx: int, pack: Pack
) -> Tensor:
    """Count positions of each sequence as RoBERTa does: from ``padding_idx + 1``, skipping padding."""
    if input_ids is None:
        return (_starts_at_zero(pack)[None] if position_ids is None else position_ids) + (padding_idx + 1)
    real = input_ids[0].ne(padding_idx).long()
    tokens, offsets, taken = real, pack.cu_seqlens_q, None
    if (shard := pack.shard) is not None:  # the first tokens of a sequence may be on another rank
        tokens, offsets, taken = gather_pack(real, shard), shard.pack_offsets, shard.own
    elif pack.prefixes is not None:  # or in the slots of another sequence
        tokens, offsets = real.index_select(0, pack.prefixes.keys), pack.cu_seqlens_k
        moved = (pack.cu_seqlens_k - pack.cu_seqlens_q)[1:].index_select(0, pack.seq_idx[0].long())
        taken = torch.arange(pack.slots, device=moved.device) + moved
    before = tokens.cumsum(0) - tokens
    first = before.index_select(0, offsets[:-1].long().clamp(max=len(tokens) - 1))
    counted = before - first.repeat_interleave(offsets.diff(), output_size=len(tokens)) + 1
    counted = counted if taken is None else counted.index_select(0, taken)
    if position_ids is not None:  # those of a long trailing pad stay within the table
        counted = torch.minimum(counted, position_ids[0] + 1)
    return (counted * real + padding_idx)[None]


# The share of tokens that ESM masked in its training, a constant of its modeling file.
_HIDDEN_IN_TRAINING = 0.15 * 0.8


def _without_masked(embeds: Tensor, masked: Tensor, pack: Pack) -> Tensor:
    """Zero ESM's masked tokens, and scale each sequence by 0.88 / (its share of tokens not masked)."""
    members, offsets = pack.seq_idx[0].long(), pack.cu_seqlens_q
    lengths = (offsets if pack.cu_seqlens_real is None else pack.cu_seqlens_real).diff()
    counts = torch.zeros_like(lengths, dtype=torch.float32).index_add(0, members, masked[0].float())
    seen = (1 - _HIDDEN_IN_TRAINING) / (1 - counts / lengths.clamp(min=1))
    embeds = embeds.masked_fill(masked.unsqueeze(-1), 0.0)
    return (embeds * seen.index_select(0, members)[None, :, None]).to(embeds.dtype)


def _starts_at_zero(pack: Pack) -> Tensor:
    """Count the tokens of every sequence from 0; int64 ``[T]``."""
    first = pack.cu_seqlens_q[:-1].long()
    if pack.prefixes is not None:  # the first tokens of a sequence may be in other slots
        first = first - (pack.cu_seqlens_k.diff() - pack.cu_seqlens_q.diff())
    starts = first.index_select(0, pack.seq_idx[0].long())
    return torch.arange(pack.slots, device=starts.device) - starts


# ---- Queries scaled by their position


# The argument with a layer's cache: since transformers 5.24, before it, and in old layers.
_CACHE_ARGUMENTS = ("cache", "past_key_values", "past_key_value")


def adopt_row_scales(model_class: type) -> None:
    """Patch attention that numbers queries along the row, as Llama 4's layers without rope do."""
    for cls in layer_classes(model_class):
        names = {*getattr(getattr(inspect.unwrap(cls.forward), "__code__", None), "co_names", ())}
        if hasattr(cls, "config_class") or hasattr(cls.forward, "_thd_scale"):
            continue
        if {"arange", "get_seq_length"} <= names:
            patch_forward("row scales", cls, "_thd_scale", _scale_by_sequence(cls))
        elif "floor_scale" in names:
            raise ValueError(_unknown_scale(cls, "counts the tokens before a row in another way"))


def _unknown_scale(cls: type, difference: str) -> str:
    return (
        f"{cls.__name__} scales queries by their position and, in this release of transformers, "
        f"{difference}, so 'thd' cannot count positions inside sequences. Use a release of transformers that "
        "`lightning-thd doctor` lists as tested, or padded rows with attn_implementation='eager'."
    )


class _CacheOfOffsets:
    """An empty cache whose ``lengths`` ``[T]``, added to slot numbers, give positions inside sequences."""

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths

    def get_seq_length(self, *_: Any) -> Tensor:
        return self.lengths

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key, value


def _scale_by_sequence(cls: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the patch of an attention class's forward, which gets positions as a cache with lengths."""
    names = list(inspect.signature(cls.forward).parameters)[1:]
    cache_name = next((name for name in _CACHE_ARGUMENTS if name in names), None)
    if cache_name is None:
        raise ValueError(_unknown_scale(cls, "takes no cache under a known name"))
    return functools.partial(_scale_with_cache, names, cache_name)


def _scale_with_cache(names: list[str], cache_name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def forward_in_pack(self: Any, *args: Any, **kwargs: Any) -> Any:
        pack = model_pack()
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        if pack is None or kwargs.get(cache_name) is not None:
            return forward(self, **kwargs)
        slots = torch.arange(pack.slots, device=pack.cu_seqlens_q.device)
        counted = _starts_at_zero(pack)
        if (shard := pack.shard) is not None:
            limit = getattr(self, "floor_scale", 0)
            if shard.longest >= limit:
                pack.refuse_shard(self, f"scales queries by their position in a sequence from {limit} on")
            counted = torch.zeros_like(slots)  # below the limit all positions have the same scale
        return forward(self, **{**kwargs, cache_name: _CacheOfOffsets(counted - slots)})

    return forward_in_pack


# ---- Ropes whose frequencies depend on length


def adopt_ropes(model_class: type, config: Any) -> None:
    """Patch a model class's length-dependent rotary embeddings to treat each sequence separately."""
    if any(_depends_on_length(kind) for kind in _rope_types(config)):
        for cls in layer_classes(model_class):
            if cls.__name__.endswith("RotaryEmbedding"):
                patch_forward("ropes", cls, "_thd_rope", _by_sequence)


def _depends_on_length(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _rope_types(config: Any) -> Iterator[str]:
    """Yield the types of rope in a config and its inner configs: one per layer type, or one for all."""
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    for source in (config, *inner):
        parameters = getattr(source, "rope_parameters", None) or {}
        for entry in (parameters, *parameters.values()):
            if isinstance(entry, dict) and isinstance(entry.get("rope_type"), str):
                yield entry["rope_type"]


def _by_sequence(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def forward_in_pack(self: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        pack = current_pack() and model_pack()  # current_pack raises if a recomputation lost its pack
        kind = self.rope_type
        layer_type = kwargs.get("layer_type", args[0] if args else None)
        kind = kind[layer_type] if isinstance(kind, dict) else kind
        if pack is None or not _depends_on_length(kind):
            return forward(self, x, position_ids, *args, **kwargs)

        def run(position_ids: Tensor) -> Any:
            if "dynamic" in kind:
                _reset_frequencies(self, "" if layer_type is None else f"{layer_type}_", position_ids.device)
            return forward(self, x, position_ids, *args, **kwargs)

        if kind == "longrope":
            parameters = self.config.rope_parameters
            parameters = parameters if layer_type is None else parameters[layer_type]
            limit = parameters["original_max_position_embeddings"]
        else:
            limit = self.original_max_seq_len
        # If no sequence exceeds the limit, one call is right for all. A trailing pad may exceed it.
        if pack.longest <= limit:
            most = pack.max_length_k if pack.shard is None else max(pack.shard.padded_lengths)
            return run(position_ids if most <= limit else position_ids.clamp(max=limit - 1))
        pack.refuse_prefixes(self, f"has other frequencies for sequences longer than {limit} tokens")
        if pack.shard is not None or shapes_are_static():
            where = "in a recorded step" if pack.shard is None else "under context parallelism"
            raise ValueError(
                f"{type(self).__name__} has other frequencies for sequences longer than {limit} tokens, and "
                f"lengths are unknown {where}. Use sequences of at most {limit} tokens."
            )
        if position_ids.shape[-1] != pack.slots:
            raise ValueError(
                f"{type(self).__name__} got {position_ids.shape[-1]} positions for a pack of {pack.slots} "
                f"slots, which cannot be assigned to sequences. Use sequences of at most {limit} tokens."
            )
        return _one_by_one(run, pack, position_ids, limit)

    return forward_in_pack


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _one_by_one(
    run: Callable[..., Any], pack: Pack, position_ids: Tensor, limit: int
) -> Tensor | tuple[Tensor, ...]:
    """Compute rotary embeddings: sequences up to ``limit`` tokens in one call, each longer one in its own."""
    lengths = pack.real_lengths
    is_long = uploaded(np.repeat(np.array(lengths) > limit, pack.lengths), position_ids.device)
    short = position_ids.masked_fill(is_long, 0)
    if lengths != pack.lengths:  # padding slots may have positions beyond the limit
        short = short.clamp(max=limit - 1)
    whole: Tensor | tuple[Tensor, ...] = run(short)
    for end, slots, length in zip(accumulate(pack.lengths), pack.lengths, lengths, strict=True):
        if length > limit:
            positions = position_ids[..., end - slots : end]
            part = run(positions if length == slots else positions.clamp(max=length - 1))
            if isinstance(whole, Tensor):  # cosine and sine as one complex number
                whole = _place(part, whole, end)
            else:
                whole = tuple(_place(new, old, end) for new, old in zip(part, whole, strict=True))
    return whole


def _place(value: Tensor, whole: Tensor, end: int) -> Tensor:
    placed = whole.clone()
    placed[..., end - value.shape[-2] : end, :] = value
    return placed


def _reset_frequencies(rotary: Any, prefix: str, device: torch.device) -> None:
    """Restore a dynamic rope's original frequencies; it keeps those of the longest sequence so far."""
    names = [f"{prefix}{name}" for name in ("max_seq_len_cached", "original_inv_freq", "inv_freq")]
    missing = [name for name in names if not hasattr(rotary, name)]
    if missing:
        raise ValueError(
            f"{type(rotary).__name__} has frequencies that depend on length and, in this release of "
            f"transformers, no {missing[0]}, so 'thd' cannot compute those of each sequence. Use a release "
            "that `lightning-thd doctor` lists as tested, or another type of rope."
        )
    setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)
    original = getattr(rotary, f"{prefix}original_inv_freq")
    rotary.register_buffer(f"{prefix}inv_freq", original.to(device), persistent=False)


# ---- Rotary frequencies that a wrapper rounded

_HALF = (torch.bfloat16, torch.float16)


def keep_frequencies(model: Any) -> None:
    """Restore rotary frequencies in fp32 that FSDP1 or ``model.to(torch.bfloat16)`` rounded (up to 0.4 %)."""
    known: list[nn.Module] | None = model.__dict__.get("_thd_rotaries")
    if known is None:
        known = [x for x in model.modules() if not x._modules and hasattr(x, "config")]
        known = [x for x in known if any(name.endswith("inv_freq") for name in x._buffers)]
        model.__dict__["_thd_rotaries"] = known
    for rotary in known:
        if any(buffer is not None and buffer.dtype in _HALF for buffer in rotary._buffers.values()):
            _restore(rotary)


def _restore(rotary: Any) -> None:
    """Replace rounded frequencies by exact ones from the config, if those round to the same values."""
    made = type(rotary)(rotary.config)
    for name, rounded in list(rotary._buffers.items()):
        exact = made._buffers.get(name)
        if rounded is None or exact is None or rounded.dtype not in _HALF or exact.shape != rounded.shape:
            continue
        exact = exact.to(rounded.device, torch.float32)
        if torch.equal(exact.to(rounded.dtype), rounded):  # else set by hand, or for longer sequences
            rotary._buffers[name] = exact


# ---- Embeddings of padding that are zero

# The square is far above the smallest positive float32 and bfloat16, and far below the epsilon of a norm.
_TINY = 1e-12
_TINY_HALF = 2.0**-11  # its square, 2**-22, is one of float16's smallest positive numbers


def adopt_zero_embeddings(model_class: type) -> None:
    """Patch the embeddings of Gemma3n and its kind, whose zero rows for padding give NaN gradients."""
    classes = list(layer_classes(model_class))
    if any(cls.__name__.endswith("AltUp") for cls in classes):
        for cls in classes:
            if cls.__name__.endswith("ScaledWordEmbedding"):
                patch_forward("zero embeddings", cls, "_thd_nonzero", _nonzero)


def _nonzero(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def forward_in_pack(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = forward(self, input_ids, *args, **kwargs)
        if self.padding_idx is None or model_pack() is None:
            return output
        tiny = _TINY_HALF if output.dtype == torch.float16 else _TINY
        padding = (input_ids == self.padding_idx)[..., None]
        return torch.where(padding & (output == 0), tiny, output)

    return forward_in_pack
