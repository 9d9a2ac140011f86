"""A finished model -> an error if it holds a layer that "thd" cannot make correct, at its first pack."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from lightning_thd.models.inputs.position_tables import counts_in_sequences

_POSITION_TABLE = re.compile(r"Position\w*Embedding")
# Found by benchmarks.families with 5.15.0 (2026-11-22): moshi's logits by 1.1, longcat_flash's experts
# without gradients. Both are exact with 5.23; releases between were not looked at.
_EXACT_FROM = {"moshi": (5, 23), "longcat_flash": (5, 23)}
# Does a modeling file ask transformers' attention table, by the name of its Python module?
_ASKS: dict[str, bool] = {}


class _Found(NamedTuple):
    """A module of the language model, and the innermost PreTrainedModel that calls it."""

    name: str
    module: nn.Module
    owner: Any


def unknown_layers(model: nn.Module) -> str | None:
    """Return why ``refuse_unknown_layers`` refuses a model, or None."""
    try:
        refuse_unknown_layers(model)
    except ValueError as error:
        return str(error)
    return None


def refuse_unknown_layers(model: nn.Module) -> None:
    """Refuse layers that would silently mix sequences or count positions across them.

    Raises:
        ValueError: naming the layer.
    """
    refuse_early_release(getattr(getattr(model, "config", None), "model_type", ""), _installed())
    aware = False
    for found in _language_modules(model):
        layer = found.module is not found.owner
        aware = aware or _is_mixer(found.module) or (layer and _asks_for_attention(type(found.module)))
        if not _is_mixer(found.module):
            _refuse_state(found)
            _refuse_neighbours(found)
            _refuse_own_positions(found)
    if not aware:
        raise ValueError(
            f"{type(model).__name__} has no layer that knows about packs: no attention that asks for its "
            "implementation, and no state-space layer from lightning_thd.models.mixers.MIXERS. Feed it "
            "padded rows, one sequence each."
        )


def refuse_early_release(model_type: str, installed: str) -> None:
    """Refuse a model family that an early release of transformers computes differently.

    Raises:
        ValueError: naming the first release that was proved exact.
    """
    needed = _EXACT_FROM.get(model_type)
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    if needed is not None and len(numbers) == 2 and numbers < needed:
        raise ValueError(
            f"{model_type} differs between a pack and its sequences alone with transformers {installed}; it "
            f"is exact from {'.'.join(map(str, needed))} on. Install that, or feed it padded rows."
        )


def _installed() -> str:
    return str(getattr(sys.modules.get("transformers"), "__version__", ""))


def _refuse_state(found: _Found) -> None:
    convolves = any(
        isinstance(child, nn.Conv1d) and child.kernel_size[0] > 1 for child in found.module.children()
    )
    if convolves or any(hasattr(found.module, name) for name in ("A_log", "dt_bias")):
        kind = type(found.module).__name__
        raise ValueError(
            f"{found.name} ({kind}) mixes tokens by a convolution or a state, and lightning_thd does not "
            "know how to reset it between the sequences of a pack. Feed this model padded rows, one sequence "
            f"each; or, if the layer is causal, set lightning_thd.models.mixers.MIXERS[{kind!r}] = None "
            "before the model is built, and prove it with lightning_thd.models.check_packing(model)."
        )


def _refuse_neighbours(found: _Found) -> None:
    if getattr(found.module, "trigram_input", False):
        raise ValueError(
            f"{found.name} ({type(found.module).__name__}) puts the tokens before and after each one beside "
            "it (trigram_input), those of the neighbouring sequences of a pack too. Feed this model padded "
            "rows, one sequence each, or build it with trigram_input=False."
        )


def _refuse_own_positions(found: _Found) -> None:
    kind = type(found.module).__name__
    if not _POSITION_TABLE.search(kind) or "Rotary" in kind or counts_in_sequences(found.module):
        return
    if "position_ids" not in inspect.signature(type(found.owner).forward).parameters:
        raise ValueError(
            f"{found.name} ({kind}) counts positions along the whole row, and {type(found.owner).__name__} "
            "takes no position_ids to restart them in every sequence of a pack. Feed this model padded rows, "
            "one sequence each."
        )


def _is_mixer(module: nn.Module) -> bool:
    return hasattr(type(module).forward, "_thd_mixer")


def _asks_for_attention(kind: type) -> bool:
    name = kind.__module__
    if name not in _ASKS:
        module = sys.modules.get(name)
        ours = module is not None and ".modeling_" in name
        _ASKS[name] = ours and "get_interface(" in inspect.getsource(module)  # type: ignore[arg-type]
    return _ASKS[name]


def _language_modules(model: Any) -> Iterator[_Found]:
    """Yield the modules of the language model: none of towers with another config or of mixers."""
    families = (type(model.config), type(model.config.get_text_config(decoder=True)))
    stack = [_Found("", model, model)]
    while stack:
        found = stack.pop()
        yield found
        if _is_mixer(found.module):
            continue
        for name, child in found.module.named_children():
            inner = hasattr(child, "config") and hasattr(child, "get_input_embeddings")
            if not inner or type(child.config) in families:
                path = f"{found.name}.{name}" if found.name else name
                stack.append(_Found(path, child, child if inner else found.owner))
