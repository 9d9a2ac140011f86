"""The arguments of a model's call -> the pack they describe, or an error for what no pack can honour."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from lightning_thd.models.inputs.positions import pack_from_positions
from lightning_thd.models.pack import Pack, Scope

REAL = "cu_seq_lens_real"
PACK_KWARGS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", REAL)
_CACHE_KWARGS = ("past_key_values", "cache_params")


def parameter_names(model_class: Any) -> tuple[str, ...]:
    """Return the names of a model's forward arguments that can be given by position, in order."""
    parameters = list(inspect.signature(model_class.forward).parameters.values())[1:]
    known = itertools.takewhile(lambda x: x.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD, parameters)
    return tuple(parameter.name for parameter in known)


def by_name(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return all arguments of a call by name, so that none is overlooked for its place; None where unknown.

    ``("input_ids", "mask")``, ``(ids,)`` and ``{"mask": None}`` give ``{"input_ids": ids, "mask": None}``.
    """
    if len(args) > len(names) or any(name in kwargs for name in names[: len(args)]):
        return None  # what Python refuses, or a forward of *args
    return {**dict(zip(names, args, strict=False)), **kwargs}


def find_pack(outer: Scope | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pack | None:
    """Return the pack that a model is called on, or None for plain rows.

    Args:
        outer: the entry of the model or of ``packed`` around this call.
        args: of the call.
        kwargs: of the call.

    Raises:
        ValueError: where the arguments describe a pack in part, or one of several rows.
    """
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
    _check_offsets(kwargs["cu_seq_lens_q"], kwargs.get("cu_seq_lens_k"))
    real = kwargs.get(REAL)
    if real is None and outer is not None and outer.slots == tokens.shape[1]:
        real = outer.cu_seqlens_real  # the model that calls this one was told
    return Pack(
        cu_seqlens_q=kwargs["cu_seq_lens_q"],
        max_length_q=kwargs["max_length_q"],
        max_length_k=kwargs.get("max_length_k"),
        slots=tokens.shape[1],
        cu_seqlens_real=real,
    )


def _check_offsets(offsets: Any, offsets_k: Any) -> None:
    """Refuse what are no offsets, and keys of other sequences than the queries'."""
    for name, value in (("cu_seq_lens_q", offsets), ("cu_seq_lens_k", offsets_k)):
        known = isinstance(value, Tensor)
        if (known and value.ndim == 1 and value.dtype == torch.int32) or value is None:
            continue
        got = f"{value.dtype} of shape {tuple(value.shape)}" if known else type(value).__name__
        raise ValueError(
            f"{name} is {got}; wanted int32 offsets [sequences + 1], as THDBatch.hf_kwargs() and "
            "lightning_thd.seqlens.cu_seqlens_from_lengths give."
        )
    if offsets_k is None or offsets_k is offsets:
        return
    message = (
        "cu_seq_lens_k is not cu_seq_lens_q, but tokens of a pack attend to those of their own sequence. "
        "Pass the same offsets for both, as THDBatch.hf_kwargs() does."
    )
    if offsets_k.shape != offsets.shape:
        raise ValueError(message)
    same = (offsets_k == offsets).all()
    if same.device.type == "cpu" and not torch.compiler.is_compiling():
        if not same:
            raise ValueError(message)
    else:
        torch._assert_async(same, message)  # looking would wait for the device, or break the graph


def refuse_class(model: Any) -> None:
    """Refuse model classes whose samples consist of several sequences.

    Raises:
        ValueError: for encoder-decoders and multiple choice.
    """
    # A class that takes no inputs of a decoder runs the encoder of such a config alone.
    names = model._thd_parameters
    two = not names or any(name.startswith("decoder_") for name in names)
    if two and getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} got a pack. An encoder-decoder has two sequences for every sample, and "
            "a pack holds one: feed it padded rows, or train its decoder alone."
        )
    if "MultipleChoice" in type(model).__name__:
        raise ValueError(
            f"{type(model).__name__} got a pack. It compares several sequences of every sample in one "
            "softmax, and a pack does not say which belong together: feed it padded rows."
        )


def refuse_mask_and_cache(model: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse an attention mask or a cache beside a pack.

    Raises:
        ValueError: naming the argument.
    """
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
