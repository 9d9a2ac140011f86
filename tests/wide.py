"""Models that compute parts in fp32 whatever their weights are -> the same in fp64, for comparisons in fp64.

One fp32 rounding of a norm turns a difference of 1e-16 into one of 1e-8 as soon as a value lies on an edge.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def nothing_narrower() -> Generator[None]:
    """Let what is fp64 stay so, in this process, where a model asks for fp32."""
    tensor: Any = torch.Tensor
    to = tensor.to
    single = tensor.float
    kind = tensor.type
    softmax = torch.nn.functional.softmax

    def wide_to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.dtype == torch.float64:
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return to(self, *args, **kwargs)

    def wide_type(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.dtype == torch.float64:
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        return kind(self, *args, **kwargs)

    def wide_softmax(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if input.dtype == torch.float64 and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return softmax(input, *args, **kwargs)

    tensor.type = wide_type
    tensor.to = wide_to
    tensor.float = lambda self: wide_to(self, torch.float32)
    torch.nn.functional.softmax = wide_softmax  # type: ignore[assignment]
    try:
        yield
    finally:
        tensor.to = to
        tensor.float = single
        tensor.type = kind
        torch.nn.functional.softmax = softmax
