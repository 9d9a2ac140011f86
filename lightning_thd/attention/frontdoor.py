"""varlen_attention: packed q, k, v and offsets -> packed output, on the fastest kernel that means exactly the same.

Legend: T slots, S sequences, H query heads, G key-value heads, D head size, E value head size.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightning_thd.attention.cpu_op import varlen_attention_cpu
from lightning_thd.attention.spec import Window, make_spec

Backend = Literal["auto", "cpu", "torch", "flash", "te"]


def varlen_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    causal: bool = True,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attend within every sequence of a pack and never across.

    Args:
        q_THD: ``[Tq, H, D]`` float; every row belongs to a sequence.
        k_THD: ``[Tkv, G, D]``; G divides H.
        v_THD: ``[Tkv, G, E]``; E may differ from D.
        cu_seqlens_q: int32 ``[S + 1]`` on the device of q, first entry 0, last Tq.
        cu_seqlens_kv: int32 ``[S + 1]``, first entry 0, last Tkv.
        max_seqlen_q: longest query sequence, known on the host.
        max_seqlen_kv: longest key sequence.
        causal: hide later keys; bottom-right where the two lengths of a sequence differ.
        window: with ``causal`` an int W: a query sees the last W keys, its own included. Or ``(left, right)``.
        scale: of the scores; None is ``D ** -0.5``.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None is none.
        sinks: ``[H]`` logits of one more key without a value, or None.
        backend: a kernel by name, or the first that supports the call.

    Returns:
        ``[Tq, H, E]`` in the dtype of q; 0 for a query that sees no key.
    """
    spec = make_spec(q_THD.shape[2], causal=causal, window=window, scale=scale, softcap=softcap)
    if torch.is_autocast_enabled(q_THD.device.type):
        dtype = torch.get_autocast_dtype(q_THD.device.type)
        q_THD, k_THD, v_THD = (x.to(dtype) for x in (q_THD, k_THD, v_THD))
    if q_THD.device.type == "cuda":
        raise NotImplementedError("CUDA kernels arrive with the next commit.")
    out, _ = varlen_attention_cpu(
        q_THD,
        k_THD,
        v_THD,
        cu_seqlens_q,
        cu_seqlens_kv,
        sinks,
        max_seqlen_q,
        max_seqlen_kv,
        spec.left,
        spec.right,
        spec.scale,
        spec.softcap,
    )
    return out
