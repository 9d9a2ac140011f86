"""Learned and sinusoidal position embeddings -> the same ones, counting from the start of every sequence.

Two kinds of transformers' embedding layers do not take a pack's positions as they are: those of the RoBERTa
kind, whose first position is ``padding_idx + 1`` and which skip padding tokens, and those of the BART kind,
which count along the row and cannot be told otherwise. The forward of their class is replaced once; outside
a pack it does what it did.

Legend: T slots in a pack, L its longest sequence, D width of the embedding.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_thd.models.pack import Pack, current_pack, current_scope
from lightning_thd.parallel.context import layout
from lightning_thd.seqlens import seq_idx_from_cu_seqlens

_ROW_COUNTER = re.compile(r"\w*(Learned|Sinusoidal)PositionalEmbedding")
_FROM_TOKENS_NAME = "create_position_ids_from_input_ids"
_FROM_TOKENS = re.compile(rf"{_FROM_TOKENS_NAME}\(\s*input_ids,\s*self\.padding_idx")


def adopt_position_tables(model_class: type) -> None:
    """Patch the position embeddings a model class uses to restart in every sequence of a pack."""
    for base in model_class.__mro__:
        module = sys.modules.get(base.__module__)
        if module is None or ".modeling_" not in base.__module__:
            continue
        tables = [cls for cls in vars(module).values() if inspect.isclass(cls) and issubclass(cls, nn.Module)]
        told = any(hasattr(cls, "config_class") and "position_ids" in _parameters(cls) for cls in tables)
        for cls in tables:
            if cls.__module__ != base.__module__ or hasattr(cls.forward, "_thd_positions"):
                continue
            names = _parameters(cls)
            if "position_ids" in names and _skips_padding(cls.forward):
                cls.forward = _from_padding_index(cls.forward, names)
            elif not told and _ROW_COUNTER.fullmatch(cls.__name__) and len(names) > 1:
                cls.forward = _from_sequence_starts(cls.forward)


def counts_in_sequences(module: nn.Module) -> bool:
    """Return whether a position embedding restarts in every sequence of a pack."""
    return hasattr(type(module).forward, "_thd_positions")


def _skips_padding(forward: Callable[..., Any]) -> bool:
    called = inspect.unwrap(forward).__code__.co_names  # known at once, where source has to be read
    return _FROM_TOKENS_NAME in called and bool(_FROM_TOKENS.search(inspect.getsource(forward)))


def _parameters(cls: Any) -> list[str]:
    return list(inspect.signature(cls.forward).parameters)[1:]


def _pack_of_model() -> Pack | None:
    """Return the pack that a model with "thd" attention has announced, or None."""
    scope = current_scope()
    return None if scope is None or scope.module is None else current_pack()


def _from_padding_index(forward: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def forward_in_pack(self: Any, *args: Any, **kwargs: Any) -> Any:
        pack = _pack_of_model()
        if pack is None:
            return forward(self, *args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        given["position_ids"] = padded_positions(
            given.get("input_ids"), given.get("position_ids"), self.padding_idx, pack
        )
        return forward(self, **given)

    forward_in_pack._thd_positions = True  # type: ignore[attr-defined]
    return forward_in_pack


def padded_positions(
    input_ids: Tensor | None, position_ids: Tensor | None, padding_idx: int, pack: Pack
) -> Tensor:
    """Count positions of each sequence as RoBERTa does: from ``padding_idx + 1``, skipping padding.

    Args:
        input_ids: int64 ``[1, T]``, or None where embeddings were given.
        position_ids: int64 ``[1, T]``, from 0 in every sequence; used on a shard, whose sequences begin
            elsewhere.
        padding_idx: position of padding tokens.
        pack: of T slots.

    Returns:
        int64 ``[1, T]``. ``[[5, 6, 7, 1, 8]]`` in sequences of 2 and 3 with ``padding_idx`` 1 gives
        ``[[2, 3, 2, 1, 3]]``.
    """
    if layout.in_use and layout.layout_of(pack.cu_seqlens_q) is not None:
        assert position_ids is not None
        return position_ids + (padding_idx + 1)
    if input_ids is None:
        return _starts_at_zero(pack)[None] + (padding_idx + 1)
    real = input_ids.ne(padding_idx).long()
    before = real.cumsum(1) - real
    first = before[0].index_select(0, pack.cu_seqlens_q[:-1].long().clamp(max=pack.slots - 1))
    counted = before - first.index_select(0, _members(pack)) + 1
    return counted * real + padding_idx


def _from_sequence_starts(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def forward_in_pack(
        self: nn.Module, like: Any, past: Any = 0, position_ids: Tensor | None = None, **kwargs: Any
    ) -> Any:
        pack = _pack_of_model()
        if pack is None:
            told = {} if position_ids is None else {"position_ids": position_ids}
            return forward(self, like, past, **told, **kwargs)
        if layout.in_use and layout.layout_of(pack.cu_seqlens_q) is not None:
            raise ValueError(
                f"{type(self).__name__} counts positions along the row and cannot be told those of a shard. "
                "Train this model without context parallelism."
            )
        if position_ids is not None:  # counted along the row by the model
            return forward(
                self, like, past, position_ids=_starts_at_zero(pack).view_as(position_ids), **kwargs
            )
        # What a row as long as the longest sequence is given, looked up by the place in the sequence.
        row = like[:, : pack.max_length_q] if isinstance(like, Tensor) else torch.Size((1, pack.max_length_q))
        table = forward(self, row, past, **kwargs)
        return table.index_select(-2, _starts_at_zero(pack))

    forward_in_pack._thd_positions = True  # type: ignore[attr-defined]
    return forward_in_pack


def _members(pack: Pack) -> Tensor:
    return seq_idx_from_cu_seqlens(pack.cu_seqlens_q, pack.slots).long()


def _starts_at_zero(pack: Pack) -> Tensor:
    """Count the slots of every sequence from 0; int64 ``[T]``."""
    starts = pack.cu_seqlens_q[:-1].long().index_select(0, _members(pack))
    return torch.arange(pack.slots, device=starts.device) - starts
