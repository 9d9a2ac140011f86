"""transformers' attention call, q, k, v ``[B, H, T, D]`` -> ``varlen_attention`` on the pack.

Legend: B rows (1 for a pack), T slots, H query heads, G key-value heads, D head size, E value head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_thd.attention import varlen_attention


def thd_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **unused: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Attend inside sequences; the function behind ``attn_implementation="thd"``.

    Returns:
        ``[B, T, H, E]`` and None for the weights.
    """
    rows, _, slots, _ = query.shape
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * slots
        cu_seq_lens_k, max_length_q, max_length_k = cu_seq_lens_q, slots, slots
    assert cu_seq_lens_k is not None
    assert max_length_q is not None
    assert max_length_k is not None
    q_THD, k_THD, v_THD = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out_THD = varlen_attention(
        q_THD,
        k_THD,
        v_THD,
        cu_seq_lens_q,
        cu_seq_lens_k,
        max_length_q,
        max_length_k,
        causal=causal,
        window=sliding_window,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
    )
    return out_THD.view(rows, slots, *out_THD.shape[1:]), None
