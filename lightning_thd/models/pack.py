"""The boundaries of the pack that a model runs on, and the stack of running models for its layers.

Some families pass no keyword arguments to their layers. So a model pushes a ``Scope`` with its pack on a
stack when it starts, and pops the scope when it ends (see ``announce``). Layers read the top of the stack.
Legend: T slots in a pack, S sequences (a trailing pad included).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_thd._checks import instance
from lightning_thd._static import RUN, in_backward
from lightning_thd.batch import THDBatch
from lightning_thd.batch.thd_batch import check_batch
from lightning_thd.batch.upload import uploaded
from lightning_thd.boundaries import Boundaries
from lightning_thd.seqlens import cu_seqlens_from_lengths

BOUNDARIES: Final = "boundaries"
PACK_KWARGS: Final = (BOUNDARIES, "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# Attributes that note the window of a layer, and config values of a model, at their construction.
WINDOW_NOTE: Final = "_thd_window"
CONSTRUCTION_NOTE: Final = "_thd_construction"
NOTES: Final = (WINDOW_NOTE, CONSTRUCTION_NOTE)
READY: Final = "_thd_ready"  # marks every module of a prepared model
BACKEND: Final = "_thd_backend"  # the kernel that the user chose for a module of a prepared model
CAUSAL: Final = "causal"
BIDIRECTIONAL: Final = "bidirectional"


@dataclass(slots=True, eq=False)
class Scope:
    """One entry of the stack of running models: the model, its pack, and the entry below.

    ``pack`` is None for plain rows. ``module`` is None for a batch announced before any model runs.
    ``families`` holds the config types of the outermost model and its language model. An inner model whose
    config has another type, such as a vision tower, runs on the pack only if it gets embeddings of all slots.
    ``masks`` are the kinds of mask that the model has asked for.
    """

    pack: Boundaries | None
    outer: Scope | None
    _: KW_ONLY
    module: nn.Module | None = None
    families: tuple[type, ...] = ()
    masks: tuple[str, ...] = ()
    sees_later: str | None = None  # the class of a layer that lets tokens of this pack see later ones
    shows_all: bool = False  # whether the model got a padding mask that shows all slots
    # whether torch's deterministic mode was on when the model started
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)
    balanced: bool = False  # whether a loss that runs the model balances its experts in place of the model


def current_scope() -> Scope | None:
    """Return the top entry of this thread's stack of running models, or None."""
    scope: Scope | None = getattr(RUN, "scope", None)
    return scope


@contextmanager
def scoped(scope: Scope) -> Generator[None]:
    """Put ``scope`` on top of the stack inside this context."""
    outer = current_scope()
    RUN.scope = scope
    try:
        yield
    finally:
        RUN.scope = outer


@contextmanager
def packed(batch: THDBatch) -> Generator[None]:
    """Announce a batch, on the device of the model, to all layers of models called inside this context."""
    check_batch(batch)
    with scoped(Scope(batch.boundaries, None)):
        yield


def current_pack() -> Boundaries | None:
    """Return the pack of the running model or announced batch, or None; raise if a recomputation lost it."""
    scope: Scope | None = getattr(RUN, "scope", None)
    if scope is not None:
        return scope.pack
    if not torch.compiler.is_compiling() and in_backward():
        raise RuntimeError(
            "A layer is recomputed in backward and the boundaries of its pack are not known there. Use "
            "model.gradient_checkpointing_enable() or a CheckpointWrapper around layers of the model."
        )
    return None


def model_pack() -> Boundaries | None:
    """Return the pack that a running model with "thd" has announced; None in all other models."""
    scope: Scope | None = getattr(RUN, "scope", None)
    if scope is None or scope.module is None:
        return None
    return scope.pack


def experts_are_balanced() -> bool:
    """Return whether the loss that runs this thread's model balances its experts in place of the model."""
    scope = current_scope()
    while scope is not None:
        if scope.balanced:
            return True
        scope = scope.outer
    return False


def find_pack(outer: Scope | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Boundaries | None:
    """Return the pack that a model is called on, or None for plain rows."""
    tokens: Tensor | None = None
    # The last tensor counts: ids if there are any, else embeddings, else the first positional argument.
    for value in (*args[:1], kwargs.get("inputs_embeds"), kwargs.get("input_ids")):
        if isinstance(value, Tensor) and value.ndim >= 2:
            tokens = value

    boundaries: Any = kwargs.get(BOUNDARIES)
    offsets: Any = kwargs.get("cu_seq_lens_q")
    came_with_offsets = isinstance(boundaries, Boundaries) and isinstance(offsets, Tensor)
    if came_with_offsets and offsets is not boundaries.offsets:
        boundaries = _moved_with(boundaries, offsets)
    if boundaries is not None:
        return _checked(boundaries, kwargs, tokens)

    outer_pack = None if outer is None else outer.pack
    if offsets is not None:
        if outer_pack is not None and outer_pack.offsets is offsets:
            return outer_pack
        return _pack_from_kwargs(kwargs, tokens)

    if outer is not None and outer.module is not None:
        return outer_pack
    # While a batch is announced, another model may be called on other rows.
    if outer_pack is not None and (tokens is None or tokens.shape[:2] == (1, outer_pack.slots)):
        return outer_pack

    return pack_from_positions(kwargs.get("position_ids"))


def _moved_with(boundaries: Boundaries, offsets: Tensor) -> Boundaries | None:
    """Return the boundaries with ``offsets`` as their own, or None if these are offsets of another pack.

    Workers, and helpers that move keyword arguments to a device, copy the tensors among the arguments and
    leave the boundaries as they are.
    """
    tensors = boundaries.tensors()
    own_offsets = tensors.get("offsets")
    if own_offsets is None or own_offsets.shape != offsets.shape:
        return None

    # Values on a device are not compared, because a read would wait for it.
    on_host = own_offsets.device == offsets.device and own_offsets.device.type == "cpu"
    if on_host and not torch.compiler.is_compiling() and not torch.equal(own_offsets, offsets):
        return None

    moved = {name: tensor.to(offsets.device) for name, tensor in tensors.items()}
    return boundaries.with_tensors({**moved, "offsets": offsets})


def _checked(boundaries: Any, kwargs: dict[str, Any], tokens: Tensor | None) -> Boundaries:
    """Return the boundaries that a model is called with, if the other arguments fit them."""
    if not isinstance(boundaries, Boundaries):
        instance(boundaries, BOUNDARIES, Boundaries, advice="Call model(**batch.hf_kwargs()).")
    if kwargs.get("cu_seq_lens_q") is None:
        _require(kwargs, tokens, "position_ids", came="boundaries")
    else:
        _require(kwargs, tokens, "max_length_q", "position_ids", came="cu_seq_lens_q")
        _check_offsets(kwargs["cu_seq_lens_q"], kwargs.get("cu_seq_lens_k"))

    if tokens is not None and tokens.shape[1] != boundaries.slots:
        raise ValueError(
            f"The boundaries are those of {boundaries.slots} slots, but the input has {tokens.shape[1]}. "
            "Call model(**batch.hf_kwargs())."
        )

    checked: Boundaries = boundaries
    return checked


def _require(kwargs: dict[str, Any], tokens: Tensor | None, *names: str, came: str) -> None:
    """Raise if a pack lacks arguments or tokens, or is no single row; ``came`` is the argument it came by."""
    missing = [name for name in names if kwargs.get(name) is None]
    if missing or tokens is None:
        raise ValueError(
            f"A pack came with {came} but without "
            f"{', '.join(missing) or 'input_ids or inputs_embeds'}. Call model(**batch.hf_kwargs())."
        )

    if tokens.shape[0] != 1:
        raise ValueError(
            f"A pack is one row, [1, T], but the input has shape {tuple(tokens.shape)}. Lay all sequences "
            "end to end in one row, THDBatch.collate or THDBatch.from_padded."
        )


def _pack_from_kwargs(kwargs: dict[str, Any], tokens: Tensor | None) -> Boundaries:
    """Return the boundaries of transformers' arguments, which have no lengths on the host."""
    _require(kwargs, tokens, "max_length_q", "position_ids", came="cu_seq_lens_q")
    assert tokens is not None
    _check_offsets(kwargs["cu_seq_lens_q"], kwargs.get("cu_seq_lens_k"))
    longest = kwargs["max_length_q"]
    longest_k = kwargs.get("max_length_k")
    if longest_k is not None:
        longest = max(longest, longest_k)
    return Boundaries(offsets=kwargs["cu_seq_lens_q"], max_seqlen=longest, slots=tokens.shape[1])


def _check_offsets(offsets: Any, offsets_k: Any) -> None:
    """Raise if offsets are no int32 vector, or if those of keys differ from those of queries."""
    for name, value in (("cu_seq_lens_q", offsets), ("cu_seq_lens_k", offsets_k)):
        is_tensor = isinstance(value, Tensor)
        if (is_tensor and value.ndim == 1 and value.dtype == torch.int32) or value is None:
            continue
        got = f"{value.dtype} of shape {tuple(value.shape)}" if is_tensor else type(value).__name__
        raise ValueError(f"{name} is {got}; wanted int32 offsets [S + 1], as batch.hf_kwargs() gives.")

    if offsets_k is None or offsets_k is offsets:
        return

    message = "cu_seq_lens_k is not cu_seq_lens_q. Pass the same offsets for both: batch.hf_kwargs()."
    if offsets_k.shape != offsets.shape:
        raise ValueError(message)

    same = (offsets_k == offsets).all()
    if same.device.type != "cpu" or torch.compiler.is_compiling():
        # A read would wait for the device, or break the graph.
        torch.ops.aten._assert_async.msg(same, message)
    elif not same:
        raise ValueError(message)


def pack_from_positions(position_ids: Tensor | None) -> Boundaries | None:
    """Build a pack from positions ``[T]`` or ``[1, T]`` that restart; refuse M-RoPE or rows that do."""
    if position_ids is None or position_ids.shape[-1] < 2:
        return None

    position_ids = position_ids[None] if position_ids.ndim == 1 else position_ids
    steps = position_ids.long().diff(dim=-1)  # int64, because uint8 has no differences below 0
    if torch.compiler.is_compiling():
        # A read would break the graph, and a pack that is taken for one sequence would leak: assert instead.
        torch.ops.aten._assert_async.msg(
            (steps[0] >= 0).all() if position_ids.ndim == 3 else (steps == 1).all(),
            "positions restart inside a row, but a compiled model cannot see where: pass batch.hf_kwargs().",
        )
        return None

    if position_ids.ndim == 3:
        if bool((steps[0] < 0).any()):
            raise ValueError(
                f"M-RoPE position_ids of shape {tuple(position_ids.shape)} go back inside a row, so this is "
                "a pack, but they do not mark its boundaries. Pass batch.hf_kwargs()."
            )
        return None

    continues = (steps == 1).tolist()
    if all(all(row) for row in continues):
        return None
    if len(continues) != 1:
        raise ValueError(
            f"position_ids of shape {tuple(position_ids.shape)} restart inside a row. Lay all sequences end "
            "to end in one row, or pass rows that are one sequence each."
        )

    slots = position_ids.shape[-1]
    starts = [0, *(i + 1 for i, goes_on in enumerate(continues[0]) if not goes_on), slots]
    lengths = [end - start for start, end in pairwise(starts)]
    offsets = uploaded(cu_seqlens_from_lengths(lengths).numpy(), position_ids.device)
    return Boundaries(offsets=offsets, max_seqlen=max(lengths), slots=slots, lengths=lengths)
