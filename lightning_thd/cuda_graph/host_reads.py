"""A call inside a step -> why it cannot be captured, or None.

Two views are needed: Python functions (``tolist`` never reaches the dispatcher) and dispatched operators
(``if x > 0`` reaches it as ``_local_scalar_dense`` wherever it was written).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

_READ = "reads a value back to the host, which waits for the device and fixes the value it had at capture"
_SHAPE = "makes a shape that depends on values"
_CONSTANT = (
    "copies host values to the device, which fixes the values they had at capture. Make the tensor once, "
    "outside of the step, or fill it on the device (torch.full, torch.arange)"
)
_FUNCTIONS: Final[dict[Any, str]] = {
    Tensor.item: f".item() {_READ}",
    Tensor.tolist: f".tolist() {_READ}",
    Tensor.numpy: f".numpy() {_READ}",
    Tensor.cpu: f".cpu() {_READ}",
    Tensor.__bool__: f"a branch on a tensor {_READ}. Use torch.where",
    Tensor.__int__: f"int() of a tensor {_READ}",
    Tensor.__float__: f"float() of a tensor {_READ}",
    Tensor.__index__: f"a tensor used as an index of Python {_READ}",
    Tensor.__array__: f"a tensor given to numpy {_READ}",
    torch.tensor: f"torch.tensor(...) {_CONSTANT}",
    torch.from_numpy: f"torch.from_numpy(...) {_CONSTANT}",
}
_aten = torch.ops.aten
_OPERATORS: Final[dict[Any, str]] = {
    _aten._local_scalar_dense.default: f"it {_READ}",
    _aten.equal.default: f"torch.equal {_READ}",
    _aten.nonzero.default: f"nonzero() {_SHAPE}. Use torch.where, or nonzero_static(size=...)",
    _aten.masked_select.default: f"masked_select {_SHAPE}. Multiply by the mask, or use torch.where",
    _aten._unique.default: f"unique() {_SHAPE}",
    _aten._unique2.default: f"unique() {_SHAPE}",
    _aten.unique_consecutive.default: f"unique_consecutive() {_SHAPE}",
    _aten.unique_dim.default: f"unique() {_SHAPE}",
    _aten.bincount.default: f"bincount() {_SHAPE}. Use scatter_add into a tensor of fixed size",
}
_BOOLEAN = f"indexing with a boolean mask {_SHAPE}. Multiply by the mask, or use torch.where"


def function_problem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return why a Python call such as ``Tensor.tolist`` cannot be captured, or None."""
    if func is torch.as_tensor and args and not isinstance(args[0], Tensor):
        return f"torch.as_tensor(...) {_CONSTANT}"
    try:
        return _FUNCTIONS.get(func)
    except TypeError:  # an unhashable callable is not in the table
        return None


def operator_problem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return why a dispatched operator cannot be captured, or None."""
    found = _OPERATORS.get(func)
    if found is not None:
        return found
    if func is _aten.repeat_interleave.Tensor:
        known = kwargs.get("output_size", args[1] if len(args) > 1 else None) is not None
        return None if known else f"repeat_interleave without output_size {_SHAPE}. Pass output_size="
    if func in (_aten.index.Tensor, _aten._unsafe_index.Tensor):
        return _BOOLEAN if _has_mask(args[1]) else None
    if func in (_aten.index_put.default, _aten.index_put_.default):
        # One value under one mask is a masked_fill on every device.
        single = args[2].numel() == 1 and len(args[1]) == 1
        return _BOOLEAN if _has_mask(args[1]) and not single else None
    if func is _aten._to_copy.default:
        target = kwargs.get("device")
        source = args[0].device.type
        if target is not None and torch.device(target).type != source:
            why = _CONSTANT if source == "cpu" else _READ
            return f"a copy from {source} to {torch.device(target).type} {why}"
    return None


def _has_mask(indices: Any) -> bool:
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
