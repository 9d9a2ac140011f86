"""A transformers model with "thd" attention -> the same model, announcing its packs to its layers.

Hooks are module-level functions: a model that carries them can be copied, pickled, sharded and compiled.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lightning_thd.models.inputs.labels import keep_labels_inside
from lightning_thd.models.inputs.masks import learn_window
from lightning_thd.models.inputs.position_tables import adopt_position_tables
from lightning_thd.models.inputs.positions import pack_from_positions, refuse_plain_positions
from lightning_thd.models.inputs.ropes import adopt_ropes
from lightning_thd.models.inputs.zero_embeddings import adopt_zero_embeddings
from lightning_thd.models.mixers import adopt_mixers
from lightning_thd.models.pack import (
    Pack,
    Scope,
    current_scope,
    know_model_of,
    packed,
    scoped,
    set_scope,
)
from lightning_thd.models.pooled_heads import a_row_a_sequence, adopt_pooled_head, may_pool, refuse_one_row
from lightning_thd.models.unknown_layers import unknown_layers

if TYPE_CHECKING:
    from lightning_thd.batch import THDBatch

NAME = "thd"
# By identity, so that a copy is never taken for the model it was made of.
_MODELS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_REAL = "cu_seq_lens_real"
PACK_KWARGS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", _REAL)
_CACHE_KWARGS = ("past_key_values", "cache_params")


def install(model: Any) -> None:
    """Hook ``model``, a PreTrainedModel under construction or finished, so that it announces its packs."""
    if getattr(model, "_thd_installed", False):
        return
    model._thd_installed = True
    model._thd_takes_use_cache = "use_cache" in inspect.signature(type(model).forward).parameters
    model._thd_checked = False
    _MODELS[id(model)] = model
    adopt_mixers(type(model))
    adopt_position_tables(type(model))
    adopt_ropes(type(model), model.config)
    adopt_zero_embeddings(type(model))
    adopt_pooled_head(type(model))
    learn_window(model.config)
    know_model_of(model.config)
    model.register_forward_pre_hook(_enter, with_kwargs=True)
    # Also when forward raises: an abandoned scope would claim the next batch.
    model.register_forward_hook(_leave, always_call=True)


def run_as_pack(model: Any, forward: Callable[..., Any], batch: THDBatch, **kwargs: Any) -> Any:
    """Run a model's forward on a pack from inside its call on other inputs, such as padded rows.

    Args:
        model: with "thd" attention.
        forward: its forward, or what took its place.
        batch: on the device of the model.
        kwargs: further arguments of ``forward``.

    Returns:
        What ``forward`` returns; what it pooled of the pack is a row a sequence.
    """
    with packed(batch):
        entered = _enter(model, (), {**batch.hf_kwargs(), **kwargs})
        assert entered is not None  # None under another attention alone
        output = forward(**entered[1])
        pooled = _leave(model, (), output)
    return output if pooled is None else pooled


def _enter(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Find the pack in a model's arguments, check it, and push it on the stack of running models."""
    if model.config._attn_implementation != NAME:  # switched away by set_attn_implementation
        return None
    if not torch.compiler.is_compiling():
        know_model_of(model.config)  # of a copy too, which was never installed
    outer = current_scope()
    if outer is None and getattr(model, "_thd_packs_rows", False):
        return None  # its forward decides what becomes a pack: see run_as_pack
    if outer is not None and outer.families and not _speaks(model, outer, args, kwargs):
        set_scope(Scope(None, outer, module=model, families=outer.families))
        return args, {name: value for name, value in kwargs.items() if name not in PACK_KWARGS}
    pack = _find_pack(outer, args, kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name != _REAL}  # ours alone
    if pack is not None:
        _refuse_class(model)
        _refuse_mask_and_cache(model, kwargs)
        refuse_plain_positions(model, kwargs)
        _refuse_wrong_layers(model)
        if outer is None or outer.module is None:
            kwargs = keep_labels_inside(model, kwargs, pack)
        if model._thd_takes_use_cache:
            kwargs = {**kwargs, "use_cache": False}
    families = outer.families if outer is not None and outer.families else _families(model)
    # A model inside the language model may be handed the masks its caller asked for.
    masks = outer.masks if outer is not None and outer.families else ()
    set_scope(Scope(pack, outer, module=model, families=families, masks=masks))
    return args, kwargs


def _refuse_wrong_layers(model: Any) -> None:
    """Refuse layers that "thd" cannot make correct; checks each model once, or at every trace."""
    if torch.compiler.is_compiling():
        reason = _reason_of(id(model))
    elif not model._thd_checked:
        reason = unknown_layers(model)
        model._thd_checked = reason is None
    else:
        reason = None
    if reason is not None:
        raise ValueError(reason)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _reason_of(identity: int) -> str | None:
    """Return why a model that is being traced cannot run packs, or None.

    A trace hands on constants alone. A copy, or what was unpickled, was never entered into the table.
    """
    model = _MODELS.get(identity)
    if model is None:
        model = next((x for x in gc.get_objects() if id(x) == identity), None)
    if model is None:  # frozen objects are not listed
        return "A copied model cannot be looked at while it is compiled: call it once uncompiled before."
    return unknown_layers(model)


def _leave(model: Any, args: tuple[Any, ...], output: Any) -> Any:
    """Pop a model off the stack, and replace or refuse what it pooled of the whole pack."""
    scope = current_scope()
    if scope is None or scope.module is not model:  # _enter raised or did nothing
        return None
    set_scope(scope.outer)
    if scope.pack is None or output is None:
        return None
    pooled = a_row_a_sequence(model, scope.pack, output) if may_pool(model) else None
    outermost = scope.outer is None or scope.outer.module is None
    if outermost and not torch.compiler.is_compiling():  # a trace would take outputs for inputs of a graph
        refuse_one_row(model, scope.pack, output)
    return pooled


def _families(model: nn.Module) -> tuple[type, ...]:
    config: Any = model.config
    return type(config), type(config.get_text_config(decoder=True))


def _speaks(model: nn.Module, outer: Scope, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an inner model continues the language model rather than, say, encoding images."""
    if type(model.config) in outer.families:
        return True
    embeds = kwargs.get("inputs_embeds")
    return embeds is not None and outer.pack is not None and embeds.shape[1] == outer.pack.slots


def _find_pack(outer: Scope | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pack | None:
    tokens = _tokens(args, kwargs)
    offsets = kwargs.get("cu_seq_lens_q")
    known = None if outer is None else outer.pack
    if offsets is not None:
        if known is not None and known.cu_seqlens_q is offsets:
            return known
        return _pack_from_kwargs(kwargs, tokens, known)
    if outer is not None:
        if outer.module is not None:
            return known
        assert known is not None
        # Under `packed`, but perhaps another model called along the way, with rows of its own.
        if tokens is None or (tokens.shape[0] == 1 and tokens.shape[1] == known.slots):
            return known
    return pack_from_positions(kwargs.get("position_ids"))


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    for value in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]):
        if isinstance(value, Tensor) and value.ndim >= 2:
            return value
    return None


def _pack_from_kwargs(kwargs: dict[str, Any], tokens: Tensor | None, outer: Pack | None) -> Pack:
    missing = [name for name in ("max_length_q", "position_ids") if kwargs.get(name) is None]
    if missing or tokens is None:
        raise ValueError(
            "A pack came with cu_seq_lens_q but without "
            f"{', '.join(missing) or 'input_ids or inputs_embeds'}. Call model(**batch.hf_kwargs()), which "
            "gives everything, or pass input_ids [1, T], position_ids that restart in every sequence, "
            "cu_seq_lens_q/k (int32) and max_length_q/k (int)."
        )
    if tokens.shape[0] != 1:
        raise ValueError(
            f"A pack is one row, [1, T], but the input has shape {tuple(tokens.shape)}. Lay all sequences "
            "end to end in one row, THDBatch.collate or THDBatch.from_padded."
        )
    offsets = kwargs["cu_seq_lens_q"]
    offsets_k, longest_k = kwargs.get("cu_seq_lens_k"), kwargs.get("max_length_k")
    real = kwargs.get(_REAL)
    if real is None and outer is not None and outer.slots == tokens.shape[1]:
        real = outer.cu_seqlens_real  # the model that calls this one was told
    return Pack(
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets if offsets_k is None else offsets_k,
        max_length_q=kwargs["max_length_q"],
        max_length_k=kwargs["max_length_q"] if longest_k is None else longest_k,
        slots=tokens.shape[1],
        cu_seqlens_real=real,
    )


def _refuse_class(model: Any) -> None:
    """Refuse model classes whose samples consist of several sequences."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} got a pack. An encoder-decoder has two sequences for every sample, and "
            "a pack holds one: feed it padded rows, or train its decoder alone."
        )
    if "MultipleChoice" in type(model).__name__:
        raise ValueError(
            f"{type(model).__name__} got a pack. It compares several sequences of every sample in one "
            "softmax, and a pack does not say which belong together: feed it padded rows."
        )


def _refuse_mask_and_cache(model: nn.Module, kwargs: dict[str, Any]) -> None:
    mask = kwargs.get("attention_mask")
    # A multimodal model hands its text model the masks it asked for, a layer type each: None from "thd".
    if mask is not None and not (isinstance(mask, dict) and all(x is None for x in mask.values())):
        raise ValueError(
            f"{type(model).__name__} got a pack and an attention_mask. The boundaries of the pack are its "
            "mask: pass attention_mask=None, and pad by a trailing sequence (THDBatch.collate(..., pad_to=))."
        )
    cache = next((name for name in _CACHE_KWARGS if kwargs.get(name) is not None), None)
    if cache is not None or kwargs.get("use_cache"):
        raise ValueError(
            f"{type(model).__name__} got a pack and {cache or 'use_cache=True'}. Generation with a cache "
            "through 'thd' is not possible: call the model with use_cache=False, or generate with "
            "model.set_attn_implementation('eager')."
        )


def carry_scope(checkpoint: Callable[..., Any], *, compilable: bool) -> Callable[..., Any]:
    """Wrap an activation checkpoint function so that it recomputes under the scope of its first run.

    Backward recomputes when the model has long left, perhaps after other microbatches, and in another thread.

    Args:
        checkpoint: as transformers sets it on layers, ``checkpoint(function, *args)``.
        compilable: whether torch.compile can take the layers whole. It then replays them from its graph, in
            which the boundaries are inputs; layers that break the graph are recomputed by Python, and need
            the scope.
    """
    if getattr(checkpoint, "_thd_carries", False):
        return checkpoint

    def checkpoint_with_scope(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        scope = current_scope()
        if scope is None or torch.compiler.is_compiling():
            return checkpoint(function, *args, **kwargs)

        def run(*inputs: Any, **named: Any) -> Any:
            with scoped(scope):
                return function(*inputs, **named)

        return checkpoint(run, *args, **kwargs)

    carrying: Any = checkpoint_with_scope
    if not compilable:
        carrying = torch.compiler.disable(carrying, recursive=False)  # type: ignore[no-untyped-call]
    carrying._thd_carries = True
    return cast("Callable[..., Any]", carrying)
