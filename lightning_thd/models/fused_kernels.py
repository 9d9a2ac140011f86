"""A state-space layer's kernels and a pack -> whether they can run here, and their boundary arguments."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_thd._imports import available
from lightning_thd._known_bad import known_problems
from lightning_thd._static import shapes_are_static
from lightning_thd.models.pack import Pack
from lightning_thd.seqlens import cu_seqlens_from_lengths


def can_run(kernels: tuple[str, ...] | None, tokens: Tensor) -> bool:
    """Return whether a layer's own kernels are usable here and keep the sequences of a pack apart.

    Args:
        kernels: packages that must be installed for it; None where they cannot.
        tokens: what the layer is called with; kernels run on CUDA devices only.

    Returns:
        False as well for flash-linear-attention while a step is recorded for replay, as it reads the device
        to cut sequences into chunks; and where its backward is known to be wrong.
    """
    if kernels is None or not _on_gpu(tokens) or ("fla" in kernels and shapes_are_static()):
        return False
    usable: bool = _usable(kernels, tokens.device.index or 0)
    return usable


def boundaries(kernels: tuple[str, ...], pack: Pack, layer: type) -> dict[str, Any]:
    """Return the boundaries of sequences as keywords that transformers passes on to the kernels.

    Returns:
        seq_idx int32 ``[1, T]`` and cu_seq_lens_q int32 ``[S + 1]`` on the device. For kernels of
        flash-linear-attention also cu_seqlens_cpu, the same on the host: without it they read the device.
    """
    told: dict[str, Any] = {"seq_idx": pack.seq_idx, "cu_seq_lens_q": pack.cu_seqlens_q}
    if "fla" in kernels and _hands_on(layer):
        if "cu_seqlens_cpu" not in pack.cache:
            pack.cache["cu_seqlens_cpu"] = cu_seqlens_from_lengths(pack.lengths)
        told["cu_seqlens_cpu"] = pack.cache["cu_seqlens_cpu"]
    return told


def _hands_on(layer: type) -> bool:
    """Return whether transformers passes a layer's kernel only the keywords it takes, as since 5.20."""
    rule = getattr(sys.modules.get(layer.__module__), "torch_chunk_gated_delta_rule", None)
    return hasattr(rule, "__wrapped__")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _usable(kernels: tuple[str, ...], device: int) -> bool:
    return all(map(available, kernels)) and all(_is_sound(kernel, _capability(device)) for kernel in kernels)


@cache
def _is_sound(kernel: str, capability: int | None) -> bool:
    found = known_problems(kernel, capability=capability)
    for entry in found:
        rank_zero_warn(
            f"{entry.problem}: {entry.instead}. Layers run on padded groups of sequences meanwhile."
        )
    return not found


@cache
def _capability(device: int) -> int | None:
    return torch.cuda.get_device_capability(device)[0] if torch.cuda.is_available() else None


def _on_gpu(tokens: Tensor) -> bool:
    return tokens.is_cuda
