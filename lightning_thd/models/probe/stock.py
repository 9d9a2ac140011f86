"""A transformers model -> the same weights under stock eager attention, and how long its sequences must be.

Legend: T slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

# Documents longer than this make the probe slow on a CPU; limits beyond are named as not reached.
_REACH = 1024
_LIMITS = (
    "sliding_window",
    "attention_chunk_size",
    "attention_window_size",
    "chunk_size",
    "mamba_chunk_size",
)


def is_stock(model: nn.Module) -> bool:
    """Return whether a model has a transformers config that names its attention."""
    return bool(_configs(model))


@contextmanager
def eager(model: nn.Module) -> Generator[None]:
    """Switch every layer of the model to transformers' own eager attention inside this context."""
    configs = _configs(model)
    chosen = [config._attn_implementation_internal for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = "eager"
        yield
    finally:
        for config, name in zip(configs, chosen, strict=True):
            config._attn_implementation_internal = name


def logits_alone(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Run one document ``[T]`` through the model as a user of plain transformers would; ``[T, V]``."""
    with eager(model):
        output = model(input_ids=input_ids[None], **_no_cache(model))
    logits: Tensor = output.logits[0]
    return logits


def lengths_to_reach(model: nn.Module, longest: int) -> tuple[list[int], list[str]]:
    """Find sequence lengths to try beyond windows, chunks and ropes, and the limits too far away, as text."""
    limits = {name: size for config in _configs(model) for name, size in _limits(config)}
    far = [f"{name} {size}" for name, size in limits.items() if size >= _REACH]
    near = [size for size in limits.values() if longest <= size < _REACH]
    return ([max(near) + 5] if near else []), far


def _limits(config: Any) -> Iterator[tuple[str, int]]:
    for name in _LIMITS:
        size = getattr(config, name, None)
        if isinstance(size, int) and not isinstance(size, bool):
            yield name, size
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in (rope, *rope.values()):
        if isinstance(entry, dict) and "dynamic" in str(entry.get("rope_type")):
            yield "max_position_embeddings", config.max_position_embeddings
        if isinstance(entry, dict) and entry.get("rope_type") == "longrope":
            yield "original_max_position_embeddings", entry["original_max_position_embeddings"]


def _configs(model: nn.Module) -> list[Any]:
    """Return the configs that layers ask for their attention, except a vision tower's."""
    found: dict[int, Any] = {}
    root: Any = getattr(model, "config", None)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation_internal", None) is not None:
            same = config._attn_implementation_internal == getattr(
                root, "_attn_implementation_internal", None
            )
            if same or config is root:
                found[id(config)] = config
    return list(found.values())


def _no_cache(model: Any) -> dict[str, bool]:
    return {"use_cache": False} if getattr(model.config, "use_cache", None) is not None else {}
