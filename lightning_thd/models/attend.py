"""transformers' attention call on q, k and v -> ``varlen_attention`` on the pack.

Legend: B rows (1 for a pack), T slots, H query heads, G key-value heads, D head size, E value head size.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from lightning_thd.attention import varlen_attention
from lightning_thd.attention.entry import bind
from lightning_thd.models.masks import decode_limit, shows_all
from lightning_thd.models.pack import CAUSAL, NOTES, STATE, Pack, Scope, current_pack, current_scope
from lightning_thd.parallel.context import layout
from lightning_thd.seqlens import seq_idx_from_cu_seqlens

_PLAIN_MASK: Final = (None, None, False)  # (window, chunk, shows all) of no mask, or of one that sets none
_UNSET: Final = -1  # `sliding_window` was not passed; None would mean no window
# transformers passes these arguments to attention functions; its own do not use them for scores. Any
# other argument might change the result, so it raises an error unless it is None or False.
_INERT: Final = frozenset(
    {"cache_position", "deterministic", "ignore_index", "inputs_embeds", "labels", "layer_idx"}
    | {"logits_to_keep", "num_items_in_batch", "num_logits_to_keep", "output_hidden_states"}
    | {"output_router_logits", "position_embeddings", "position_ids", "return_dict", "seq_idx"}
    | {"shift_labels", "target_dtype", "token_type_ids", "use_cache"}
)


class _Boundaries(NamedTuple):
    """Offsets of queries and keys; ``keys`` are the slots of the keys, None for all slots in order."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_length_q: int
    max_length_k: int
    keys: Tensor | None = None


def thd_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = _UNSET,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend inside the sequences of a pack: the function behind ``attn_implementation="thd"``.

    The boundaries come from the arguments, else from the announced pack. Without either, every row is one
    sequence. In an announced pack, layers of one kind share one check and one kernel. ``is_causal`` and
    ``sliding_window`` default to attributes of the layer; if a model builds masks of one kind, that kind
    replaces ``is_causal``, except in cross-attention. Other arguments that might change the result raise.
    Takes ``[B, H, T, D]``, ``[B, G, T, D]``, ``[B, G, T, E]``, sinks ``[H]``; returns ``[B, T, H, E]``, None.
    """
    decoded: tuple[Any, ...] = _PLAIN_MASK if attention_mask is None else _decode_mask(attention_mask)
    compiling = torch.compiler.is_compiling()
    if compiling or attention_mask is not None or dropout or not others.keys() <= _INERT:
        _refuse(module, attention_mask if decoded == _PLAIN_MASK else None, dropout, others)
    scope: Scope | None = getattr(STATE, "scope", None)
    pack = None if scope is None else scope.pack
    if cu_seq_lens_q is None:
        pack = current_pack()
    elif pack is not None and cu_seq_lens_q is not pack.cu_seqlens_q:
        pack = None  # the boundaries belong to another pack
    elif pack is not None and cu_seq_lens_k is not None and cu_seq_lens_k is not pack.cu_seqlens_k:
        pack = None
    kind: tuple[Any, ...] | None = None
    if scope is not None and pack is not None and not compiling:
        device, own = query.device, module.__dict__
        kind = (
            *(query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype),
            *(device, key.device, value.device, torch._C._get_deterministic_algorithms()),
            torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None,
            None if s_aux is None else (s_aux.shape, s_aux.dtype, s_aux.device),
            *(is_causal, sliding_window, scaling, softcap, max_length_q, max_length_k, *decoded),
            *(type(module), own.get("is_causal"), own.get("sliding_window"), own.get(NOTES[0])),
            *(own.get("is_cross_attention"), id(own.get("config")), scope.masks),
        )
        known = pack.cache.get(kind)
        if known is not None:
            return known[0](query, key, value, s_aux), None
    given = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    layer = (is_causal, sliding_window, scaling, softcap)
    return _attend_first(module, (query, key, value, s_aux), given, layer, decoded, pack, kind), None


def _decode_mask(attention_mask: Tensor) -> tuple[int | None, int | None, bool]:
    """Decode a mask: its window, its chunk, whether all keys are visible; else ``_PLAIN_MASK``."""
    window, chunk = decode_limit(attention_mask)
    shown = shows_all(attention_mask, current_pack())
    return (window, chunk, shown) if shown or window is not None or chunk is not None else _PLAIN_MASK


def _attend_first(
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    given: tuple[Tensor | None, Tensor | None, int | None, int | None],
    layer: tuple[bool | None, int | None, float | None, float | None],
    decoded: tuple[int | None, int | None, bool],
    pack: Pack | None,
    kind: tuple[Any, ...] | None,
) -> Tensor:
    """Attend in the first layer of its kind: check the layer and choose a kernel; with a pack, cache it."""
    query, key, value, s_aux = tensors
    is_causal, sliding_window, scaling, softcap = layer
    mask_window, chunk, both_ways = decoded
    causal = not both_ways and _is_causal(module, is_causal)
    window = _window(module, sliding_window, causal=causal) if mask_window is None else mask_window
    options = (causal, window, scaling, softcap)
    if given[0] is not None and pack is None and hasattr(type(module), "_thd_tower"):
        assert given[2] is not None
        images = _Boundaries(given[0], given[0], given[2], given[2])
        return _attend_unbound(query, key, value, images, (False, None, scaling, softcap), None)
    bounds = _boundaries(module, query, key, given, causal=causal, chunk=chunk)
    if not causal and pack is not None and query.shape[0] == 1 and query.shape[2] == pack.slots:
        pack.cache["sees_later"] = type(module).__name__  # causal_lm_loss refuses such a layer
    if pack is None or kind is None or query.shape[0] != 1:
        if bounds.keys is not None:
            key, value = key.index_select(2, bounds.keys), value.index_select(2, bounds.keys)
        return _attend_unbound(query, key, value, bounds, options, s_aux)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    bound = bind(q, k, v, *bounds[:4], sinks=s_aux, keys=bounds.keys, **_options(*options))
    pack.cache[kind] = bound, getattr(module, "config", None)  # keeps alive the config, whose id is in kind
    return bound(query, key, value, s_aux)


def _window(module: nn.Module, given: int | None, *, causal: bool) -> int | None:
    """Return a layer's window; refuse a layer whose window has changed since it was built."""
    current = getattr(module, "sliding_window", None)
    if current != (built := module.__dict__.get(NOTES[0], current)):
        raise ValueError(
            f"{type(module).__name__} was built with sliding_window={built} and now has {current}. Build the "
            "model from a config with the new window."
        )
    window = current if given == _UNSET else given
    # If a decoder's config has is_causal=False, the window does not count the token itself: add it.
    late = not causal and window is not None and getattr(module, "config", None) is not None
    if late and not getattr(module.config, "is_causal", True):
        assert window is not None
        window += 1
    return window


def _boundaries(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    given: tuple[Tensor | None, Tensor | None, int | None, int | None],
    *,
    causal: bool,
    chunk: int | None,
) -> _Boundaries:
    if given[0] is not None:
        if query.shape[2] != key.shape[2]:
            _refuse_other_keys(module, query, key)
        bounds = _given_boundaries(query, *given)
    else:
        bounds = _announced_boundaries(module, query, key, causal=causal)
    if not causal:
        bounds = _without_padding(module, query, bounds)
    return bounds if chunk is None else _in_chunks(module, bounds, chunk, query.shape[0] * query.shape[2])


def _options(
    causal: bool, window: int | None, scaling: float | None, softcap: float | None
) -> dict[str, Any]:
    """Return the options of ``varlen_attention``; a window extends to both sides if not causal."""
    sides = window if causal or window is None else (window - 1, window - 1)
    return {"causal": causal, "window": sides, "scale": scaling, "softcap": softcap}


def _attend_unbound(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: _Boundaries,
    options: tuple[Any, ...],
    s_aux: Tensor | None,
) -> Tensor:
    rows, _, slots, _ = query.shape
    q_THD, k_THD, v_THD = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out_THD = varlen_attention(q_THD, k_THD, v_THD, *bounds[:4], sinks=s_aux, **_options(*options))
    return out_THD.view(rows, slots, *out_THD.shape[1:])


def _is_causal(module: nn.Module, is_causal: bool | None) -> bool:
    """Return whether later keys are hidden, by the model's masks if of one kind, else by the layer."""
    stated: bool = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    scope: Scope | None = getattr(STATE, "scope", None)
    asked = () if scope is None else scope.masks
    if not asked or getattr(module, "is_cross_attention", False):
        return stated
    if len(asked) == 1:
        return asked[0] == CAUSAL
    if not stated and scope is not None and scope.pack is not None:
        raise ValueError(
            f"{type(module).__name__} has is_causal=False in a model that builds a causal and a "
            "bidirectional mask. Use padded rows with attn_implementation='eager'."
        )
    return stated


def _refuse_other_keys(module: nn.Module, query: Tensor, key: Tensor) -> None:
    raise ValueError(
        f"{type(module).__name__} attends from {query.shape[2]} slots of a pack to {key.shape[2]} keys, so "
        "it adds keys of its own. Use padded rows with attn_implementation='eager'."
    )


def _given_boundaries(
    query: Tensor,
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_k: Tensor | None,
    max_length_q: int | None,
    max_length_k: int | None,
) -> _Boundaries:
    assert cu_seq_lens_q is not None
    if query.shape[0] != 1:
        raise ValueError(
            f"A pack is one row [1, T], but attention got {query.shape[0]} rows together with cu_seq_lens_q."
        )
    if max_length_q is None:
        raise ValueError("Attention got cu_seq_lens_q without max_length_q. Call model(**batch.hf_kwargs()).")
    return _Boundaries(
        cu_seq_lens_q,
        cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k,
        max_length_q,
        max_length_q if max_length_k is None else max_length_k,
    )


def _without_padding(module: nn.Module, query: Tensor, bounds: _Boundaries) -> _Boundaries:
    """Make the padding inside each sequence a sequence of its own, for layers that are not causal."""
    pack = current_pack()
    if pack is None or pack.cu_seqlens_real is None or bounds.cu_seqlens_q.shape != pack.cu_seqlens_q.shape:
        return bounds
    if query.shape[0] != 1 or query.shape[2] != pack.slots:  # other rows, beside the pack
        return bounds
    pack.refuse_shard(module, "lets tokens see later tokens, and context parallelism pads sequences")
    return bounds._replace(cu_seqlens_q=pack.token_bounds, cu_seqlens_k=pack.token_bounds)


def _in_chunks(module: nn.Module, bounds: _Boundaries, chunk: int, slots: int) -> _Boundaries:
    """Cut sequences at multiples of ``chunk``, because Llama 4's tokens see only keys of their chunk."""
    if layout.in_use and layout.layout_of(bounds.cu_seqlens_q) is not None:
        raise ValueError(
            f"{type(module).__name__} attends in chunks of {chunk}: use sequences of at most {chunk}, or "
            "train this model without context parallelism."
        )
    pack = current_pack()
    if pack is not None:
        pack.refuse_prefixes(module, "attends in chunks, which differ between the sequences")
    known = {} if pack is None or pack.cu_seqlens_q is not bounds.cu_seqlens_q else pack.cache
    if ("chunks", chunk) not in known:
        known["chunks", chunk] = chunk_offsets(bounds.cu_seqlens_q, slots, chunk)
    offsets, longest = known["chunks", chunk], min(chunk, bounds.max_length_q)
    return _Boundaries(offsets, offsets, longest, longest)


def chunk_offsets(cu_seqlens: Tensor, slots: int, chunk: int) -> Tensor:
    """Cut sequences into chunks of at most ``chunk`` slots, with fixed shapes and no read of the device.

    ``[0, 5, 7]``, 7 and 4 give ``[0, 4, 5, 7]``; empty chunks are at the end.
    """
    places = torch.arange(slots, device=cu_seqlens.device)
    starts = cu_seqlens[:-1].long().index_select(0, seq_idx_from_cu_seqlens(cu_seqlens, slots).long())
    begins = torch.where((places - starts) % chunk == 0, places, slots).sort().values
    offsets = begins[: cu_seqlens.shape[0] - 1 + slots // chunk]
    return torch.cat([offsets, cu_seqlens[-1:]]).to(torch.int32)


def _announced_boundaries(module: nn.Module, query: Tensor, key: Tensor, *, causal: bool) -> _Boundaries:
    """Return the pack's boundaries; for rows without a pack or beside it, one sequence per row."""
    pack = current_pack()
    rows, slots, slots_k = query.shape[0], query.shape[2], key.shape[2]
    if pack is not None and rows == 1 and slots == pack.slots and slots_k == slots:
        if not causal:
            pack.refuse_prefixes(module, "lets tokens see later tokens, which differ between the sequences")
        keys = None if pack.prefixes is None else pack.prefixes.keys
        return _Boundaries(pack.cu_seqlens_q, pack.cu_seqlens_k, pack.max_length_q, pack.max_length_k, keys)
    if pack is not None and rows == 1 and slots == pack.slots:
        _refuse_other_keys(module, query, key)
    if causal and pack is not None:
        raise ValueError(
            f"{type(module).__name__} attends over {rows} x {slots} queries and {slots_k} keys while the "
            f"model works on a pack of {pack.slots} slots. Pass this layer the tokens of the pack only."
        )
    if causal and slots != slots_k:
        raise ValueError(
            f"{type(module).__name__} got {slots} queries and {slots_k} keys. Generation with a cache "
            "through 'thd' is not possible: pass use_cache=False."
        )
    return _Boundaries(_row_offsets(rows, slots, query), _row_offsets(rows, slots_k, query), slots, slots_k)


def _row_offsets(rows: int, slots: int, like: Tensor) -> Tensor:
    return torch.arange(rows + 1, dtype=torch.int32, device=like.device) * slots


def _refuse(module: nn.Module, attention_mask: Tensor | None, dropout: float, others: dict[str, Any]) -> None:
    scope, name = current_scope(), type(module).__name__
    if attention_mask is not None and scope is not None and scope.module is not None:
        raise ValueError(
            f"{name} makes its own attention mask, {tuple(attention_mask.shape)}, with a pattern that "
            "'thd' does not apply. Use attn_implementation='eager' for this model."
        )
    if attention_mask is not None:
        raise ValueError(
            f"{name} got an attention_mask of shape {tuple(attention_mask.shape)}. Pass attention_mask=None "
            "and cu_seq_lens_q, or use attn_implementation='eager'."
        )
    if dropout:
        config = getattr(module, "config", None)
        keys = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout")
        key = next((key for key in keys if getattr(config, key, None)), "attention_dropout (or attn_pdrop)")
        raise ValueError(f"{name} uses attention dropout {dropout}. Set {key} of the config to 0.0.")
    for given, value in others.items():
        if not (value is None or value is False or given in _INERT):
            raise ValueError(
                f"{name} passes {given} to its attention, which 'thd' does not apply. Leave it out of the "
                "call and of the samples, or use attn_implementation='eager'."
            )
