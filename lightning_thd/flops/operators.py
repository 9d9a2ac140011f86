"""An operator -> its FLOPs where torch's own counter has no formula, or its name where none is known."""

from __future__ import annotations

from math import prod
from typing import Any, TypeAlias

import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from lightning_thd.stats import window_pairs

_Shape: TypeAlias = Any  # torch.Size: torch's own formulas are untyped

# operators of these namespaces multiply nothing, unless they are named below
_PLAIN = (
    *("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "c10d_functional", "fsdp", "dtensor"),
    *("_dtensor", "symm_mem", "rngprims", "inductor", "streams", "debugprims", "quantized_decomposed"),
)
_PRODUCTS = (  # of aten, without a formula
    *("_scaled_grouped_mm", "_scaled_grouped_mm_v2", "_scaled_mm_v2", "_int_mm", "_cdist_forward"),
    *("_weight_int4pack_mm", "_weight_int8pack_mm", "_trilinear", "mkldnn_rnn_layer", "_cudnn_rnn"),
    *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_native_multi_head_attention", "_sparse_addmm"),
    *("_transformer_encoder_layer_fwd", "mkldnn_linear", "_sparse_mm", "_fft_c2c", "_fft_r2c", "_fft_c2r"),
    *("_scaled_dot_product_fused_attention_overrideable", "miopen_rnn", "_addmm_activation"),
)


def formulas() -> dict[Any, Any]:
    """Return FLOP formulas for ``FlopCounterMode`` of the operators that exist in this process."""
    aten: Any = torch.ops.aten
    found = {
        aten._grouped_mm: _grouped,
        aten._scaled_dot_product_flash_attention_for_cpu: _flash_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_cpu_backward,
        aten.mv: _vector,
        aten.dot: _vector,
        aten.vdot: _vector,
        aten.addmv: _added_vector,
    }
    elsewhere = (
        ("transformers", "grouped_mm_fallback", _grouped),
        ("transformers", "grouped_mm_fallback_backward", _grouped_backward),
        ("lightning_thd", "varlen_attention_cpu", _varlen_cpu),
        ("lightning_thd", "varlen_attention_cpu_backward", _varlen_cpu_backward),
    )
    for namespace, name, formula in elsewhere:
        if hasattr(getattr(torch.ops, namespace), name):
            found[getattr(getattr(torch.ops, namespace), name)] = formula
    return found


def unknown_product(packet: Any) -> str | None:
    """Return the name of an operator that may multiply and has no FLOP formula, or None.

    Returns:
        ``"flash_attn::_flash_attn_varlen_forward"``; None for elementwise operators, views and collectives.
    """
    qualified = str(getattr(packet, "_qualified_op_name", packet))
    namespace, _, operator = qualified.partition("::")
    if namespace in _PLAIN:
        return qualified if operator in _PRODUCTS else None
    return qualified


def _grouped(a: _Shape, b: _Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Return the FLOPs of a grouped matmul, in which every row meets one matrix."""
    batch = a[0] if len(a) == 3 and len(b) == 3 else 1
    return 2 * int(batch * a[-2] * a[-1] * b[-1])


def _grouped_backward(a: _Shape, b: _Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * _grouped(a, b)


def _flash_cpu(query: _Shape, key: _Shape, value: _Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _flash_cpu_backward(
    grad: _Shape, query: _Shape, key: _Shape, value: _Shape, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]


def _vector(a: _Shape, b: _Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * int(prod(a))


def _added_vector(c: _Shape, a: _Shape, b: _Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * int(prod(a))


def _varlen_cpu(q: Any, k: Any, v: Any, cu_q: Any, cu_kv: Any, *rest: Any, out_val: Any = None) -> int:
    left = rest[3]
    return 2 * int(q.shape[1] * (q.shape[2] + v.shape[2])) * _squares(cu_q, cu_kv, left)


def _varlen_cpu_backward(grad: Any, q: Any, k: Any, v: Any, *rest: Any, out_val: Any = None) -> int:
    """Return the FLOPs of the CPU kernel's backward: five products where the forward has two."""
    cu_q, cu_kv, left = rest[2], rest[3], rest[4]
    return 2 * int(q.shape[1] * (3 * q.shape[2] + 2 * v.shape[2])) * _squares(cu_q, cu_kv, left)


_varlen_cpu._get_raw = True  # type: ignore[attr-defined]  # the offsets are on the CPU: reading them is free
_varlen_cpu_backward._get_raw = True  # type: ignore[attr-defined]


def _squares(cu_q: Any, cu_kv: Any, left: int) -> int:
    """Return query-key pairs as torch counts them: whole squares, although half of one is masked."""
    queries, keys = cu_q.diff().long(), cu_kv.diff().long()
    if left < 0:
        return int((queries * keys).sum())
    seen = window_pairs(queries, left + 1, ends=[len(queries)])
    return int(2 * seen.sum() - queries.sum())
