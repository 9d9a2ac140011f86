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
from lightning_thd._private import private, private_of
from lightning_thd.attention.kernels import raw
from lightning_thd.attention.kernels.raw import Gradients, OutLse, Saved, empty_gradients, one_size
from lightning_thd.attention.spec import AttentionSpec
from lightning_thd.boundaries import KernelCall

# Prebuilt kernels on the Hugging Face hub, at the versions that transformers 5 pins.
PREBUILT: Final = {2: ("kernels-community/flash-attn2", 4), 3: ("kernels-community/flash-attn3", 1)}
# In the table of private names: the raw kernels of each version have no public name.
_FLASH2 = "flash_attn.flash_attn_interface"
_FLASH3 = "flash_attn_interface"
_FLASH4 = "flash_attn.cute.interface"
_INTERFACES: dict[int, Any] = {}  # version -> the interface of a prebuilt flash-attn, once loaded


@cache
def prebuilt_trouble(version: int) -> str | None:
    """Load a prebuilt flash-attn once per process; return None, or the end of a message that says why not.

    The end is empty if there is nothing to advise, because no prebuilt kernel is for this version or machine.
    """
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
    """Return the interface of a prebuilt flash-attn that was loaded, else that of the installed package."""
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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, spec: AttentionSpec) -> OutLse:
        """Call ``_flash_attn_varlen_forward``."""
        run = private_of(_interface(2), f"{_FLASH2}._wrapped_flash_attn_varlen_forward")
        call, spec = raw.for_flash2(q.shape[0], call, spec)
        dropout = 0.0
        options = (dropout, spec.scale, spec.causal, spec.left, spec.right, spec.softcap)
        out, lse, *_ = run(q, k, v, *call.arguments, *options)
        return out, lse.t()

    def backward(self, grad: Tensor, saved: Saved, call: KernelCall, spec: AttentionSpec) -> Gradients:
        """Call ``_flash_attn_varlen_backward``, which writes into the given gradients."""
        run = private_of(_interface(2), f"{_FLASH2}._wrapped_flash_attn_varlen_backward")
        call, spec = raw.for_flash2(saved.q.shape[0], call, spec)
        dq, dk, dv = empty_gradients(saved)
        tensors = (grad, *saved[:4], saved.lse.t().contiguous(), dq, dk, dv)
        dropout = 0.0
        options = (dropout, spec.scale, spec.causal, spec.left, spec.right, spec.softcap)
        alibi_slopes = None
        deterministic = torch.are_deterministic_algorithms_enabled()
        run(*tensors, *call.arguments, *options, alibi_slopes, deterministic)
        return dq, dk, dv


class Flash3:
    """The raw kernel of flash-attn 3, built from the hopper folder of tag 2.8.3 or of the main branch."""

    sizes = staticmethod(one_size)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, spec: AttentionSpec) -> OutLse:
        """Call ``_flash_attn_forward``."""
        run = private_of(_interface(3), f"{_FLASH3}._flash_attn_forward")
        out, lse, *_ = run(q, k, v, num_splits=1, **_flash3_options(run, call, spec))
        return out, lse.t()

    def backward(self, grad: Tensor, saved: Saved, call: KernelCall, spec: AttentionSpec) -> Gradients:
        """Call ``_flash_attn_backward``, which writes into the given gradients."""
        run = private_of(_interface(3), f"{_FLASH3}._flash_attn_backward")
        dq, dk, dv = empty_gradients(saved)
        options = _flash3_options(run, call, spec)
        options["dq"] = dq
        options["dk"] = dk
        options["dv"] = dv
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        run(grad, *saved[:4], saved.lse.t().contiguous(), **options)
        return dq, dk, dv


def _offsets(call: KernelCall, spec: AttentionSpec) -> dict[str, Any]:
    """Return offsets, longest lengths and scale under the names of flash-attn 3 and 4."""
    return {
        "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_k": call.cu_seqlens_kv,
        "max_seqlen_q": call.max_seqlen_q,
        "max_seqlen_k": call.max_seqlen_kv,
        "softmax_scale": spec.scale,
    }


def _flash3_options(function: Any, call: KernelCall, spec: AttentionSpec) -> dict[str, Any]:
    """Return offsets and mask as keywords of the installed flash-attn 3, whose names differ by build."""
    names, required = _flash3_signature(function)
    options: dict[str, Any] = dict.fromkeys(required)
    options |= _offsets(call, spec)
    options["softcap"] = spec.softcap

    options["is_causal" if "is_causal" in names else "causal"] = spec.causal
    if "window_size" in names:
        options["window_size"] = (spec.left, spec.right)
    else:
        options["window_size_left"] = spec.left
        options["window_size_right"] = spec.right
    return options


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _flash3_signature(function: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return _names_of(function)


def _undecorated(function: Any) -> Any:
    """Return the function that ``torch.library.custom_op`` made an operator of; any other as it is."""
    kind: Any = vars(torch.library)["CustomOpDef"]
    if isinstance(function, kind):
        return private_of(function, "torch.library.CustomOpDef._init_fn")
    return function


@cache
def _names_of(function: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """List a function's parameters, and the required ones without the tensors that every call gives."""
    parameters = inspect.signature(_undecorated(function)).parameters
    tensors = {"q", "k", "v", "out", "dout", "softmax_lse", "dq", "dk", "dv"}
    if "dout" not in parameters:  # in a forward, out is an optional tensor to write to
        tensors.remove("out")

    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and name not in tensors
    ]
    return tuple(parameters), tuple(required)


class Flash4:
    """The raw kernel of flash-attn 4 (``flash_attn.cute``), in which None means an unlimited window side."""

    def sizes(self, head_size: int, value_size: int) -> tuple[int, int] | None:
        """Return padded head sizes: multiples of 8 up to 128, (192, 128) or (256, 256); None if larger."""
        if max(head_size, value_size) <= 128:
            return -(-head_size // 8) * 8, -(-value_size // 8) * 8
        if head_size <= 192 and value_size <= 128:
            return 192, 128
        if max(head_size, value_size) <= 256:
            return 256, 256
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, spec: AttentionSpec) -> OutLse:
        """Call ``_flash_attn_fwd``."""
        run = private(f"{_FLASH4}._flash_attn_fwd")
        options = self._options(call, spec)
        options["softcap"] = spec.softcap or None
        options["return_lse"] = True
        with torch.no_grad():
            out, lse, *_ = run(q, k, v, **options)
        return out, lse.t()

    def backward(self, grad: Tensor, saved: Saved, call: KernelCall, spec: AttentionSpec) -> Gradients:
        """Call ``_flash_attn_bwd``."""
        run = private(f"{_FLASH4}._flash_attn_bwd")
        options = self._options(call, spec)
        options["softcap"] = spec.softcap
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        dq, dk, dv = run(*saved[:4], grad, saved.lse.t().contiguous(), **options)
        return dq, dk, dv

    @staticmethod
    def _options(call: KernelCall, spec: AttentionSpec) -> dict[str, Any]:
        """Return offsets and mask as keywords; the sides of a window stand for its causal mask."""
        options = _offsets(call, spec)
        options["causal"] = spec.causal and not spec.windowed
        options["window_size_left"] = None
        options["window_size_right"] = None
        if spec.windowed and spec.left >= 0:
            options["window_size_left"] = spec.left
        if spec.windowed and spec.right >= 0:
            options["window_size_right"] = spec.right
        return options


MODULES = {2: _FLASH2, 3: _FLASH3, 4: _FLASH4}
