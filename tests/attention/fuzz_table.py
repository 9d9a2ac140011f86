"""Public functions of attention, for ``tests.fuzz``."""

from __future__ import annotations

import random
from typing import Any

import torch

from lightning_thd.attention import support_table, varlen_attention
from tests.fuzz import Entry


def _attention(rng: random.Random) -> dict[str, Any]:
    cu = torch.tensor([0, 3, 5], dtype=torch.int32)
    heads = rng.choice([1, 2])
    return {
        "q_THD": torch.randn(5, 2, 4),
        "k_THD": torch.randn(5, heads, 4),
        "v_THD": torch.randn(5, heads, 4),
        "cu_seqlens_q": cu,
        "cu_seqlens_kv": cu,
        "max_seqlen_q": 3,
        "max_seqlen_kv": 3,
        "causal": True,
        "window": rng.choice([None, 2]),
        "scale": rng.choice([None, 0.5]),
        "softcap": rng.choice([None, 5.0]),
        "sinks": rng.choice([None, torch.zeros(2)]),
        "backend": rng.choice(["auto", "cpu"]),
    }


def _shaped(given: dict[str, Any], out: torch.Tensor) -> None:
    assert out.shape == (5, 2, 4)
    assert bool(out.isfinite().all())


TABLE = {
    "attention.varlen_attention": Entry(varlen_attention, _attention, _shaped),
    "attention.support_table": Entry(support_table, lambda _: {}),
}
