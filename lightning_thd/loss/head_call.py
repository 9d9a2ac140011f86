"""One call of a model with its head replaced -> values computed from hidden states instead of logits.

T slots, V vocabulary. The model's own ``forward`` runs through its ``__call__``, hooks and all: FSDP2
gathers the head's weight and reduces its gradient, DDP sees its outputs, PEFT, Accelerate and activation
checkpointing stay in place. The replacements are the same functions at every call, so that torch.compile need
not compile again.

A model scales, caps or slices its logits after the head, each family in its own way. The head therefore
returns ``LazyLogits``: a tensor of the right shape whose storage holds only the loss. Whatever the model does
to it is recorded as a ``LogitMap`` or refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_thd._find import text_config
from lightning_thd.batch import THDBatch
from lightning_thd.loss.dtensors import is_dtensor
from lightning_thd.loss.head import (
    LINEAR_FORWARD,
    HeadOperands,
    LinearHeads,
    active_copy,
    guess_logit_map,
    head_operands,
    language_model,
)
from lightning_thd.loss.tiles.logits import LogitMap
from lightning_thd.models.pack import STATE, announced
from lightning_thd.parallel.pipeline.stage import Stage, stage_of

_ATTRIBUTE = "_thd_head_call"
# Gives an operand's values: the head's operands, the number of earlier calls of the head, the logit map.
Values = Callable[[HeadOperands, int, LogitMap], Tensor]


@dataclass(slots=True)
class _Job:
    """One forward pass.

    Attributes:
        values: see ``HeadCall.run``.
        size: likewise.
        slots: T.
        head: the model's head.
        own_head_forward: a forward that was put on this head object before.
        model_forward: the model's forward, which is replaced meanwhile.
        stage: the stage of a pipeline that this rank holds.
        logits: what the head returned, one entry a call of it.
        seen: what the model did to the logits that it returned; None while it has not.
        found: what ``run`` returns, before a wrapper rounds it.
    """

    values: Values
    size: int
    slots: int
    head: Any
    own_head_forward: Any
    model_forward: Any
    stage: Stage | None
    logits: list[LazyLogits] = field(default_factory=list)
    seen: Record | None = None
    found: dict[str, Tensor] = field(default_factory=dict)


class HeadCall:
    """Replaces the forward of a model and of its head, so that no logits are computed."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.logit_map: LogitMap = guess_logit_map(inner)
        self._record: Record | None = None  # the operations that made ``logit_map``
        self._job: _Job | None = None
        self._heads = LinearHeads()
        self._config: Any = None  # the model's, of which ``config`` is the language model's part
        self.config: Any = None

    @classmethod
    def of(cls, model: nn.Module) -> HeadCall:
        """Return the ``HeadCall`` of the language model inside ``model``, made in the first call."""
        call = getattr(model, "__dict__", {}).get(_ATTRIBUTE)
        if call is None or call.inner is not model:  # wrapped, new, or a copy that carries the original's
            inner = language_model(model)
            call = inner.__dict__.get(_ATTRIBUTE)
            if call is None or call.inner is not inner:
                call = inner.__dict__[_ATTRIBUTE] = cls(inner)
        assert isinstance(call, HeadCall)
        if call._config is not call.inner.config:
            call._config, call.config = call.inner.config, text_config(call.inner.config)
        attention = getattr(call.config, "_attn_implementation", None)
        if attention != "thd":
            raise ValueError(
                f"{type(call.inner).__name__} runs attn_implementation={attention!r}, which can let packed "
                "sequences see each other without an error. Load it with attn_implementation='thd', or call "
                "model.set_attn_implementation('thd')."
            )
        return call

    def __reduce__(self) -> tuple[Any, ...]:
        return (_nothing, ())  # copies and pickles of the model make their own

    def run(self, model: nn.Module, batch: THDBatch, values: Values, *, size: int = 1) -> dict[str, Tensor]:
        """Call the model on a batch with its head replaced, and return what the head computed.

        The model is called again when it does something to its logits that its config does not say. The next
        calls know.

        Args:
            model: what the user holds, wrappers included.
            batch: the microbatch; it is announced to the model's layers.
            values: gives ``[n]`` from the head's operands, how many times the head was called before, and
                what the model does to its logits.
            size: n, for pipeline stages that have no head.

        Returns:
            ``{"values": [n], "value_1": ..., "aux_loss": []}``: one value a call of the head.

        Raises:
            ValueError: for a wrapper that goes past the model's forward, and so past its replacement.
        """
        inner, stage, before = self.inner, stage_of(self.inner), getattr(STATE, "scope", None)
        for _ in range(2):
            head: Any = inner.get_output_embeddings()
            own, own_head = inner.__dict__.get("forward"), head.__dict__.get("forward")
            slots = batch.input_ids.shape[-1]
            job = self._job = _Job(values, size, slots, head, own_head, inner.forward, stage)
            kwargs = batch.hf_kwargs()
            if kwargs.pop("labels", None) is not None:
                _warn_of_labels()
            STATE.scope = announced(batch, kwargs)
            head.__dict__["forward"], inner.__dict__["forward"] = self.head_forward, self.forward
            try:
                outputs: dict[str, Tensor] = model(**kwargs)
            finally:
                STATE.scope, self._job = before, None
                for module, forward in ((inner, own), (head, own_head)):
                    if forward is None:
                        del module.__dict__["forward"]
                    else:
                        module.__dict__["forward"] = forward
            for name, value in job.found.items():
                # FSDP2 with an output_dtype (Accelerate's default for bf16) rounds what leaves the model.
                if outputs[name].dtype.itemsize < value.dtype.itemsize:
                    outputs[name] = value
            if job.seen is None:
                raise ValueError(
                    f"{type(model).__name__} never called {type(inner).__name__}.forward as it is now: "
                    "it holds a forward from before, as PEFT's adaption prompts do. Use another adapter or "
                    "wrapper for packs, or compute the loss from the model's own logits."
                )
            if job.seen == self._record:
                break
            self._record, found = job.seen, job.seen.as_map()
            if found.agrees(self.logit_map):
                break
            self.logit_map = found
            if stage is not None and not stage.again():
                break
        return outputs

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Run the model's forward and return the computed values in place of logits."""
        assert self._job is not None
        outputs: dict[str, Tensor] = self._finish(self._job.model_forward(*args, **kwargs))
        return outputs

    def head_forward(self, hidden: Tensor) -> LazyLogits:
        """Compute the job's values from hidden states ``[1, T, H]`` and return them as lazy logits."""
        if torch.compiler.is_compiling():
            outside: LazyLogits = _outside_compile(self.head_forward, hidden)
            return outside
        job = self._job
        assert job is not None
        head, stage = job.head, job.stage
        if stage is not None and not stage.holds_head:
            values = stage.stand_in(job.size, hidden)
            logits = carry_values(values, (*hidden.shape[:-1], head.out_features))
            job.logits.append(logits)
            return logits
        operands = head_operands(head, hidden)
        if type(head).forward is not LINEAR_FORWARD or job.own_head_forward is not None:
            active: Any = active_copy(head)
            base = getattr(active, "base_layer", active)
            given = job.own_head_forward if base is head else base.__dict__.get("forward")
            if not is_dtensor(base.weight):
                self._heads.check(base, given, operands.hidden, operands.weight)
        if operands.hidden.shape[:-1].numel() != job.slots:
            raise ValueError(
                f"The head got hidden states {list(operands.hidden.shape)} for {job.slots} targets, wanted "
                "one a slot. Do not pass logits_to_keep, or inputs that add tokens."
            )
        values = job.values(operands, len(job.logits), self.logit_map)
        values = values if stage is None else stage.share(values)
        logits = carry_values(values, (*operands.hidden.shape[:-1], operands.vocabulary))
        job.logits.append(logits)
        return logits

    def _finish(self, outputs: Any) -> dict[str, Tensor]:
        if torch.compiler.is_compiling():
            outside: dict[str, Tensor] = _outside_compile(self._finish, outputs)
            return outside
        job = self._job
        assert job is not None
        logits = getattr(outputs, "logits", None)
        if not any(logits is made for made in job.logits):
            raise ValueError(
                f"{type(self.inner).__name__}.forward returned a {type(outputs).__name__} whose logits did "
                "not come from its head (get_output_embeddings()). Set config.return_dict=True if it is a "
                "tuple; else use loss.fused_linear_cross_entropy on the last hidden states."
            )
        assert isinstance(logits, LazyLogits)
        job.seen = logits.record
        found = {"values": open_values(logits)}
        further = [made for made in job.logits if made is not logits]
        found |= {f"value_{depth}": open_values(made) for depth, made in enumerate(further, start=1)}
        auxiliary = getattr(outputs, "aux_loss", None)
        if isinstance(auxiliary, Tensor):
            found["aux_loss"] = auxiliary * self._auxiliary_factor()
        job.found = found
        return dict(found)

    def _auxiliary_factor(self) -> Any:
        """Return the model's coefficient of the balancing loss of a mixture of experts."""
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            coefficient = getattr(self.inner, name, getattr(self.config, name, None))
            if coefficient is not None:
                return coefficient
        raise ValueError(
            f"{type(self.inner).__name__} returned an auxiliary loss, but neither it nor its config has "
            "router_aux_loss_coef. Set config.router_aux_loss_coef, or config.output_router_logits=False."
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
@functools.cache
def _warn_of_labels() -> None:
    """Warn once that the loss of tokens does not use labels of whole sequences."""
    rank_zero_warn(
        "Samples carry a label for each sequence: causal_lm_loss does not use the label, but self.log weighs "
        "batches by their sequences in place of their loss tokens. Drop the key or the column, if it "
        "is there by accident."
    )


def _outside_compile(function: Callable[..., Any], argument: Any) -> Any:
    """Call a function that torch.compile must not trace; eager calls skip this, because it takes longer."""
    return function(argument)


def _nothing() -> None:
    return None


# ---- Logits that are not there


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
