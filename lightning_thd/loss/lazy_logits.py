"""Values of a loss -> placeholder logits, which record the factors, cap and columns that a model applies.

Legend: T slots, V vocabulary, n values. Factors, tanh, casts and vocabulary slices are recorded. All other
operations, except reads of metadata, get zeros and are noted; the loss then calls the model with real logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lightning_thd._trees import tree_leaves, tree_map_only
from lightning_thd._user_code import users_function
from lightning_thd.loss.tiles.logits import LogitMap


@dataclass(slots=True)
class Record:
    """The operations on logits so far: a factor before and after a tanh cap, and the kept columns."""

    inner: float = 1.0
    outer: float = 1.0
    capped: bool = False
    columns: int | None = None

    def multiply(self, factor: float) -> None:
        """Record a factor, before or after the cap."""
        if self.capped:
            self.outer *= factor
        else:
            self.inner *= factor

    def as_map(self) -> LogitMap:
        """Return the recorded operations as a map."""
        if not self.capped:
            return LogitMap(scale=self.inner, valid_vocab_size=self.columns)
        # LogitMap is cap tanh(scale x / cap): cap = |outer|, scale = inner * outer, because tanh is odd.
        return LogitMap(scale=self.inner * self.outer, softcap=abs(self.outer), valid_vocab_size=self.columns)


class LazyLogits(Tensor):
    """Placeholder logits ``[..., T, V]`` that store a few values and record operations."""

    record: Record
    count: int  # n
    learns: bool  # whether gradients were on when the head ran
    made_from: LazyLogits | None = None  # the head's result that these come from; None for that result
    lost: str = ""  # the last operation on a head's result that cannot be recorded
    over: bool = False  # whether the forward pass is over; set only on a head's result
    aliases: bool = False  # whether these logits may share memory with other logits
    placements = ()  # a tensor-parallel head's hook compares these, then calls the two methods below

    @property
    def source(self) -> LazyLogits:
        """Return the result of the head that these logits were made from."""
        return self if self.made_from is None else self.made_from

    def redistribute(self, **_: object) -> LazyLogits:
        """Return the same logits, because they are no DTensor and need no layout or unwrapping."""
        return self

    to_local = redistribute

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record scalings, caps and slices; allow reads of metadata; note all other operations."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        handler = _RECORDED.get(name)
        first = args[0] if args else None
        # A custom autograd function, in which gradients are off, has an unknown backward: record nothing.
        if handler is not None and isinstance(first, LazyLogits) and first.learns == torch.is_grad_enabled():
            record = NotImplemented if "out" in kwargs else handler(first, *args[1:], **kwargs)
            if isinstance(record, Record) and name not in _IN_PLACE:
                return _changed(first, record, aliases=handler in _ALIASING)
            if isinstance(record, Record) and not first.aliases:
                first.record = record
                return first

        is_read = name == "__get__"  # an attribute, such as shape; private ones hold no values
        if is_read:
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        is_users_hook = name == "register_hook" and any(map(users_function, (*args[1:], *kwargs.values())))
        is_harmless = name in _HARMLESS or name.startswith(("is_", "_is_", "_has_"))
        if is_read and name.startswith("_"):
            is_harmless = True
        if is_harmless and not is_users_hook:
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)

        for logits in tree_leaves((args, kwargs)):
            if isinstance(logits, LazyLogits):
                if logits.source.over:
                    raise ValueError(
                        f"{name or func!r} was applied to logits that a hook or a model kept from a loss or "
                        "from log-probabilities, which compute no logits. Read them before the model "
                        "returns, so that they are computed, or call the model itself."
                    )
                logits.source.lost = name or repr(func)

        args, kwargs = tree_map_only(LazyLogits, _zeros, (args, kwargs))
        return func(*args, **kwargs)


def _zeros(logits: LazyLogits) -> Tensor:
    """Return zeros in place of logits, so that the model goes on to its end."""
    with torch.DisableTorchFunctionSubclass():
        zero = torch.zeros((), dtype=logits.dtype, device=logits.device, requires_grad=logits.requires_grad)
        return zero.expand(logits.shape).clone()


def _changed(logits: LazyLogits, record: Record, *, aliases: bool) -> LazyLogits:
    """Return logits after one more operation; ``aliases``: whether both may share memory."""
    changed: LazyLogits = _Copy.apply(logits, record.columns)  # type: ignore[no-untyped-call]
    changed.record = record
    changed.count = logits.count
    changed.learns = logits.learns
    changed.made_from = logits.source
    changed.aliases = aliases
    logits.aliases |= aliases
    return changed


# ---- Operations that can be recorded: each function returns the new record, or NotImplemented


def _multiply(logits: LazyLogits, other: Any, **_: object) -> Any:
    if not isinstance(other, Real) or not math.isfinite(float(other)) or not float(other):
        return NotImplemented
    record = replace(logits.record)
    record.multiply(float(other))
    return record


def _divide(logits: LazyLogits, other: Any, **named: object) -> Any:
    if named.get("rounding_mode") is not None or not isinstance(other, Real) or not float(other):
        return NotImplemented
    return _multiply(logits, 1.0 / other)


def _tanh(logits: LazyLogits, **_: object) -> Any:
    return NotImplemented if logits.record.capped else replace(logits.record, capped=True)


def _cast(logits: LazyLogits, *_: object, **__: object) -> Record:
    return replace(logits.record)


def _getitem(logits: LazyLogits, index: object) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    if any(not isinstance(i, slice) and i is not Ellipsis for i in items):
        return NotImplemented

    reaches_columns = Ellipsis in items or len(items) == logits.dim()
    columns = items[-1] if reaches_columns and isinstance(items[-1], slice) else slice(None)
    rest = items[:-1] if columns is items[-1] else items
    everything = all(i is Ellipsis or i == slice(None) for i in rest)
    if not everything or columns.start or columns.step not in (None, 1):
        return NotImplemented
    if columns.stop is None:
        return replace(logits.record)
    return replace(logits.record, columns=len(range(logits.shape[-1])[columns]))


_ALIASING = (_cast, _getitem)
_IN_PLACE = {"mul_", "__imul__", "div_", "__itruediv__", "tanh_"}
_RECORDED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"), _multiply),
    **dict.fromkeys(("div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__"), _divide),
    **dict.fromkeys(("tanh", "tanh_"), _tanh),
    **dict.fromkeys(
        ("float", "half", "bfloat16", "double", "to", "type", "type_as", "contiguous", "clone"), _cast
    ),
    "__getitem__": _getitem,
}
# Operations that read only metadata; hooks of FSDP2 and torch.compile use these and names like is_*.
_HARMLESS = frozenset(
    {"size", "dim", "ndimension", "numel", "stride", "storage_offset", "untyped_storage"}
    | {"data_ptr", "element_size", "get_device", "register_hook", "__repr__", "__len__", "__hash__"}
    | {"shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "grad"}
    | {"itemsize", "nbytes", "output_nr", "names", "retains_grad"}
)


_NOT_OPENED = "the logits' gradient did not come from open_values"


def _stored(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of ``shape`` whose storage holds ``values``; each of its entries is the first value."""
    return values.new_empty(0).set_(values.clone().untyped_storage(), 0, shape, (0,) * len(shape))


class _Carry(torch.autograd.Function):
    """Makes lazy logits that hold values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.count = values.numel()
        return _stored(values, shape).as_subclass(LazyLogits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        assert not any(grad.stride()), _NOT_OPENED
        return grad.as_strided((ctx.count,), (1,), 0).clone(), None


class _Copy(torch.autograd.Function):
    """Copies logits to a new object without new memory, so that the new object gets its own record."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, columns: int | None) -> Tensor:
        with torch.DisableTorchFunctionSubclass():
            ctx.shape = logits.shape
            data = logits.as_subclass(Tensor).detach()
            return data[..., :columns].as_subclass(LazyLogits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        assert not any(grads[0].stride()), _NOT_OPENED
        return grads[0].as_strided(ctx.shape, grads[0].stride()), None


class _Open(torch.autograd.Function):
    """Takes the values out of lazy logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, count: int) -> Tensor:
        with torch.DisableTorchFunctionSubclass():
            ctx.shape = logits.shape
            return logits.as_subclass(Tensor).as_strided((count,), (1,), 0).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _stored(grads[0].contiguous(), ctx.shape), None


def carry_values(values: Tensor, shape: Sequence[int]) -> LazyLogits:
    """Wrap a head's values ``[n]`` as lazy logits of ``shape``, through which gradients flow."""
    logits: LazyLogits = _Carry.apply(values, tuple(shape))  # type: ignore[no-untyped-call]
    logits.record = Record()
    logits.count = values.numel()
    logits.learns = torch.is_grad_enabled()
    return logits


def open_values(logits: LazyLogits) -> Tensor:
    """Unwrap the values ``[n]`` of lazy logits; their gradient passes through ``logits``."""
    values: Tensor = _Open.apply(logits, logits.count)  # type: ignore[no-untyped-call]
    return values
