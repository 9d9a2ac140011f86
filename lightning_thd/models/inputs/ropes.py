"""Rotary embeddings whose frequencies depend on length -> the same, computed for each sequence by itself.

transformers' longrope and dynamic ropes look at the longest position of the whole call, so one long sequence
of a pack would turn the positions of all short ones. Here the sequences up to the length the model was first
trained on are computed together, and each longer one by itself.

Legend: T slots in a pack.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_thd._static import shapes_are_static
from lightning_thd.models.pack import Pack, current_pack, current_scope
from lightning_thd.parallel.context import layout


def adopt_ropes(model_class: type, config: Any) -> None:
    """Patch the length-dependent rotary embeddings a model class uses to treat each sequence by itself."""
    if not any(_depends_on_length(kind) for kind in _rope_types(config)):
        return
    for base in model_class.__mro__:
        module = sys.modules.get(base.__module__)
        for name, cls in list(vars(module).items()) if module is not None else ():
            if inspect.isclass(cls) and name.endswith("RotaryEmbedding"):
                rotary: Any = cls
                if not hasattr(rotary.forward, "_thd_rope"):
                    rotary.forward = _by_sequence(rotary.forward)


def _depends_on_length(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _rope_types(config: Any) -> Iterator[str]:
    """Yield the types of rope in a config and its inner configs, one a layer type or one for all."""
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    for source in (config, *inner):
        parameters = getattr(source, "rope_parameters", None) or {}
        for entry in (parameters, *parameters.values()):
            if isinstance(entry, dict) and isinstance(entry.get("rope_type"), str):
                yield entry["rope_type"]


def _by_sequence(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def forward_in_pack(self: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        pack, scope = current_pack(), current_scope()
        kind = self.rope_type
        layer_type = kwargs.get("layer_type", args[0] if args else None)
        kind = kind[layer_type] if isinstance(kind, dict) else kind
        if pack is None or scope is None or scope.module is None or not _depends_on_length(kind):
            return forward(self, x, position_ids, *args, **kwargs)
        run = functools.partial(_forget_and_run, forward, self, x)
        limit = _original_length(self, kind, layer_type)
        # One call for all is right when none is longer than the limit; the longest is known on the host.
        shard = layout.layout_of(pack.cu_seqlens_q) if layout.in_use else None
        if shard is None and pack.max_length_q <= limit:
            return run(position_ids, *args, **kwargs)
        if shard is not None and max(shard.padded_lengths) <= limit:
            return run(position_ids, *args, **kwargs)
        _refuse_unknown_lengths(self, kind, limit, sharded=shard is not None)
        if position_ids.shape[-1] != pack.slots:
            raise ValueError(
                f"{type(self).__name__} turns {position_ids.shape[-1]} positions of a pack of {pack.slots} "
                f"slots by a rope of type {kind!r}: keys of its own, which belong to no sequence. Use "
                f"sequences of at most {limit} tokens, or padded rows with attn_implementation='eager'."
            )
        return _one_by_one(run, pack, position_ids, limit, args, kwargs)

    forward_in_pack._thd_rope = True  # type: ignore[attr-defined]
    return forward_in_pack


def _original_length(rotary: Any, kind: str, layer_type: str | None) -> int:
    """Return the longest sequence whose frequencies are the original ones."""
    limit: int
    if kind == "longrope":
        parameters = rotary.config.rope_parameters
        parameters = parameters if layer_type is None else parameters[layer_type]
        limit = parameters["original_max_position_embeddings"]
    else:
        limit = rotary.original_max_seq_len
    return limit


def _refuse_unknown_lengths(rotary: nn.Module, kind: str, limit: int, *, sharded: bool) -> None:
    """Refuse a length-dependent rope where the host does not know every sequence's length."""
    where = "under context parallelism" if sharded else "in a recorded step" if shapes_are_static() else None
    if where is not None:
        raise ValueError(
            f"{type(rotary).__name__} has a rope of type {kind!r}, which turns a sequence longer than "
            f"{limit} tokens differently from a shorter one, and lengths cannot be told apart {where}. Use "
            f"sequences of at most {limit} tokens."
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _one_by_one(
    run: Callable[..., Any],
    pack: Pack,
    position_ids: Tensor,
    limit: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Tensor | tuple[Tensor, ...]:
    """Compute rotary embeddings of short sequences in one call and of every long one in its own."""
    lengths = pack.real_lengths
    is_long = torch.tensor([n > limit for n in lengths]).repeat_interleave(torch.tensor(pack.lengths))
    is_long = is_long.to(position_ids.device)
    short = position_ids.masked_fill(is_long, 0)
    if lengths != pack.lengths:  # padding may count beyond the limit
        short = short.clamp(max=limit - 1)
    whole: Tensor | tuple[Tensor, ...] = run(short, *args, **kwargs)
    ends = torch.tensor(pack.lengths).cumsum(0).tolist()
    for end, slots, length in zip(ends, pack.lengths, lengths, strict=True):
        if length > limit:
            positions = position_ids[..., end - slots : end]
            own = run(positions if length == slots else positions.clamp(max=length - 1), *args, **kwargs)
            # The slots of a longer sequence are those its positions were computed for.
            if isinstance(whole, Tensor):  # cosine and sine as one complex number
                whole = _place(own, whole, end)
            else:
                whole = tuple(_place(one, all_of, end) for one, all_of in zip(own, whole, strict=True))
    return whole


def _place(value: Tensor, whole: Tensor, end: int) -> Tensor:
    placed = whole.clone()
    placed[..., end - value.shape[-2] : end, :] = value
    return placed


def _forget_and_run(
    forward: Callable[..., Any], rotary: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run a rotary embedding with its original frequencies, as if it had seen no longer sequence."""
    layer_type = kwargs.get("layer_type", args[0] if args else None)
    kind, prefix = (
        (rotary.rope_type, "") if layer_type is None else (rotary.rope_type[layer_type], f"{layer_type}_")
    )
    if "dynamic" in kind:  # keeps the frequencies of the longest sequence it has met
        setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)
        original = getattr(rotary, f"{prefix}original_inv_freq")
        rotary.register_buffer(f"{prefix}inv_freq", original.to(position_ids.device), persistent=False)
    return forward(rotary, x, position_ids, *args, **kwargs)
