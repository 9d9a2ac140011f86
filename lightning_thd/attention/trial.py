"""A kernel that this package never ran on a GPU -> how its results for a small pack are wrong, or None.

The trial runs once for every kind of call, before the kernel's first use, and compares with the portable
kernel. The pack has sequences of several lengths, fewer key-value heads than query heads, and sinks, which
show an error of the log-sum-exp. Windows are cut to fit the pack.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_thd._modes import KERNEL_ERRORS
from lightning_thd.attention.kernels import portable, raw
from lightning_thd.attention.spec import AttentionSpec
from lightning_thd.boundaries import KernelCall

# Queries and keys of each sequence. One is longer than a kernel's block, and one has keys before its queries.
_LENGTHS = ((5, 5), (130, 130), (1, 1), (70, 70), (9, 40))
_HEADS = 4
_KV_HEADS = 2
_WINDOW = 11  # the largest side of a window in the trial
# Half precision rounds results by 2^-8 or less of their size. Errors of a mask or a scale are far larger.
_TOLERANCE = 0.05


def trouble(
    kernel: raw.RawKernel,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    spec: AttentionSpec,
) -> str | None:
    """Return how a kernel's results differ from the portable kernel's, or its error; None if they agree.

    Args:
        kernel: the kernel to try, with its backward.
        device: where it runs.
        dtype: that of q, k and v.
        sizes: the head sizes of keys and of values.
        spec: the mask, scale and softcap.
    """
    spec = replace(spec, left=min(spec.left, _WINDOW), right=min(spec.right, _WINDOW))
    try:
        found = _results(kernel, device, dtype, sizes, spec)
    except KERNEL_ERRORS as failure:
        return f"it failed: {type(failure).__name__}: {failure}"

    wanted = _results(portable.PortableKernel(), device, dtype, sizes, spec)
    for name, result, expected in zip(("output", "dq", "dk", "dv", "dsinks"), found, wanted, strict=True):
        error = (result.double() - expected.double()).abs().max() / expected.double().abs().max()
        if not float(error) < _TOLERANCE:  # a NaN is an error
            return f"its {name} differs by {float(error):.2g} of the largest value"
    return None


def _results(
    kernel: raw.RawKernel,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    spec: AttentionSpec,
) -> tuple[Tensor, ...]:
    """Return the output of the small pack and the gradients of q, k, v and sinks."""
    lengths_q, lengths_kv = zip(*_LENGTHS, strict=True)
    head_size, value_size = sizes
    shapes = (
        (sum(lengths_q), _HEADS, head_size),
        (sum(lengths_kv), _KV_HEADS, head_size),
        (sum(lengths_kv), _KV_HEADS, value_size),
        (_HEADS,),
        (sum(lengths_q), _HEADS, value_size),
    )
    generator = torch.Generator().manual_seed(0)  # the user's generators stay as they are
    randoms = (torch.randn(shape, generator=generator, device="cpu") for shape in shapes)
    q, k, v, sinks, grad = (x.to(device, dtype) for x in randoms)
    call = KernelCall(
        _offsets(lengths_q, device),
        _offsets(lengths_kv, device),
        max(lengths_q),
        max(lengths_kv),
        q_lengths=lengths_q,
        kv_lengths=lengths_kv,
    )

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        # A checkpoint around the layer would expect the tensors that are saved here in its second run too.
        saved_tensors_hooks(_unchanged, _unchanged),
    ):
        leaves = tuple(x.clone().requires_grad_() for x in (q, k, v, sinks))
        out = raw.attend(kernel, leaves[0], leaves[1], leaves[2], call, spec, leaves[3])
        gradients = torch.autograd.grad(out, leaves, grad)
    return out.detach(), *gradients


def _unchanged(x: Tensor) -> Tensor:
    return x


def _offsets(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
