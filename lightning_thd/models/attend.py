"""transformers' attention call on q, k and v -> ``varlen_attention`` on the pack.

Legend: B rows (1 for a pack), T slots, H query heads, G key-value heads, D head size, E value head size.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from lightning_thd._pages import see
from lightning_thd._static import RUN
from lightning_thd.attention.entry import Bound, attend_call, bind
from lightning_thd.attention.support import Backend
from lightning_thd.boundaries import Boundaries, KernelCall
from lightning_thd.boundaries.core import chunk_offsets
from lightning_thd.flops.listen import LISTENERS
from lightning_thd.models.masks import UnreadMask, lost_window, shows_all
from lightning_thd.models.pack import BACKEND, CAUSAL, READY, WINDOW_NOTE, Scope, current_pack, current_scope

# The layer's own attributes on which the choice of a kernel depends.
_OF_LAYER: Final = ("is_causal", "sliding_window", WINDOW_NOTE, "is_cross_attention", BACKEND)
_UNSET: Final = -1  # `sliding_window` was not passed; None would mean no window
# transformers passes these arguments to attention functions; its own do not use them for scores. Any
# other argument might change the result, so it raises an error unless it is None or False.
_INERT: Final = frozenset(
    {"cache_position", "deterministic", "ignore_index", "inputs_embeds", "labels", "layer_idx"}
    | {"logits_to_keep", "num_items_in_batch", "num_logits_to_keep", "output_hidden_states"}
    | {"output_router_logits", "position_embeddings", "position_ids", "return_dict", "seq_idx"}
    | {"shift_labels", "target_dtype", "token_type_ids", "use_cache"}
)


class _Mask(NamedTuple):
    """What a model's mask says to the attention."""

    window: int | None
    chunk: int | None
    shows_all: bool  # whether it hides no key, so that tokens see later ones


_NO_MASK: Final = _Mask(None, None, False)


class _Offsets(NamedTuple):
    """transformers' arguments that say where sequences begin, if the model's caller passed them."""

    cu_seq_lens_q: Tensor | None
    cu_seq_lens_k: Tensor | None
    max_length_q: int | None
    max_length_k: int | None


class _Layer(NamedTuple):
    """What a layer says of its own attention."""

    is_causal: bool | None
    sliding_window: int | None
    scaling: float | None
    softcap: float | None


class _Options(NamedTuple):
    """What is asked of the kernel."""

    causal: bool
    window: int | None  # keys that a query sees, itself included
    scaling: float | None
    softcap: float | None
    backend: Backend

    def of_kernel(self) -> dict[str, Any]:
        """Return the options of ``varlen_attention``; a window extends to both sides if not causal."""
        sides: int | tuple[int, int] | None = self.window
        if self.window is not None and not self.causal:
            sides = (self.window - 1, self.window - 1)
        return {
            "causal": self.causal,
            "window": sides,
            "scale": self.scaling,
            "softcap": self.softcap,
            "backend": self.backend,
        }


def thd_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | UnreadMask | None,
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
    boundaries: Boundaries | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend inside the sequences of a pack: the function behind ``attn_implementation="thd"``.

    The boundaries come from the arguments, else from the announced pack. Without either, every row is one
    sequence. On one pack, layers of one kind share one check and one kernel. ``is_causal`` and
    ``sliding_window`` default to attributes of the layer; if a model builds masks of one kind, that kind
    replaces ``is_causal``, except in cross-attention. Other arguments that might change the result raise.
    Takes ``[B, H, T, D]``, ``[B, G, T, D]``, ``[B, G, T, E]``, sinks ``[H]``; returns ``[B, T, H, E]``, None.
    """
    if READY not in module.__dict__ and getattr(module, "config", None) is not None:
        _refuse_unprepared(module)

    scope: Scope | None = getattr(RUN, "scope", None)
    mask = _NO_MASK
    if attention_mask is not None:
        mask, attention_mask = _read_mask(attention_mask, scope)

    compiling = torch.compiler.is_compiling()
    if compiling or attention_mask is not None or dropout or not _INERT.issuperset(others):
        _refuse(module, attention_mask, dropout, others)

    pack = boundaries
    if pack is None and scope is not None:
        pack = scope.pack
    elif pack is None and cu_seq_lens_q is None:
        pack = current_pack()
    if pack is not None and cu_seq_lens_q is not None and cu_seq_lens_q is not pack.offsets:
        pack = None  # the offsets belong to another pack, such as the images of a vision tower

    kind: tuple[Any, ...] | None = None
    if pack is not None and not compiling:
        device = query.device
        attributes = module.__dict__
        if scope is None:
            masks: tuple[str, ...] = ()
            deterministic = torch.are_deterministic_algorithms_enabled()
        else:
            masks = scope.masks
            deterministic = scope.deterministic
        # Autocast has cast tensors in half precision before, or does not change them.
        autocast = None
        may_be_cast = torch.float32 in (query.dtype, key.dtype, value.dtype)
        if may_be_cast and torch.is_autocast_enabled(device.type):
            autocast = torch.get_autocast_dtype(device.type)
        # Everything on which the checks of ``_attend_first`` and its choice of a kernel depend: tensors,
        # modes of torch, arguments, the layer, and the masks that its model has asked for.
        kind = (
            query.shape,
            key.shape,
            value.shape,
            query.dtype,
            key.dtype,
            value.dtype,
            device,
            key.device,
            value.device,
            deterministic,
            autocast,
            None if s_aux is None else (s_aux.shape, s_aux.dtype, s_aux.device),
            is_causal,
            sliding_window,
            scaling,
            softcap,
            *mask,
            type(module),
            id(attributes.get("config")),
            *map(attributes.get, _OF_LAYER),
            masks,
        )
        kernel = pack.kernels.get(kind)
        if kernel is not None:
            if kernel.sees_later:
                _note_later(module)
            attend = kernel.bound.attend_and_report if LISTENERS else kernel.bound.attend
            return attend(query, key, value, s_aux), None

    offsets = _Offsets(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    layer = _Layer(is_causal, sliding_window, scaling, softcap)
    return _attend_first(module, query, key, value, s_aux, offsets, layer, mask, pack, kind), None


def _read_mask(attention_mask: Tensor | UnreadMask, scope: Scope | None) -> tuple[_Mask, Tensor | None]:
    """Return what a mask says to the attention, and the mask itself if that does not say all of it."""
    if isinstance(attention_mask, UnreadMask):
        return _Mask(attention_mask.window, attention_mask.chunk, False), None
    if scope is not None and scope.shows_all:
        return _NO_MASK, None  # ours, see ``families/plain_masks.py``
    if shows_all(attention_mask, current_pack()):
        return _NO_MASK._replace(shows_all=True), None
    return _NO_MASK, attention_mask


class _BoundKernel(NamedTuple):
    """The attention of one kind of layer on one pack."""

    bound: Bound
    sees_later: bool  # whether tokens see later tokens
    config: Any  # kept alive, because its id is in the key


def _refuse_unprepared(module: nn.Module) -> None:
    raise ValueError(
        f"{type(module).__name__} runs 'thd', but it belongs to a model that was not prepared for packs: its "
        "config was changed by hand or by a second model that was built from the same config object, or the "
        "layer was put into the model later. Call lightning_thd.models.prepare(model) with the whole model, "
        f"or build it with attn_implementation='thd'. {see('attention')}"
    )


def _attend_first(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    s_aux: Tensor | None,
    offsets: _Offsets,
    layer: _Layer,
    mask: _Mask,
    pack: Boundaries | None,
    kind: tuple[Any, ...] | None,
) -> Tensor:
    """Attend in the first layer of its kind: check the layer and choose a kernel; with a pack, keep it.

    The arguments are those of ``thd_attention``. ``kind`` is the key of the kernel in ``pack.kernels``, or
    None.
    """
    causal = not mask.shows_all and _is_causal(module, layer.is_causal)
    window = mask.window
    if window is None:
        window = _window(module, layer.sliding_window, causal=causal)
    backend = module.__dict__.get(BACKEND, "auto")
    options = _Options(causal, window, layer.scaling, layer.softcap, backend)

    # A layer of a vision tower (``families/qwen_vl.py``) attends to images, by the offsets of the images.
    if offsets.cu_seq_lens_q is not None and pack is None and hasattr(type(module), "_thd_tower"):
        images = _call_of_offsets(query, offsets._replace(cu_seq_lens_k=None, max_length_k=None))
        both_ways = options._replace(causal=False, window=None)
        return _attend_unbound(query, key, value, images, both_ways, None)

    call = _kernel_call(module, query, key, offsets, pack, causal=causal, chunk=mask.chunk)
    of_pack = pack is not None and query.shape[0] == 1 and query.shape[2] == pack.slots
    sees_later = not causal and of_pack
    if sees_later:
        _note_later(module)
    if pack is None or kind is None or query.shape[0] != 1:
        return _attend_unbound(query, key, value, call, options, s_aux)

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    bound = bind(q, k, v, call, sinks=s_aux, **options.of_kernel())
    pack.kernels[kind] = _BoundKernel(bound, sees_later, getattr(module, "config", None))
    attend = bound.attend_and_report if LISTENERS else bound.attend
    return attend(query, key, value, s_aux)


def _note_later(module: nn.Module) -> None:
    """Note in all running models that tokens see later tokens; ``causal_lm_loss`` refuses such a layer."""
    scope = current_scope()
    while scope is not None:
        scope.sees_later = type(module).__name__
        scope = scope.outer


def _window(module: nn.Module, argument: int | None, *, causal: bool) -> int | None:
    """Return a layer's window; refuse a layer whose window has changed since it was built."""
    current = getattr(module, "sliding_window", None)
    built = module.__dict__.get(WINDOW_NOTE, current)
    if current != built:
        raise ValueError(
            f"{type(module).__name__} was built with sliding_window={built} and now has {current}. Build the "
            "model from a config with the new window."
        )

    window = current if argument == _UNSET else argument
    if argument == _UNSET and lost_window(module):
        raise ValueError(
            f"{type(module).__name__} passes no sliding_window to its attention in this release of "
            "transformers. Use a release that `lightning-thd doctor` lists as tested, or padded rows with "
            "attn_implementation='eager'."
        )

    # If a decoder's config has is_causal=False, the window does not count the token itself: add it.
    config = getattr(module, "config", None)
    if window is None or causal or config is None:
        return window
    return window if getattr(config, "is_causal", True) else window + 1


def _kernel_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    offsets: _Offsets,
    pack: Boundaries | None,
    *,
    causal: bool,
    chunk: int | None,
) -> KernelCall:
    """Return the kernel call of a layer on a pack, on other offsets, or on rows of one sequence each."""
    rows = query.shape[0]
    slots = query.shape[2]
    slots_k = key.shape[2]
    if pack is not None and rows == 1 and slots == pack.slots:
        if slots_k != slots:
            _refuse_other_keys(module, query, key)
        return pack.call(module, causal=causal, chunk=chunk)

    if offsets.cu_seq_lens_q is not None:
        if slots != slots_k:
            _refuse_other_keys(module, query, key)
        call = _call_of_offsets(query, offsets)
    else:
        call = _call_of_rows(module, query, key, pack, causal=causal)

    if chunk is None:
        return call

    longest = min(chunk, call.max_seqlen_q)
    cut = chunk_offsets(call.cu_seqlens_q, rows * slots, chunk)
    return KernelCall(cut, cut, longest, longest)


def _attend_unbound(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: KernelCall,
    options: _Options,
    s_aux: Tensor | None,
) -> Tensor:
    """Attend by a call that no other layer shares; return ``[B, T, H, E]``."""
    rows, _, slots, _ = query.shape
    q_THD, k_THD, v_THD = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out_THD = attend_call(q_THD, k_THD, v_THD, call, sinks=s_aux, **options.of_kernel())
    return out_THD.view(rows, slots, *out_THD.shape[1:])


def _is_causal(module: nn.Module, is_causal: bool | None) -> bool:
    """Return whether later keys are hidden, by the model's masks if of one kind, else by the layer."""
    stated: bool = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    scope: Scope | None = getattr(RUN, "scope", None)
    masks = () if scope is None else scope.masks
    if not masks or getattr(module, "is_cross_attention", False):
        return stated
    if len(masks) == 1:
        return masks[0] == CAUSAL

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


def _call_of_offsets(query: Tensor, offsets: _Offsets) -> KernelCall:
    """Return the call for transformers' arguments; keys have the offsets of queries by default."""
    cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv = offsets
    assert cu_seqlens_q is not None
    if query.shape[0] != 1:
        raise ValueError(
            f"A pack is one row [1, T], but attention got {query.shape[0]} rows together with cu_seq_lens_q."
        )

    if max_seqlen_q is None:
        raise ValueError("Attention got cu_seq_lens_q without max_length_q. Call model(**batch.hf_kwargs()).")

    if cu_seqlens_kv is None:
        cu_seqlens_kv = cu_seqlens_q
    if max_seqlen_kv is None:
        max_seqlen_kv = max_seqlen_q
    return KernelCall(cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)


def _call_of_rows(
    module: nn.Module, query: Tensor, key: Tensor, pack: Boundaries | None, *, causal: bool
) -> KernelCall:
    """Return the call of rows without a pack or beside it: one sequence per row."""
    rows = query.shape[0]
    slots = query.shape[2]
    slots_k = key.shape[2]
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

    return KernelCall(_row_offsets(rows, slots, query), _row_offsets(rows, slots_k, query), slots, slots_k)


def _row_offsets(rows: int, slots: int, like: Tensor) -> Tensor:
    """Return the offsets of rows of equal length."""
    return torch.arange(rows + 1, dtype=torch.int32, device=like.device) * slots


def _refuse(module: nn.Module, attention_mask: Tensor | None, dropout: float, others: dict[str, Any]) -> None:
    scope = current_scope()
    name = type(module).__name__
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

    for argument, value in others.items():
        if not (value is None or value is False or argument in _INERT):
            raise ValueError(
                f"{name} passes {argument} to its attention, which 'thd' does not apply. Leave it out of the "
                "call and of the samples, or use attn_implementation='eager'."
            )
