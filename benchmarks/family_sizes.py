"""A seed -> other sizes of the sweep's tiny models: layers, heads, windows, ropes, tied heads, documents.

The sweep of ``benchmarks.families`` runs every family at one size. ``--vary 7`` runs it at sizes drawn here,
those of seed 7, one draw a family.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

# Query heads, key-value heads, head size: all alike, one group, groups of three, no power of 2.
_HEADS = ((4, 4, 8), (4, 1, 8), (6, 2, 4), (8, 2, 16), (2, 1, 12), (3, 3, 8))
_WINDOWS = (1, 2, 3, 5, 21, 64)
_TRAINED = 16  # positions before a rope is stretched
_FAR = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What is drawn: arguments for a config, which takes those it knows, and lengths of documents."""

    overrides: dict[str, Any]
    lengths: tuple[int, ...]
    pad: int


def draw(seed: int, family: str) -> Sizes:
    """Draw sizes for a family; the same seed and name give the same ones."""
    rng = random.Random(f"{seed} {family}")
    heads, groups, size = rng.choice(_HEADS)
    layers = rng.choice((1, 2, 3, 4))
    overrides: dict[str, Any] = {
        **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), layers),
        **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), heads),
        **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), groups),
        **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim"), heads * size),
        "head_dim": size,
        "sliding_window": rng.choice(_WINDOWS),
        "attention_chunk_size": rng.choice(_WINDOWS[1:]),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    if rng.random() < 0.6:
        overrides |= _rope(rng, size)
    count = rng.randint(1, 6)
    lengths = tuple(rng.choice((1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 40)) for _ in range(count))
    return Sizes(overrides=overrides, lengths=lengths, pad=rng.choice((0, 1, 9)))


def _rope(rng: random.Random, size: int) -> dict[str, Any]:
    kind = rng.choice(("linear", "dynamic", "yarn", "longrope", "llama3"))
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": rng.choice((2.0, 4.0))}
    if kind in ("yarn", "longrope", "llama3"):
        rope["original_max_position_embeddings"] = _TRAINED
    if kind == "longrope":
        half = size // 2
        rope |= {
            "short_factor": [1.0 + 0.1 * i for i in range(half)],
            "long_factor": [2.0 + 0.5 * i for i in range(half)],
        }
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        "rope_parameters": rope,
        "max_position_embeddings": _TRAINED if kind == "dynamic" else _FAR,
        **({"original_max_position_embeddings": _TRAINED} if kind == "longrope" else {}),
    }
