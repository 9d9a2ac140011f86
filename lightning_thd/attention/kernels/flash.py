"""CUDA tensors -> attention by flash-attn 2 (from Ampere on), 3 (Hopper), 4 (Hopper, data-centre Blackwell).

The calls follow the signatures of flash-attn 2.8, of hopper/flash_attn_interface.py (tag 2.8.3 and main) and
of flash-attn-4 4.0.0b36.
"""

from __future__ import annotations

import inspect
from functools import cache
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from lightning_thd._imports import installed, require
from lightning_thd.attention.kernels import raw
from lightning_thd.attention.kernels.raw import Gradients, OutLse, Saved, empty_gradients, one_size
from lightning_thd.attention.spec import AttentionSpec
from lightning_thd.boundaries import KernelCall

# Prebuilt kernels on the Hugging Face hub, at the versions that transformers 5 pins.
PREBUILT: Final = {2: ("kernels-community/flash-attn2", 4), 3: ("kernels-community/flash-attn3", 1)}
_INTERFACES: dict[int, Any] = {}  # version -> the interface of a prebuilt flash-attn, once loaded


@cache
def prebuilt_trouble(version: int) -> str | None:
    """Load a prebuilt flash-attn once per process; return None, or the end of a message that says why not."""
    if version not in PREBUILT or not _sees_gpu():
        return ""
    if not installed("kernels"):
        return "; or, prebuilt: pip install kernels"
    repository, revision = PREBUILT[version]
    try:
        get_kernel: Any = require("kernels", feature="backend='flash'").get_kernel
        loaded: ModuleType = get_kernel(repository, version=revision)
        _INTERFACES[version] = loaded.flash_attn_interface
    except Exception as err:  # for example no network, or no build for this torch
        return f"; and the prebuilt {repository} did not load ({type(err).__name__})"
    return None


def _sees_gpu() -> bool:
    return torch.cuda.is_available()


def _interface(version: int) -> Any:
    if version in _INTERFACES:
        return _INTERFACES[version]
    if version == 2:
        from flash_attn import flash_attn_interface
    else:
        import flash_attn_interface
    return flash_attn_interface


class Flash2:
    """The raw kernel of flash-attn 2.7 and 2.8."""

    sizes = staticmethod(one_size)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: KernelCall, spec: AttentionSpec) -> OutLse:
        """Call ``_flash_attn_varlen_forward``."""
        run = _interface(2)._wrapped_flash_attn_varlen_forward
        at, spec = raw.for_flash2(q, at, spec)
        sides = spec.left, spec.right
        out, lse, *_ = run(q, k, v, *at.arguments, 0.0, spec.scale, spec.causal, *sides, spec.softcap)
        return out, lse.t()

    def backward(self, grad: Tensor, saved: Saved, at: KernelCall, spec: AttentionSpec) -> Gradients:
        """Call ``_flash_attn_varlen_backward``, which writes into the given gradients."""
        run = _interface(2)._wrapped_flash_attn_varlen_backward
        at, spec = raw.for_flash2(saved.q, at, spec)
        dq, dk, dv = empty_gradients(saved)
        given = grad, *saved[:4], saved.lse.t().contiguous(), dq, dk, dv
        options = 0.0, spec.scale, spec.causal, spec.left, spec.right, spec.softcap
        run(*given, *at.arguments, *options, None, torch.are_deterministic_algorithms_enabled())
        return dq, dk, dv


class Flash3:
    """The raw kernel of flash-attn 3, built from the hopper folder of tag 2.8.3 or of the main branch."""

    sizes = staticmethod(one_size)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: KernelCall, spec: AttentionSpec) -> OutLse:
        """Call ``_flash_attn_forward``."""
        run = _interface(3)._flash_attn_forward
        out, lse, *_ = run(q, k, v, num_splits=1, **_flash3_options(run, at, spec))
        return out, lse.t()

    def backward(self, grad: Tensor, saved: Saved, at: KernelCall, spec: AttentionSpec) -> Gradients:
        """Call ``_flash_attn_backward``, which writes into the given gradients."""
        run = _interface(3)._flash_attn_backward
        dq, dk, dv = empty_gradients(saved)
        options = _flash3_options(run, at, spec)
        options |= {"dq": dq, "dk": dk, "dv": dv}
        options |= {"deterministic": torch.are_deterministic_algorithms_enabled()}
        run(grad, *saved[:4], saved.lse.t().contiguous(), **options)
        return dq, dk, dv


def _offsets(at: KernelCall, spec: AttentionSpec) -> dict[str, Any]:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale")
    return dict(zip(names, (*at.arguments, spec.scale), strict=True))


def _flash3_options(function: Any, at: KernelCall, spec: AttentionSpec) -> dict[str, Any]:
    """Return offsets and mask as keywords of the installed flash-attn 3, whose names differ by build."""
    names, required = _flash3_signature(function)
    options: dict[str, Any] = {**dict.fromkeys(required), **_offsets(at, spec), "softcap": spec.softcap}
    options["is_causal" if "is_causal" in names else "causal"] = spec.causal
    if "window_size" in names:
        return options | {"window_size": (spec.left, spec.right)}
    return options | {"window_size_left": spec.left, "window_size_right": spec.right}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _flash3_signature(function: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return _names_of(function)


@cache
def _names_of(function: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """List a function's parameters, and the required ones without the tensors that every call gives."""
    parameters = inspect.signature(getattr(function, "_init_fn", function)).parameters
    given = {"q", "k", "v", "out", "dout", "softmax_lse", "dq", "dk", "dv"}
    if "dout" not in parameters:  # in a forward, out is an optional tensor to write to
        given.remove("out")
    required = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty and n not in given]
    return tuple(parameters), tuple(required)


class Flash4:
    """The raw kernel of flash-attn 4 (``flash_attn.cute``), in which None means an unlimited window side."""

    def sizes(self, head_size: int, value_size: int) -> tuple[int, int] | None:
        """Return padded head sizes: multiples of 8 up to 128, (192, 128) or (256, 256); None if larger."""
        if max(head_size, value_size) <= 128:
            return -(-head_size // 8) * 8, -(-value_size // 8) * 8
        if head_size <= 192 and value_size <= 128:
            return 192, 128
        return (256, 256) if max(head_size, value_size) <= 256 else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: KernelCall, spec: AttentionSpec) -> OutLse:
        """Call ``_flash_attn_fwd``."""
        from flash_attn.cute.interface import _flash_attn_fwd

        options = {**self._options(at, spec), "softcap": spec.softcap or None, "return_lse": True}
        with torch.no_grad():
            out, lse, *_ = _flash_attn_fwd(q, k, v, **options)
        return out, lse.t()

    def backward(self, grad: Tensor, saved: Saved, at: KernelCall, spec: AttentionSpec) -> Gradients:
        """Call ``_flash_attn_bwd``."""
        from flash_attn.cute.interface import _flash_attn_bwd

        options = {**self._options(at, spec), "softcap": spec.softcap}
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        dq, dk, dv = _flash_attn_bwd(*saved[:4], grad, saved.lse.t().contiguous(), **options)
        return dq, dk, dv

    @staticmethod
    def _options(at: KernelCall, spec: AttentionSpec) -> dict[str, Any]:
        windowed = spec.windowed
        return {
            **_offsets(at, spec),
            "causal": spec.causal and not windowed,
            "window_size_left": spec.left if windowed and spec.left >= 0 else None,
            "window_size_right": spec.right if windowed and spec.right >= 0 else None,
        }


MODULES = {2: "flash_attn.flash_attn_interface", 3: "flash_attn_interface", 4: "flash_attn.cute.interface"}
