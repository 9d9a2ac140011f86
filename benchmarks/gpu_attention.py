"""GPU parts of attention: every backend against brute force in fp64, and our call against the kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu_parts import Row, median_us, part
from lightning_thd._imports import available
from lightning_thd.attention import SUPPORT, varlen_attention
from lightning_thd.attention.entry import describe, run
from lightning_thd.attention.spec import AttentionSpec, make_spec
from lightning_thd.attention.support import Kernel, missing, why_not
from lightning_thd.boundaries import KernelCall

# bf16 keeps 8 bits; out is rounded once, weights and gradients a few times on the way.
TOLERANCE = 2e-2
LENGTHS = [1, 2, 63, 64, 65, 511, 512, 1000, 0, 777, 33]
CASES: dict[str, tuple[dict, bool]] = {  # name -> (options, sinks)
    "causal": ({}, False),
    "bidirectional": ({"causal": False}, False),
    "window 128": ({"window": 128}, False),
    "two-sided window": ({"causal": False, "window": (100, 20)}, False),
    "softcap 30": ({"softcap": 30.0}, False),
    "sinks": ({}, True),
    "sinks and window": ({"window": 128}, True),
}
SIZES = {"64": (8, 2, 64, 64), "128": (8, 8, 128, 128), "192 and 128": (4, 4, 192, 128)}


_EXPECTED: dict[tuple[str, tuple[int, int, int, int]], list[Tensor]] = {}


def offsets(lengths: list[int]) -> Tensor:
    """Return cu_seqlens on the CPU."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def inputs(lengths: list[int], heads: int, kv_heads: int, size: int, value_size: int) -> list[Tensor]:
    """Draw q, k, v and the gradient of out in bf16 on the GPU."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((heads, size), (kv_heads, size), (kv_heads, value_size), (heads, value_size))
    return [
        torch.randn(sum(lengths), *shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for shape in shapes
    ]


def brute_force(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, lengths: list[int], spec: AttentionSpec
) -> Tensor:
    """Attend in every sequence by itself, with all of its scores and a mask; the dtype of the inputs.

    Args:
        q: queries, ``[T, heads, D]``.
        k: keys, ``[T, key heads, D]``.
        v: values, ``[T, key heads, value D]``.
        sinks: a score for each head that takes part in the softmax and has no value, ``[heads]``.
        lengths: of the sequences; they add up to T.
        spec: mask, scale and cap.
    """
    group = q.shape[1] // k.shape[1]
    outs = []
    for queries, keys, values in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        keys = keys.repeat_interleave(group, dim=1)
        values = values.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * spec.scale
        if spec.softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)

        places = torch.arange(len(queries), device=q.device)
        ahead = places[None, :] - places[:, None]  # of a key, relative to the query
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if spec.left >= 0:
            hidden |= ahead < -spec.left
        if spec.right >= 0:
            hidden |= ahead > spec.right
        scores = scores.masked_fill(hidden, -torch.inf)

        if sinks is not None:
            column = sinks[:, None, None].expand(-1, len(queries), 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = scores.softmax(-1)[..., : len(queries)]
        outs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outs)


def worst_error(kernel: Kernel, case: str, sizes: tuple[int, int, int, int]) -> float | None:
    """Largest error of out and every gradient over that tensor's largest entry; None where unsupported."""
    options, with_sinks = CASES[case]
    spec = make_spec(sizes[2], **options)
    q, k, v, grad = inputs(LENGTHS, *sizes)
    torch.manual_seed(0)
    sinks = torch.randn(sizes[0], device="cuda") if with_sinks else None
    if why_not(kernel, describe(q, v, spec, sinks)) is not None:
        return None
    leaves = [x.requires_grad_() for x in (q, k, v)] + ([] if sinks is None else [sinks.requires_grad_()])
    cu_seqlens = offsets(LENGTHS).cuda()
    longest = max(LENGTHS)
    out = run(kernel, q, k, v, KernelCall(cu_seqlens, cu_seqlens, longest, longest), spec, sinks)
    actual = [out, *torch.autograd.grad(out, leaves, grad)]

    key = (case, sizes)
    if key not in _EXPECTED:  # the same for every kernel
        copies = [x.detach().double().requires_grad_() for x in leaves]
        exact = brute_force(*copies, lengths=LENGTHS, spec=spec)
        _EXPECTED[key] = [exact.detach(), *torch.autograd.grad(exact, copies, grad.double())]

    pairs = zip(actual, _EXPECTED[key], strict=True)
    errors = [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs]
    return float("nan") if any(e != e for e in errors) else max(errors)


@part(
    "attention_equal",
    shows="every backend equals brute force in fp64, forward and backward",
    seconds=60,
    rank=10,
)
def equal() -> Iterator[Row]:
    """Yield the worst relative error of every kernel installed here, case and head size."""
    for kernel, row in SUPPORT.items():
        if row.device == "cpu" or missing(kernel) is not None:
            continue
        for case in CASES:
            for size, sizes in SIZES.items():
                error = worst_error(kernel, case, sizes)
                if error is not None:
                    yield Row(
                        case=f"{kernel}, {case}, head size {size}",
                        value=error,
                        unit="relative",
                        goal=f"<= {TOLERANCE}",
                        met=error <= TOLERANCE,
                    )


def direct_calls(at: Tensor, longest: int) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """The libraries' own functions that are installed here, by the backend that should match them."""
    calls: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}
    from torch.nn.attention.varlen import varlen_attn

    if "window_size" in inspect.signature(varlen_attn).parameters:
        calls["torch"] = lambda q, k, v: varlen_attn(q, k, v, at, at, longest, longest, window_size=(-1, 0))
    if available("flash_attn.flash_attn_interface"):
        from flash_attn import flash_attn_varlen_func

        calls["flash"] = lambda q, k, v: flash_attn_varlen_func(
            q, k, v, at, at, longest, longest, causal=True
        )
    return calls


def compare(documents: int, length: int) -> Iterator[Row]:
    """Yield our time and direct time over ours for one shape, forward and backward, every library here."""
    lengths = [length] * documents
    at = offsets(lengths).cuda()
    q, k, v, grad = inputs(lengths, 32, 32, 128, 128)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def both(attend: Callable[..., Tensor]) -> float:
        return median_us(lambda: torch.autograd.grad(attend(*leaves), leaves, grad))

    for backend, direct in direct_calls(at, length).items():
        mine = both(lambda *x, b=backend: varlen_attention(*x, at, at, length, length, backend=b))
        ratio = both(direct) / mine
        case = f"{backend}, {documents} documents of {length}, 32 heads of 128, forward and backward"
        yield Row(case=f"{case}: ours", value=mine, unit="us")
        yield Row(case=f"{case}: direct / ours", value=ratio, unit="x", goal=">= 0.98", met=ratio >= 0.98)


@part(
    "attention_speed",
    shows="our call costs no more than the kernel called directly",
    seconds=15,
    rank=34,
)
def speed() -> Iterator[Row]:
    """Yield the comparison for long and for short documents."""
    for documents, length in ((8, 4096), (512, 64)):
        yield from compare(documents, length)
