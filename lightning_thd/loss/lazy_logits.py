"""The output of a head -> a stand-in that holds no logits and records what the model does to them.

T slots in a pack, V vocabulary. A model scales, caps or slices its logits after the head, each family in
its own way. Instead of a table of families, the head returns a ``LazyLogits``: a tensor of the right shape
whose storage holds only the loss. Whatever the model does to it is recorded as a ``LogitMap`` or refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lightning_thd.loss.tiles.logits import LogitMap


@dataclass(slots=True)
class Record:
    """The factors and cap that a model has applied to its logits so far."""

    inner: float = 1.0
    outer: float = 1.0
    capped: bool = False
    columns: int | None = None

    def multiply(self, factor: float) -> None:
        """Record a factor, before or behind the cap."""
        if self.capped:
            self.outer *= factor
        else:
            self.inner *= factor

    def as_map(self) -> LogitMap:
        """Return the recorded operations as a map."""
        if not self.capped:
            return LogitMap(scale=self.inner, valid_vocab_size=self.columns)
        # outer * tanh(inner * x) with the convention post = 1: cap = outer, scale = inner * cap
        return LogitMap(scale=self.inner * self.outer, softcap=self.outer, valid_vocab_size=self.columns)


class LazyLogits(Tensor):
    """A stand-in for logits ``[..., T, V]`` that stores a few values and records operations."""

    record: Record
    count: int
    placements = ()  # a tensor-parallel head's hook compares these, then calls the two below

    def redistribute(self, **_: object) -> LazyLogits:
        """Return itself: the values it carries have no DTensor layout."""
        return self

    def to_local(self, **_: object) -> LazyLogits:
        """Return itself: there is no DTensor to unwrap."""
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record scalings, caps and slices of the logits; allow attribute reads; refuse the rest."""
        name = getattr(func, "__name__", "")
        handler = _RECORDED.get(name)
        if handler is not None and isinstance(args[0], LazyLogits):
            return handler(args[0], *args[1:], **(kwargs or {}))
        if name in _HARMLESS or name.startswith(("is_", "_is_", "_has_")):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise NotImplementedError(
            f"causal_lm_loss never makes the logits, and the model applies {name or func!r} to them after "
            "its head. It follows factors, tanh caps, casts and vocabulary slices. Compute this model's loss "
            "with loss.fused_linear_logprobs on its last hidden states, or with its own logits."
        )


def _number(value: object, what: str) -> float:
    if isinstance(value, Real) and math.isfinite(float(value)) and float(value) != 0.0:
        return float(value)
    raise NotImplementedError(
        f"causal_lm_loss got a model that {what} its logits by {value!r}; it follows finite, nonzero Python "
        "numbers. Compute this model's loss with loss.fused_linear_logprobs on its last hidden states."
    )


def _multiply(logits: LazyLogits, other: object, **_: object) -> LazyLogits:
    logits.record.multiply(_number(other, "multiplies"))
    return logits


def _divide(logits: LazyLogits, other: object, **_: object) -> LazyLogits:
    logits.record.multiply(1.0 / _number(other, "divides"))
    return logits


def _tanh(logits: LazyLogits, **_: object) -> LazyLogits:
    if logits.record.capped:
        raise NotImplementedError(
            "causal_lm_loss got a model that caps its logits by tanh twice; it follows one cap."
        )
    logits.record.capped = True
    return logits


def _unchanged(logits: LazyLogits, *_: object, **__: object) -> LazyLogits:
    return logits


def _getitem(logits: LazyLogits, index: object) -> LazyLogits:
    items = index if isinstance(index, tuple) else (index,)
    last_given = Ellipsis in [i if i is Ellipsis else None for i in items] or len(items) == logits.dim()
    columns = items[-1] if last_given and items[-1] is not Ellipsis else slice(None)
    rest = items[:-1] if last_given else items
    everything = all(i is Ellipsis or i == slice(None) for i in rest)
    if not everything or not isinstance(columns, slice) or columns.start or columns.step not in (None, 1):
        raise NotImplementedError(
            f"causal_lm_loss got a model that takes logits[{index!r}]; it follows only [..., :vocab_size]."
        )
    if columns.stop is not None:
        size = logits.shape[-1]
        stop = columns.stop if columns.stop >= 0 else size + columns.stop
        logits.record.columns = min(stop, logits.record.columns or size)
    return logits


_RECORDED: dict[str, Callable[..., LazyLogits]] = {
    **dict.fromkeys(("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"), _multiply),
    **dict.fromkeys(("div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__"), _divide),
    **dict.fromkeys(("tanh", "tanh_"), _tanh),
    **dict.fromkeys(
        ("float", "half", "bfloat16", "double", "to", "type", "type_as", "contiguous"), _unchanged
    ),
    "__getitem__": _getitem,
}
# Questions about a tensor that change nothing; hooks of FSDP2 and torch.compile ask them, beside any
# "is_...".
_HARMLESS = frozenset(
    {"__get__", "size", "dim", "ndimension", "numel", "stride", "storage_offset", "untyped_storage"}
    | {"data_ptr", "element_size", "get_device", "register_hook", "__repr__", "__len__", "__hash__"}
)


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.count = values.numel()
        data = values.new_empty(0).set_(values.clone().untyped_storage(), 0, shape, (0,) * len(shape))
        return torch.Tensor._make_subclass(LazyLogits, data)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        assert not any(grad.stride()), "the logits' gradient did not come from open_values"
        return grad.as_strided((ctx.count,), (1,), 0).clone(), None


class _Open(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, count: int) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            ctx.shape = logits.shape
            return logits.as_subclass(Tensor).as_strided((count,), (1,), 0).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        values = grads[0].contiguous()
        # The gradient of logits that are not there: their shape, over a storage that holds the values'.
        return values.new_empty(0).set_(
            values.clone().untyped_storage(), 0, ctx.shape, (0,) * len(ctx.shape)
        ), None


def carry_values(values: Tensor, shape: tuple[int, ...]) -> LazyLogits:
    """Wrap a head's results ``[n]`` as lazy logits ``(1, T, V)`` that pass gradients on.

    The hooks that FSDP2 and DDP hang on a module's outputs then see the gradient pass, gather the weights
    again in time, and reduce their gradients.
    """
    logits = _Carry.apply(values, shape)  # type: ignore[no-untyped-call]
    assert isinstance(logits, LazyLogits)
    logits.record = Record()
    logits.count = values.numel()
    return logits


def open_values(logits: LazyLogits) -> Tensor:
    """Unwrap the values ``[n]`` of lazy logits; their gradient passes through ``logits``."""
    values: Tensor = _Open.apply(logits, logits.count)  # type: ignore[no-untyped-call]
    return values
