"""A model class given "thd" attention -> an error where its layers would never call it."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

from lightning_thd.models.mixers import MIXERS

# Older modeling files keep a dictionary of attention classes instead of asking for a function.
_TABLE = re.compile(r"(\w+_CLASSES)\[\s*(?:(?:self\.)?config\._)?attn_implementation\s*\]")
_ATTENTION = re.compile(r"^class (\w*Attention\w*)\(nn\.Module\):", re.MULTILINE)


def refuse_own_attention(model: Any) -> None:
    """Refuse a model class whose attention ignores ``attn_implementation``.

    Raises:
        ValueError: for Bloom, Falcon, GPT-J, MPT and others of older code.
    """
    table = next((name for name in _tables(model) if "VISION" not in name), None)
    if table is not None and not _sees_images(model):
        raise ValueError(
            f"{type(model).__name__} has an attention of its own, from {table}, which has no 'thd'. Use "
            "padded rows with attn_implementation='eager', or a model whose modeling file uses transformers' "
            "AttentionInterface."
        )
    aware = type(model)._can_set_attn_implementation() or _attends_to_images_alone(model)
    if not (aware or _attention_is_mixers(model)):
        raise ValueError(
            f"{type(model).__name__} has an attention of its own that ignores attn_implementation, so 'thd' "
            "would leave it leaking across sequences. Use padded rows with attn_implementation='eager', or a "
            "model whose modeling file uses transformers' AttentionInterface."
        )


def keeps_own_attention(model: Any) -> bool:
    """Return whether a vision tower's attention, or a table of such classes, has no "thd"."""
    return _sees_images(model) and (bool(_tables(model)) or not type(model)._can_set_attn_implementation())


def _attends_to_images_alone(model: Any) -> bool:
    """Return whether a modeling file's attention classes are all a vision tower's."""
    text = model.config.get_text_config()
    names = _ATTENTION.findall(_source(model))
    return text is not model.config and bool(names) and all("Vision" in name for name in names)


def _attention_is_mixers(model: Any) -> bool:
    """Return whether all attention classes of a modeling file are layers that handle packs."""
    names = _ATTENTION.findall(_source(model))
    return bool(names) and all(name in MIXERS for name in names)


def _sees_images(model: Any) -> bool:
    names = list(inspect.signature(type(model).forward).parameters)
    return names[1:2] == ["pixel_values"] and not any(name.endswith("input_ids") for name in names)


def _tables(model: Any) -> list[str]:
    return _TABLE.findall(_source(model))


def _source(model: Any) -> str:
    module = sys.modules.get(type(model).__module__)
    try:
        return "" if module is None else inspect.getsource(module)
    except (OSError, TypeError):  # a class typed into a prompt has no source
        return ""
