"""Logits that are never computed -> what a head and a model do to them: products, factors, a cap, columns.

``LazyLogits`` has the shape of logits. Inside a head, under ``Deferred``, it stands for a sum of products,
which a loss can compute tile by tile. Behind the head it carries the loss's values, and the model's factors,
cap and slices are recorded. Any other operation makes the real product inside the head, and is refused after
it.

T slots, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_thd._user_code import calling_frame, described
from lightning_thd.loss.dtensors import is_dtensor
from lightning_thd.loss.tiles.logits import LogitMap


class Product(NamedTuple):
    """One term ``x @ weight.T`` of a head, ``[..., T, H]`` and ``[V, H]``."""

    x: Tensor
    weight: Tensor

    def times(self, factor: Any) -> Product:
        """Multiply by a number, by a tensor of one element, or by one of V elements."""
        if isinstance(factor, Tensor) and factor.numel() > 1:
            return self._replace(weight=self.weight * factor.reshape(-1, 1))
        return self._replace(x=self.x * (factor.reshape(()) if isinstance(factor, Tensor) else factor))


@dataclass(frozen=True, slots=True)
class Products:
    """A sum of products and perhaps a bias ``[V]``: what a head computes."""

    terms: tuple[Product, ...]  # at least one
    bias: Tensor | None = None  # added once to the sum of all terms

    def times(self, factor: Any) -> Products:
        """Multiply by a number or a tensor, as ``Product.times``."""
        flat = factor.flatten() if isinstance(factor, Tensor) else factor
        bias = None if self.bias is None else self.bias * flat
        return Products(tuple(term.times(factor) for term in self.terms), bias)

    def plus(self, other: Products) -> Products:
        """Add two sums; products of the same input become one."""
        terms = list(self.terms)
        for term in other.terms:
            place = next((i for i, own in enumerate(terms) if own.x is term.x), None)
            if place is None:
                terms.append(term)
            else:
                terms[place] = term._replace(weight=terms[place].weight + term.weight)
        biases = [bias for bias in (self.bias, other.bias) if bias is not None]
        return Products(tuple(terms), sum(biases[1:], biases[0]) if biases else None)

    def compute(self) -> Tensor:
        """Compute the sum."""
        total = F.linear(*self.terms[0], self.bias)
        for term in self.terms[1:]:
            total = total + F.linear(*term)
        return total


@dataclass(slots=True)
class Record:
    """The factors and cap that were applied to logits so far."""

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
        # LogitMap is cap tanh(scale x / cap): cap = outer, scale = inner * outer.
        return LogitMap(scale=self.inner * self.outer, softcap=self.outer, valid_vocab_size=self.columns)


class LazyLogits(Tensor):
    """A stand-in for logits ``[..., T, V]`` that stores a few values, or none, and records operations."""

    record: Record
    count: int
    source: LazyLogits | None = None  # the result of the head, from which a model made this
    products: Products | None = None  # while the head runs
    learns: bool = False  # whether a product has a gradient
    placements = ()  # a tensor-parallel head's hook compares these, then calls the two below

    def redistribute(self, **_: object) -> LazyLogits:
        """Return itself: the values it carries have no DTensor layout."""
        return self

    def to_local(self, **_: object) -> LazyLogits:
        """Return itself: there is no DTensor to unwrap."""
        return self

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record scalings, caps and slices of the logits; allow questions about them; refuse the rest."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first = next((x for x in args if isinstance(x, LazyLogits)), None)
        handler = _RECORDED.get(name)
        # Gradients are off inside a custom autograd function. Its backward is unknown, so nothing is
        # recorded.
        if first is not None and first.learns and not torch.is_grad_enabled():
            handler = None
        if handler is not None and first is not None and (first is args[0] or handler in _COMMUTE):
            rest = args[1:] if first is args[0] else (args[0], *args[2:])
            if (found := handler(first, *rest, **kwargs)) is not NotImplemented:
                if not _in_place(name):
                    return found
                first.record, first.products = found.record, found.products
                return first
        asked = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
        if asked in _HARMLESS or asked.startswith(("is_", "_is_", "_has_")):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if "out" not in kwargs and not _in_place(name):
            computed = [_computed(x) for x in (*args, *kwargs.values())]
            if not any(isinstance(x, LazyLogits) for x in computed):
                return func(*computed[: len(args)], **dict(zip(kwargs, computed[len(args) :], strict=True)))
        raise NotImplementedError(
            f"causal_lm_loss never makes the logits, and {place()} applies {asked or func!r} to them. It "
            "follows factors, tanh caps, casts and vocabulary slices. Compute this model's loss with "
            "loss.fused_linear_logprobs on its last hidden states, or with its own logits."
        )


def _in_place(name: str) -> bool:
    """Return whether a function of this name changes a tensor."""
    return name.startswith("__i") or name in ("__setitem__", "__set__") or name[-1:] == "_" != name[-2:-1]


def place() -> str:
    """Return the innermost running function of the user's code and its line, for messages."""
    frame = calling_frame()
    if frame is None:
        return "the model"
    return f"{frame.f_code.co_name} ({described(frame.f_code.co_filename, frame.f_lineno)})"


def _computed(value: Any) -> Any:
    """Return the logits that a stand-in inside a head stands for, and other values as they are."""
    if isinstance(value, list | tuple):
        return type(value)(map(_computed, value)) if type(value) in (list, tuple) else value
    if not isinstance(value, LazyLogits) or value.products is None:
        return value
    record = value.record
    if record != Record(inner=record.inner):
        return value
    with torch.enable_grad(), torch._C.DisableTorchFunction():
        total = value.products.compute()
        return total if record.inner == 1.0 else total * record.inner


def _changed(logits: LazyLogits, record: Record, products: Products | None = None) -> LazyLogits:
    """Return new logits of another record or other products; ``logits`` stay as they are."""
    if products is not None:
        made = deferred(products, logits.shape)
    else:
        made = _Again.apply(logits)  # type: ignore[no-untyped-call]
        made.count, made.source = logits.count, logits if logits.source is None else logits.source
    made.record = record
    return made


def _multiply(logits: LazyLogits, other: Any, **_: object) -> Any:
    record, products = replace(logits.record), logits.products
    number = isinstance(other, Real) and math.isfinite(float(other)) and float(other) != 0.0
    if number:
        record.multiply(float(other))
        return _changed(logits, record, products)
    fits = isinstance(other, Real | Tensor) and not isinstance(other, LazyLogits) and not is_dtensor(other)
    if isinstance(other, Tensor):
        fits = fits and (other.numel() == 1 or other.shape[-1:].numel() == other.numel() == logits.shape[-1])
    if products is not None and fits and not record.capped and record.columns is None:
        return _changed(logits, record, products.times(other))
    if products is not None:
        return NotImplemented
    raise NotImplementedError(
        f"causal_lm_loss got a model that multiplies its logits by {other!r} in {place()}; it follows "
        "finite, nonzero Python numbers. Compute this model's loss with loss.fused_linear_logprobs on its "
        "last hidden states."
    )


def _divide(logits: LazyLogits, other: Any, **named: object) -> Any:
    if named.get("rounding_mode") is not None or (isinstance(other, Real) and float(other) == 0.0):
        return NotImplemented
    return _multiply(logits, 1.0 / other)


def _add(logits: LazyLogits, other: Any, *, alpha: float = 1, **_: object) -> Any:
    """Add another product of the head, or its bias ``[V]``."""
    products, record = logits.products, logits.record
    if products is None or record != Record(inner=record.inner) or is_dtensor(other):
        return NotImplemented
    if isinstance(other, LazyLogits):
        theirs = other.record
        if other.products is None or theirs != Record(inner=theirs.inner) or other.shape != logits.shape:
            return NotImplemented
        more = other.products.times(alpha * theirs.inner / record.inner)
    elif isinstance(other, Tensor) and other.shape[-1:].numel() == other.numel() == logits.shape[-1]:
        more = Products((), other.flatten() * (alpha / record.inner))
    else:
        return NotImplemented
    return _changed(logits, replace(record), products.plus(more))


def _subtract(logits: LazyLogits, other: Any, *, alpha: float = 1, **_: object) -> Any:
    return _add(logits, other, alpha=-alpha)


def _tanh(logits: LazyLogits, **_: object) -> LazyLogits:
    if logits.record.capped:
        raise NotImplementedError(
            "causal_lm_loss got a model that caps its logits by tanh twice; it follows one cap."
        )
    return _changed(logits, replace(logits.record, capped=True), logits.products)


def _cast(logits: LazyLogits, *_: object, **__: object) -> LazyLogits:
    return _changed(logits, replace(logits.record), logits.products)


def _getitem(logits: LazyLogits, index: object) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    last_given = Ellipsis in [i if i is Ellipsis else None for i in items] or len(items) == logits.dim()
    columns = items[-1] if last_given and items[-1] is not Ellipsis else slice(None)
    rest = items[:-1] if last_given else items
    everything = all(i is Ellipsis or i == slice(None) for i in rest)
    if not everything or not isinstance(columns, slice) or columns.start or columns.step not in (None, 1):
        if logits.products is not None:
            return NotImplemented
        raise NotImplementedError(
            f"causal_lm_loss got a model that takes logits[{index!r}] in {place()}; it follows only "
            "[..., :vocab_size]."
        )
    if columns.stop is None:
        return logits
    size = logits.shape[-1]
    stop = columns.stop if columns.stop >= 0 else size + columns.stop
    record = replace(logits.record, columns=min(stop, logits.record.columns or size))
    return _changed(logits, record, logits.products)


_RECORDED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"), _multiply),
    **dict.fromkeys(("div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__"), _divide),
    **dict.fromkeys(("add", "add_", "__add__", "__radd__", "__iadd__"), _add),
    **dict.fromkeys(("sub", "sub_", "subtract", "__sub__", "__isub__"), _subtract),
    **dict.fromkeys(("tanh", "tanh_"), _tanh),
    **dict.fromkeys(
        ("float", "half", "bfloat16", "double", "to", "type", "type_as", "contiguous", "clone"), _cast
    ),
    "__getitem__": _getitem,
}
_COMMUTE = (_multiply, _add)
# What only reads a tensor; hooks of FSDP2 and torch.compile use these, and names beginning with is_.
_HARMLESS = frozenset(
    {"size", "dim", "ndimension", "numel", "stride", "storage_offset", "untyped_storage"}
    | {"data_ptr", "element_size", "get_device", "register_hook", "__repr__", "__len__", "__hash__"}
    | {"shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "grad", "_base", "_version"}
    | {"itemsize", "nbytes", "output_nr", "names", "retains_grad", "_backward_hooks"}
    | {"_post_accumulate_grad_hooks"}
)


# ---- Products of a head, put off


class Deferred(TorchFunctionMode):
    """Inside this context, products of ``slots`` rows by a weight are put off as ``LazyLogits``.

    A product without the gradients that the head has elsewhere is computed: a part under ``no_grad``, or the
    inside of a custom autograd function, whose backward is unknown.
    """

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots, self.learns = slots, torch.is_grad_enabled()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Put off a product by a matrix; run anything else."""
        kwargs = kwargs or {}
        found = _operands(func, args, kwargs)
        if found is not None and (torch.is_grad_enabled() or not self.learns):
            x, weight, bias = found
            x = _computed(x)
            matrix = isinstance(weight, Tensor) and not isinstance(weight, LazyLogits) and weight.ndim == 2
            if matrix and isinstance(x, Tensor) and x.shape[:-1].numel() == self.slots and x.ndim > 1:
                return deferred(Products((Product(x, weight),), bias), (*x.shape[:-1], weight.shape[0]))
        return func(*args, **kwargs)


def _operands(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Any, Any] | None:
    """Return input, weight ``[V, H]`` and bias of a product, or None for another function."""
    if func is F.linear:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
        return given["input"], given["weight"], given.get("bias")
    product = getattr(func, "__name__", "") in ("matmul", "__matmul__") and len(args) == 2
    if product and all(isinstance(x, Tensor) for x in args) and args[1].ndim == 2:
        return args[0], args[1].transpose(0, 1), None
    return None


def deferred(products: Products, shape: Sequence[int]) -> LazyLogits:
    """Return logits of this shape that stand for a sum of products."""
    x, weight = products.terms[0]
    kind = type(weight)
    if not kind.__module__.startswith("torch.") and kind is not Tensor and kind is not nn.Parameter:
        raise ValueError(
            f"The model's head multiplies by a {kind.__module__}.{kind.__name__}, wanted a plain weight, "
            "which causal_lm_loss reads tile by tile. Leave the head out when you quantise the model "
            "(torchao: filter_fn), or use the model's own logits."
        )
    autocast = torch.is_autocast_enabled(x.device.type) if x.device.type != "meta" else False
    dtype = torch.get_autocast_dtype(x.device.type) if autocast and x.dtype != torch.float64 else x.dtype
    leaves = [part for term in products.terms for part in term]
    made = _Defer.apply(dtype, tuple(shape), *leaves, products.bias)  # type: ignore[no-untyped-call]
    made.record, made.products, made.count = Record(), products, 0
    made.learns = torch.is_grad_enabled() and any(part.requires_grad for part in leaves)
    assert isinstance(made, LazyLogits)
    return made


class _Defer(torch.autograd.Function):
    """Logits filled with NaN, so that an operation that bypasses ``__torch_function__`` is noticed."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, shape: tuple[int, ...], *parts: Any) -> Tensor:
        data = torch.full((1,), math.nan, dtype=dtype, device=parts[0].device)
        return torch.Tensor._make_subclass(LazyLogits, data.as_strided(shape, (0,) * len(shape)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "The model's head applies an autograd function of its own to its product, which causal_lm_loss "
            "never computes. Use the model's own logits for this head."
        )


# ---- Values in place of logits


def _stored(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of a shape whose storage holds other values; all its entries are the first."""
    return values.new_empty(0).set_(values.clone().untyped_storage(), 0, shape, (0,) * len(shape))


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.count = values.numel()
        return torch.Tensor._make_subclass(LazyLogits, _stored(values, shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        assert not any(grad.stride()), "the logits' gradient did not come from open_values"
        return grad.as_strided((ctx.count,), (1,), 0).clone(), None


class _Again(torch.autograd.Function):
    """The same logits as another object, so that what a model makes of them has a record of its own."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            data = logits.as_subclass(Tensor).detach()
            return torch.Tensor._make_subclass(LazyLogits, data)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _Open(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, count: int) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            ctx.shape = logits.shape
            return logits.as_subclass(Tensor).as_strided((count,), (1,), 0).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _stored(grads[0].contiguous(), ctx.shape), None


def carry_values(values: Tensor, shape: Sequence[int], record: Record | None = None) -> LazyLogits:
    """Wrap a head's results ``[n]`` as lazy logits ``(1, T, V)`` that pass gradients on.

    The hooks that FSDP2 and DDP hang on a module's outputs then see the gradient pass, gather the weights
    again in time, and reduce their gradients. ``record`` is what the head itself did.
    """
    logits = _Carry.apply(values, tuple(shape))  # type: ignore[no-untyped-call]
    assert isinstance(logits, LazyLogits)
    logits.record = Record() if record is None else record
    logits.count = values.numel()
    return logits


def open_values(logits: LazyLogits) -> Tensor:
    """Unwrap the values ``[n]`` of lazy logits; their gradient passes through ``logits``."""
    values: Tensor = _Open.apply(logits, logits.count)  # type: ignore[no-untyped-call]
    return values
