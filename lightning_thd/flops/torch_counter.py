"""One step under torch's FLOP counter -> layers, for models without a known config.

Matmuls grow with the slots. torch counts fused attention as dense squares of query-key pairs. Its count
divided by their number is the cost of a pair. torch counts grouped products and attention on a CPU as zero,
so formulas for them are here. A warning names the operators without a formula. The counter cannot see kernels
outside torch's dispatcher, such as those of flash-linear-attention.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from lightning_thd._warnings import MeasureWarning, warn
from lightning_thd.flops.terms import Layer, Term
from lightning_thd.stats import SeqStats, combine, window_pairs

_Shape: TypeAlias = Any  # torch.Size: torch's own formulas are untyped

# Operators of these namespaces without a formula multiply nothing, except those in ``_PRODUCTS``.
_PLAIN = (
    *("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "c10d_functional", "fsdp", "dtensor"),
    *("_dtensor", "symm_mem", "rngprims", "inductor", "streams", "debugprims", "quantized_decomposed"),
)
_PRODUCTS = (  # products of aten for which torch has no formula
    *("_scaled_grouped_mm", "_scaled_grouped_mm_v2", "_scaled_mm_v2", "_int_mm", "_cdist_forward"),
    *("_weight_int4pack_mm", "_weight_int8pack_mm", "_trilinear", "mkldnn_rnn_layer", "_cudnn_rnn"),
    *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_native_multi_head_attention", "_sparse_addmm"),
    *("_transformer_encoder_layer_fwd", "mkldnn_linear", "_sparse_mm", "_fft_c2c", "_fft_r2c", "_fft_c2r"),
    *("_scaled_dot_product_fused_attention_overrideable", "miopen_rnn", "_addmm_activation"),
)


def formulas() -> dict[Any, Any]:
    """Return FLOP formulas for ``FlopCounterMode`` of the operators that exist in this process."""
    aten: Any = torch.ops.aten
    forward: Any = sdpa_flop_count
    backward: Any = sdpa_backward_flop_count
    found = {
        aten._grouped_mm: _grouped,
        aten._scaled_dot_product_flash_attention_for_cpu: lambda *qkv, **_: forward(*qkv[:3]),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *of, **_: backward(*of[:4]),
        **dict.fromkeys((aten.mv, aten.dot, aten.vdot), lambda a, b, **_: 2 * int(prod(a))),
        aten.addmv: lambda c, a, b, **_: 2 * int(prod(a)),
    }
    elsewhere = (
        ("transformers", "grouped_mm_fallback", _grouped),
        ("transformers", "grouped_mm_fallback_backward", lambda *args, **_: 2 * _grouped(*args)),
        ("lightning_thd", "varlen_attention_cpu", _varlen_cpu),
        ("lightning_thd", "varlen_attention_cpu_backward", _varlen_cpu_backward),
    )
    for namespace, name, formula in elsewhere:
        operator = getattr(getattr(torch.ops, namespace), name, None)
        if operator is not None:
            found[operator] = formula
    return found


def _grouped(a: _Shape, b: _Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Return the FLOPs of a grouped matmul, in which every row is multiplied by one matrix."""
    batch = a[0] if len(a) == 3 and len(b) == 3 else 1
    return 2 * int(batch * a[-2] * a[-1] * b[-1])


def _varlen_cpu(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any, *rest: Any, out_val: Any = None
) -> int:
    return (
        2 * int(q.shape[1] * (q.shape[2] + v.shape[2])) * _squares(cu_seqlens_q, cu_seqlens_kv, left=rest[3])
    )


def _varlen_cpu_backward(grad: Any, q: Any, k: Any, v: Any, *rest: Any, out_val: Any = None) -> int:
    """Return the FLOPs of the CPU kernel's backward: five products, where the forward has two."""
    products = 2 * int(q.shape[1] * (3 * q.shape[2] + 2 * v.shape[2]))
    return products * _squares(cu_seqlens_q=rest[2], cu_seqlens_kv=rest[3], left=rest[4])


_varlen_cpu._get_raw = True  # type: ignore[attr-defined]  # give it tensors: reading offsets on a CPU is free
_varlen_cpu_backward._get_raw = True  # type: ignore[attr-defined]


def _squares(cu_seqlens_q: Any, cu_seqlens_kv: Any, left: int) -> int:
    """Return query-key pairs as torch counts them: as if no causal mask hid half of them."""
    queries, keys = cu_seqlens_q.diff().long(), cu_seqlens_kv.diff().long()
    if left < 0:
        return int((queries * keys).sum())
    seen = window_pairs(queries, left + 1, ends=[len(queries)])
    return int(2 * seen.sum() - queries.sum())


_NEEDED = 4 / 5  # four of the five products of attention's backward; the fifth recomputes the scores
_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention", "varlen")


class StepCounter(FlopCounterMode):
    """A FLOP counter with more formulas than torch's; ``unknown`` lists the operators without a formula."""

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=formulas())
        self.unknown: set[str] = set()
        self.attention: dict[tuple[str, int, int], int] = defaultdict(int)  # FLOPs by operator, rows, length

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if func_packet in self.flop_registry:
            name = str(func_packet)
            if any(key in name for key in _ATTENTION):
                query = args[1] if "backward" in name else args[0]
                rows, length = (query.shape[0], query.shape[-2]) if query.dim() > 3 else (1, query.shape[0])
                self.attention[name, rows, length] += self.flop_registry[func_packet](
                    *args, **kwargs, out_val=out
                )
        else:
            named = str(getattr(func_packet, "_qualified_op_name", func_packet))
            namespace, _, operator = named.partition("::")
            if namespace not in _PLAIN or operator in _PRODUCTS:
                self.unknown.add(named)
        return super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]


def counted_layers(counter: StepCounter, seen: Sequence[SeqStats], *, name: str) -> tuple[Layer, ...]:
    """Convert the counts of one step, with these microbatches, to layers that scale with slots and pairs."""
    stats, each = combine(seen), [one.slots for one in seen]
    matmuls = counter.get_total_flops() - sum(counter.attention.values())
    if not matmuls or not stats.slots:
        raise ValueError(
            f"torch counted {matmuls} FLOPs of matmuls in {name} on {stats.slots} slots. Run a whole step on "
            "a batch with tokens; kernels that torch cannot count need FlopsModel.register."
        )
    if counter.unknown:
        warn(
            f"FLOPs of {name} are too few: torch has no formula for {', '.join(sorted(counter.unknown))}. "
            "Add the family with FlopsModel.register, or pass flops_model=.",
            MeasureWarning,
        )
    per_pair = 0.0
    for (operator, rows, length), flops in counter.attention.items():
        whole = "varlen" not in operator and rows * length >= min(each)
        # torch's count of a backward pass includes the recomputed scores, which the model does not need
        needed = flops * _NEEDED if "backward" in operator else flops
        # In a call over all slots, a slot has ``length`` keys, padding included, but at most a batch row's
        # length, which a decoder's rows may exceed. In other calls, a slot has the keys of its sequence.
        pairs = min(length, max(each) / rows) * stats.slots if whole else max(stats.sum_squares, 1)
        per_pair += needed / pairs
    terms = (
        _third("counted", "linear", "token", matmuls / stats.slots),
        _third("counted_attention", "attention", "pair", per_pair),
    )
    return (Layer(path="", terms=terms, recomputable=False),)


def _third(name: str, kind: Any, basis: Any, cost: float) -> Term:
    """Return a term whose forward is a third of the counted FLOPs and whose backward is the rest."""
    total = round(cost)
    return Term(
        name=name, kind=kind, basis=basis, forward=total // 3, input_grad=total - total // 3, weight_grad=0
    )
