"""Layers that choose the keys of every query by an index -> all keys, where a sequence has no more than that.

DeepSeek's sparse attention scores all pairs of tokens and keeps ``index_topk`` keys a query. A sequence of
at most that many tokens keeps them all, so its attention is the plain causal one, and the scores, through
which no gradient goes, need not be made. Longer sequences are refused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_thd.models.pack import current_scope
from lightning_thd.parallel.context import layout

# Each takes the causal mask and returns the indices of the keys it keeps, int32 [B, T, K].
_INDEXERS = (
    "AXK2Indexer",
    "DeepseekV32Indexer",
    "Dots3NoteTextIndexer",
    "GlmMoeDsaIndexer",
    "HYV4Indexer",
    "MistralLarge4TextIndexer",
)
# Configs of the models whose indexers know packs.
_ADOPTED: set[type] = set()


def adopt_indexers(model_class: type, config: Any) -> None:
    """Patch the indexers of a model class to keep all keys of a sequence of at most ``index_topk`` tokens.

    Args:
        model_class: a PreTrainedModel class; the modules it and its bases come from are searched.
        config: of the model.
    """
    for base in model_class.__mro__:
        module = sys.modules.get(base.__module__)
        for name in _INDEXERS:
            cls: Any = getattr(module, name, None)
            if cls is not None and not hasattr(cls.forward, "_thd_indexer"):
                cls.forward = _all_keys(cls.forward)
            if cls is not None:
                _ADOPTED.add(type(config))


def keeps_all_keys(config: Any, q_length: int) -> bool:
    """Return whether a model's indexers keep every key of the running pack.

    Args:
        config: of the model.
        q_length: T, the longest sequence where no pack is running.
    """
    return type(config) in _ADOPTED and longest_sequence(q_length) <= config.index_topk


def longest_sequence(q_length: int) -> int:
    """Return the length of the longest sequence of the running pack, or ``q_length`` without one."""
    scope = current_scope()
    if scope is None or scope.pack is None:
        return q_length
    shard = layout.layout_of(scope.pack.cu_seqlens_q) if layout.in_use else None
    return scope.pack.max_length_q if shard is None else max(shard.padded_lengths)


def every_key(like: Tensor) -> Tensor:
    """Return indices that stand for all keys, int32 ``[B, T, 0]`` for tokens ``[B, T, ...]``."""
    return torch.empty((*like.shape[:2], 0), dtype=torch.int32, device=like.device)


def stands_for_every_key(name: str, value: Any) -> bool:
    """Return whether an argument of an attention is what ``every_key`` made."""
    return name == "indices" and isinstance(value, Tensor) and value.shape[-1] == 0


def _all_keys(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def forward_in_pack(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        scope = current_scope()
        longest = longest_sequence(hidden_states.shape[1])
        if scope is None or scope.module is None or longest > self.index_topk:
            return forward(self, hidden_states, *args, **kwargs)
        return every_key(hidden_states)

    forward_in_pack._thd_indexer = True  # type: ignore[attr-defined]
    return forward_in_pack
