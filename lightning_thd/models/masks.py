"""A mask that a model asks for under "thd" -> None, a placeholder with a window or chunk, or an error."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_thd.models.pack import BIDIRECTIONAL, CAUSAL, STATE, Pack, Scope

_MASKING_UTILS = "transformers.masking_utils"
# The functions of that module that ``_equals_plain`` recognises as parts of a composed mask.
_UNDERSTOOD = (
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "chunked_overlay",
    "blockwise_overlay",
)
# The part that transformers adds if it finds packs in position_ids.
_FOUND_PACKS = "packed_sequence_mask_function"
# Families whose layers pass the mask to the attention unchanged, so that its shape can encode a limit.
HANDS_MASKS_ON = ("llama4_text", "phimoe")


def thd_mask(
    *,
    q_length: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    config: Any = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor | None:
    """Return None, or a placeholder that encodes a window or chunk; transformers defines the arguments."""
    scope: Scope | None = getattr(STATE, "scope", None)
    both_ways = _sees_both_ways(config)
    kind = BIDIRECTIONAL if both_ways or allow_is_bidirectional_skip is not None else CAUSAL
    if scope is not None and kind not in scope.masks:
        scope.masks = (*scope.masks, kind)
    if scope is not None and scope.shows_all:
        attention_mask = None  # ours, see ``families/plain_masks.py``
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(
            f"attn_implementation='thd' got an attention_mask {tuple(attention_mask.shape)} hiding tokens. "
            "Pack the rows instead: THDBatch.from_padded(input_ids, attention_mask). To generate from "
            "left-padded rows, use rows of equal length, or model.set_attn_implementation('eager')."
        )
    # If transformers does not allow to skip the mask, the mask may be more than causal or bidirectional.
    plain = allow_is_causal_skip if allow_is_bidirectional_skip is None else allow_is_bidirectional_skip
    if not plain and not both_ways:
        plain, is_read, window = _equals_plain(mask_function, kind, config)
        local_size = local_size or window
        if is_read:
            raise ValueError(
                f"{type(config).__name__}: this model chooses the keys of every token by an index, or adds "
                "to its mask. Use padded rows with attn_implementation='eager'."
            )
    if not plain and not both_ways:
        raise ValueError(
            f"{type(config).__name__}: this model needs a mask with a special pattern. Leave "
            "token_type_ids and images out, or use padded rows with attn_implementation='eager'."
        )
    passed = _KNOWS_WINDOW.get(type(config), False)
    if local_size is not None and not passed and longest_sequence(q_length) > local_size:
        if getattr(config, "model_type", "") in HANDS_MASKS_ON:
            return encode_limit(local_size, chunk=hasattr(config, "attention_chunk_size"), device=device)
        raise ValueError(
            f"{type(config).__name__}: this model hides keys by a window or chunk of {local_size}, which "
            f"only its mask carries, so 'thd' cannot apply it to sequences of {longest_sequence(q_length)}. "
            f"Use sequences of at most {local_size}, or attn_implementation='eager' on padded rows."
        )
    return None


def _sees_both_ways(config: Any) -> bool:
    """Return whether a model adds later tokens to a causal mask, as EmbeddingGemma does to Gemma 3's.

    Its layers have ``is_causal=False`` and hold their window, so the kernel needs no mask.
    """
    of_gemma = getattr(config, "model_type", "") == "gemma3_text"
    return of_gemma and getattr(config, "use_bidirectional_attention", False) is True


@torch.compiler.disable  # type: ignore[untyped-decorator]
def shows_all(mask: Tensor, pack: Pack | None) -> bool:
    """Return whether a mask ``[B, 1, 1, T]`` hides no token; reads the device, but once per pack and mask."""
    if mask.ndim != 4 or mask.shape[1:3] != (1, 1):
        return False
    if pack is not None and pack.shown_mask is mask:
        return True
    shown = bool(mask.all()) if mask.dtype == torch.bool else not bool(mask.any())
    if shown and pack is not None:
        pack.note_shown(mask)  # all layers get the same mask
    return shown


def encode_limit(size: int, *, chunk: bool, device: torch.device | None) -> Tensor:
    """Encode a window in the shape of an empty mask, ``[0, size]``, or a chunk, ``[0, 0, size]``."""
    return torch.empty((0, 0, size) if chunk else (0, size), dtype=torch.bool, device=device)


def decode_limit(mask: Tensor) -> tuple[int | None, int | None]:
    """Decode window and chunk from a mask's shape: ``[0, 8]`` is a window of 8; other shapes hold neither."""
    if mask.ndim not in (2, 3) or mask.shape[0] != 0:
        return None, None
    return (mask.shape[1], None) if mask.ndim == 2 else (None, mask.shape[2])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _equals_plain(
    mask_function: Callable[..., Any] | None, kind: str, config: Any
) -> tuple[bool, bool, int | None]:
    """Return whether a mask is the plain one of its ``kind``, whether the model reads it, and its window."""
    window: int | None = None
    added = kind == BIDIRECTIONAL
    every_part = list(_parts(mask_function))
    parts = [part for part in every_part if part.__qualname__.partition(".")[0] != _FOUND_PACKS]
    if len(parts) < len(every_part) and not _READERS.get(type(config), False):
        added = True  # "thd" keeps the sequences of a pack apart by itself
    for part in parts:
        variables = inspect.getclosurevars(part).nonlocals
        name = part.__qualname__.partition(".")[0]
        if part.__module__ != _MASKING_UTILS or name not in _UNDERSTOOD:
            return False, False, None
        if name == "blockwise_overlay" and bool((variables["block_sequence_ids"] >= 0).any()):
            return False, False, None
        added = added or name == "blockwise_overlay"
        window = variables.get("sliding_window", window)
    return len(every_part) > 1 and added, bool(parts) and not added, window


def _parts(mask_function: Callable[..., Any] | None) -> Iterator[Callable[..., Any]]:
    if mask_function is None:
        return
    variables = inspect.getclosurevars(mask_function).nonlocals
    if mask_function.__qualname__.startswith("remap_positions_for_packed_sequence."):
        yield from _parts(variables.get("mask_function"))
        return
    inner = variables.get("mask_functions")
    if inner is None:
        yield mask_function
    for part in inner or ():
        yield from _parts(part)


# Config class -> whether layers of its models hold or get their window, so that not only a mask knows it.
_KNOWS_WINDOW: dict[type, bool] = {}
# Families whose layers hold no window but pass ``config.sliding_window`` to the attention in every call.
# Checked with transformers 5.19, 5.23 and 5.24; ``lost_window`` refuses a layer of these that passes none.
_PASSES_WINDOW: Final = frozenset(
    {"minimax", "ministral3", "mistral", "mixtral", "olmoe", "phi3", "phi4_multimodal", "starcoder2"}
    | {"voxtral_realtime_text"}
)
# Families that read their masks, or ask for masks that a plain one would not need.
_READS_MASKS: Final = frozenset(
    {"axk2", "deepseek_v32", "diffusion_gemma_text", "doge", "dots3_note", "dots3_note_text", "glm5_next"}
    | {"glm5_next_text", "glm_moe_dsa", "hy_v4", "hy_v4_text", "hy_v4_vl", "hy_v4_vl_text", "mistral_large4"}
    | {"qwen4_exp", "qwen4_exp_text", "t5gemma2", "unlimited_ocr", "unlimited_ocr_text"}
)
_READERS: dict[type, bool] = {}


def learn_masks(model: nn.Module) -> None:
    """Note whether the layers of a model know their window, and whether they read masks."""
    config: Any = model.config
    layers = [module for module in model.modules() if module is not model]
    kind = type(config)
    holds = any(hasattr(layer, "sliding_window") for layer in layers)
    passes = getattr(config, "model_type", "") in _PASSES_WINDOW
    _KNOWS_WINDOW[kind] = _KNOWS_WINDOW.get(kind, False) or holds or passes
    reads = getattr(config, "model_type", "") in _READS_MASKS
    indexes = any("Indexer" in type(layer).__name__ for layer in layers)
    _READERS[kind] = _READERS.get(kind, False) or reads or indexes


def lost_window(module: nn.Module) -> bool:
    """Return whether a layer passed no window to the attention, and its family should pass one."""
    config = getattr(module, "config", None)
    return getattr(config, "model_type", "") in _PASSES_WINDOW and not hasattr(module, "sliding_window")


def longest_sequence(q_length: int) -> int:
    """Return the length of the longest sequence of the running pack, or ``q_length`` without one."""
    scope: Scope | None = getattr(STATE, "scope", None)
    return q_length if scope is None or scope.pack is None else scope.pack.longest
