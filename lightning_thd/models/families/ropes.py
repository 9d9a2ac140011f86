"""Rotary embeddings whose frequencies depend on length -> the same, for each sequence of a pack.

Longrope and dynamic ropes look at the longest position of a call. So each sequence that is longer than the
trained length gets a call of its own. T slots in a pack.

Checked with transformers 5.19, 5.23 and 5.24. A config with such a rope and no layer that computes it is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_thd._static import shapes_are_static
from lightning_thd.batch.upload import uploaded
from lightning_thd.boundaries import Boundaries
from lightning_thd.models.adapted import Adapter, adapt
from lightning_thd.models.pack import current_pack, model_pack


def adapt_layers(model: Any) -> None:
    """Adapt the rotary embeddings of a model whose config has a rope that depends on length."""
    if not any(_depends_on_length(kind) for kind in _rope_types(model.config)):
        return

    rotary = [module for module in model.modules() if _is_rotary(module)]
    for module in rotary:
        adapt(module, RopeBySequence)

    if not rotary and any(True for _ in model.parameters()):
        kinds = sorted({kind for kind in _rope_types(model.config) if _depends_on_length(kind)})
        raise ValueError(
            f"The config of {type(model).__name__} has a rope of type {', '.join(kinds)}, whose frequencies "
            "depend on length, but no layer with a rope_type and frequencies was found. Use a release of "
            "transformers that `lightning-thd doctor` lists as tested, or padded rows with "
            "attn_implementation='eager'."
        )


def _is_rotary(module: nn.Module) -> bool:
    """Return whether a module computes a rope by its type, from frequencies."""
    return hasattr(module, "rope_type") and any(name.endswith("inv_freq") for name in module._buffers)


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


class RopeBySequence(Adapter):
    """The adapter of rotary embeddings whose frequencies depend on length."""

    def _thd_run(self: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _rotate(self, forward, *args, **kwargs)


def _rotate(
    self: Any, forward: Callable[..., Any], x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Compute a rope for every sequence of a pack: in one call if all have the same frequencies."""
    pack = current_pack() and model_pack()  # current_pack raises if a recomputation lost its pack
    layer_type = kwargs.get("layer_type", args[0] if args else None)
    kind = self.rope_type
    if isinstance(kind, dict):
        kind = kind[layer_type]
    if pack is None or not _depends_on_length(kind):
        return forward(self, x, position_ids, *args, **kwargs)

    def run(position_ids: Tensor) -> Any:
        if "dynamic" in kind:
            prefix = "" if layer_type is None else f"{layer_type}_"
            _reset_frequencies(self, prefix, position_ids.device)
        return forward(self, x, position_ids, *args, **kwargs)

    if kind == "longrope":
        parameters = self.config.rope_parameters
        if layer_type is not None:
            parameters = parameters[layer_type]
        limit = parameters["original_max_position_embeddings"]
    else:
        limit = self.original_max_seq_len

    # If no sequence exceeds the limit, one call is right for all. A trailing pad may exceed it.
    if pack.longest <= limit:
        if pack.longest_entry > limit:
            position_ids = position_ids.clamp(max=limit - 1)
        return run(position_ids)

    pack.require_own_slots(self, f"has other frequencies for sequences longer than {limit} tokens")
    if shapes_are_static():
        raise ValueError(
            f"{type(self).__name__} has other frequencies for sequences longer than {limit} tokens, and "
            f"lengths are unknown in a recorded step. Use sequences of at most {limit} tokens."
        )

    if position_ids.shape[-1] != pack.slots:
        raise ValueError(
            f"{type(self).__name__} got {position_ids.shape[-1]} positions for a pack of {pack.slots} "
            f"slots, which cannot be assigned to sequences. Use sequences of at most {limit} tokens."
        )

    return _one_by_one(run, pack, position_ids, limit)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _one_by_one(
    run: Callable[..., Any], pack: Boundaries, position_ids: Tensor, limit: int
) -> Tensor | tuple[Tensor, ...]:
    """Compute rotary embeddings: sequences up to ``limit`` tokens in one call, each longer one in its own."""
    lengths = pack.real_lengths
    is_long = uploaded(np.repeat(np.array(lengths) > limit, pack.lengths), position_ids.device)
    short = position_ids.masked_fill(is_long, 0)
    if lengths != pack.lengths:  # padding slots may have positions beyond the limit
        short = short.clamp(max=limit - 1)

    whole: Tensor | tuple[Tensor, ...] = run(short)
    for end, slots, length in zip(accumulate(pack.lengths), pack.lengths, lengths, strict=True):
        if length <= limit:
            continue
        positions = position_ids[..., end - slots : end]
        if length != slots:
            positions = positions.clamp(max=length - 1)
        part = run(positions)
        if isinstance(whole, Tensor):  # cosine and sine as one complex number
            whole = _place(part, whole, end)
        else:
            whole = tuple(_place(new, old, end) for new, old in zip(part, whole, strict=True))
    return whole


def _place(value: Tensor, whole: Tensor, end: int) -> Tensor:
    """Return a copy of ``whole`` with the values of one sequence in its slots, which stop at ``end``."""
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
    rotaries: list[nn.Module] | None = model.__dict__.get("_thd_rotaries")
    if rotaries is None:  # looked for once
        rotaries = [
            module
            for module in model.modules()
            if not module._modules
            and hasattr(module, "config")
            and any(name.endswith("inv_freq") for name in module._buffers)
        ]
        model.__dict__["_thd_rotaries"] = rotaries
    for rotary in rotaries:
        if any(buffer is not None and buffer.dtype in _HALF for buffer in rotary._buffers.values()):
            _restore(rotary)


def _restore(rotary: Any) -> None:
    """Replace rounded frequencies by exact ones from the config, if those round to the same values."""
    fresh = type(rotary)(rotary.config)
    for name, rounded in list(rotary._buffers.items()):
        exact = fresh._buffers.get(name)
        if rounded is None or exact is None or rounded.dtype not in _HALF or exact.shape != rounded.shape:
            continue
        exact = exact.to(rounded.device, torch.float32)
        if torch.equal(exact.to(rounded.dtype), rounded):  # else set by hand, or for longer sequences
            rotary._buffers[name] = exact
