"""Modes under which waiting for the device raises: anywhere by the operators, on CUDA by torch itself."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

torch.backends.cudnn.allow_tf32 = False  # TF32 would round convolutions in fp32 to 10 bits
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.bincount.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.equal.default,
}


class RefuseDeviceReads(TorchDispatchMode):
    """Raise where a GPU would make the host wait, on any device."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            raise AssertionError(f"{func} reads the device back")
        if func is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            raise AssertionError("repeat_interleave without output_size reads the device back")
        return func(*args, **kwargs)


@contextlib.contextmanager
def no_waiting(mode: str = "error") -> Iterator[None]:
    """Let torch raise in the body where the host would wait for a CUDA device."""
    before = torch.cuda.get_sync_debug_mode()
    _set_mode(mode)
    try:
        yield
    finally:
        _set_mode(before)


def _set_mode(mode: str | int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype, which is an error in this suite
        torch.cuda.set_sync_debug_mode(mode)
