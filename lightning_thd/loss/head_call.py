"""One call of a model with its head replaced -> values computed from hidden states instead of logits.

T slots, V vocabulary. The model's own ``forward`` runs through its ``__call__``, hooks and all: FSDP2
gathers the head's weight and reduces its gradient, DDP sees its outputs, PEFT, Accelerate and activation
checkpointing stay in place. The replacements are the same functions at every call, so that torch.compile need
not compile again.

A model scales, caps or slices its logits after the head, each family in its own way. The head therefore
returns ``LazyLogits``, which record what the model does to them as a ``LogitMap`` or refuse it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_thd._find import text_config
from lightning_thd._user_code import described, is_users
from lightning_thd.batch import THDBatch
from lightning_thd.loss.head import (
    HeadOperands,
    guess_logit_map,
    head_operands,
    language_model,
    run_head,
)
from lightning_thd.loss.lazy_logits import LazyLogits, Record, carry_values, open_values
from lightning_thd.loss.router_balance import Experts, Routers
from lightning_thd.loss.tiles.logits import LogitMap
from lightning_thd.models.pack import STATE, announced
from lightning_thd.parallel.pipeline.stage import STAGE, Stage

_ATTRIBUTE = "_thd_head_call"
# (the head's operands, the number of earlier calls of the head, the logit map) -> the values of the slots
Values = Callable[[HeadOperands, int, LogitMap], Tensor]


@dataclass(slots=True)
class _Job:
    """One forward pass."""

    values: Values  # see ``HeadCall.run``
    size: int  # how many values a call of the head gives
    slots: int  # T
    head: Any  # the model's head
    own_head_forward: Any  # a forward that was put on this head object before
    model_forward: Any  # the model's forward, which is replaced meanwhile
    stage: Stage | None  # the stage of a pipeline that this rank holds
    routers: Routers | None  # computes the routers' loss; None leaves it to the model
    logits: list[LazyLogits] = field(default_factory=list)  # what the head returned, one entry a call of it
    seen: Record | None = None  # what the model did to the logits that it returned; None while it has not
    found: dict[str, Tensor] = field(default_factory=dict)  # what ``run`` returns, before a wrapper rounds it


class HeadCall:
    """Replaces the forward of a model and of its head, so that no logits are computed."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.logit_map: LogitMap = guess_logit_map(inner)
        self._record: Record | None = None  # the operations that made ``logit_map``
        self._job: _Job | None = None
        self.experts: Experts | None = None
        self._hooks: list[Any] | None = None  # those that were checked already
        self.choices: Tensor | None = None  # router_balance="step" keeps the step's [E] here
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
        return (type(None), ())  # copies and pickles of the model make their own

    def run(
        self,
        model: nn.Module,
        batch: THDBatch,
        values: Values,
        *,
        size: int = 1,
        routers: Routers | None = None,
    ) -> dict[str, Tensor]:
        """Call the model on a batch with its head replaced, and return what the head computed.

        If the model does something to its logits that its config does not say, it is called a second time,
        with the logit map that the first call recorded; later calls use that map from the start. ``model`` is
        what the user holds, wrappers included. ``values`` gives ``[n]`` from the
        head's operands, how many times the head was called before, and what the model does to its logits;
        ``size`` is n, for pipeline stages that have no head. Returns ``{"values": [n], "value_1": ...,
        "aux_loss": []}``.
        """
        inner, stage, before = self.inner, self.inner.__dict__.get(STAGE), getattr(STATE, "scope", None)
        head = inner.get_output_embeddings()
        called = (model, getattr(model, "base_model", model), inner)
        hooks = [*head._backward_hooks.values(), *head._backward_pre_hooks.values()]
        hooks += [hook for module in called for hook in module._forward_hooks.values()]
        added: list[CodeType] = []
        if hooks != self._hooks:
            for module in {id(x): x for x in called}.values():
                around = [type(module).__call__, *([] if module is inner else [type(module).forward])]
                _refuse_logit_hooks(module, head, around)
                added += _codes(module._forward_hooks.values())
        for _ in range(2):
            head = inner.get_output_embeddings()
            own, own_head = inner.__dict__.get("forward"), head.__dict__.get("forward")
            slots = batch.input_ids.shape[-1]
            job = self._job = _Job(values, size, slots, head, own_head, inner.forward, stage, routers)
            kwargs = batch.hf_kwargs()
            if kwargs.pop("labels", None) is not None:
                _warn_of_labels()
            STATE.scope = announced(batch, kwargs)
            head.__dict__["forward"], inner.__dict__["forward"] = self.head_forward, self.forward
            try:
                with nullcontext() if routers is None else routers.asked(inner, kwargs):
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
        if added:
            _refuse_changes(added, job.found, outputs)
        self._hooks = hooks
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
        made = run_head(head, job.own_head_forward, hidden)
        operands = head_operands(made)
        if operands.hidden.shape[:-1].numel() != job.slots:
            raise ValueError(
                f"The head got hidden states {list(operands.hidden.shape)} for {job.slots} targets, wanted "
                "one a slot. Do not pass logits_to_keep, or inputs that add tokens."
            )
        values = job.values(operands, len(job.logits), self.logit_map)
        values = values if stage is None else stage.share(values)
        shape = (*operands.hidden.shape[:-1], operands.vocabulary)
        logits = carry_values(values, shape, made.record)
        job.logits.append(logits)
        return logits

    def _finish(self, outputs: Any) -> dict[str, Tensor]:
        if torch.compiler.is_compiling():
            outside: dict[str, Tensor] = _outside_compile(self._finish, outputs)
            return outside
        job = self._job
        assert job is not None
        logits = getattr(outputs, "logits", None)
        logits_from = getattr(logits, "source", None)
        if not any(made is logits or made is logits_from for made in job.logits):
            hooks = ", ".join(map(_named, _codes(job.head._forward_hooks.values())))
            hooks = f", which has the forward hook {hooks}" if hooks else ""
            raise ValueError(
                f"{type(self.inner).__name__}.forward returned a {type(outputs).__name__} whose logits did "
                f"not come from its head (get_output_embeddings()){hooks}. Set "
                "config.return_dict=True if it is a tuple; else use loss.fused_linear_cross_entropy on the "
                "last hidden states."
            )
        assert isinstance(logits, LazyLogits)
        job.seen = logits.record
        found = {"values": open_values(logits)}
        further = [made for made in job.logits if made is not logits and made is not logits.source]
        found |= {f"value_{depth}": open_values(made) for depth, made in enumerate(further, start=1)}
        auxiliary = getattr(outputs, "aux_loss", None)
        if job.routers is not None:
            found["aux_loss"] = job.routers.loss(self.inner, outputs)
        elif isinstance(auxiliary, Tensor):
            if (coefficient := self.balance_coefficient) is None:
                raise ValueError(
                    f"{type(self.inner).__name__} returned an auxiliary loss, but neither it nor its config "
                    "has router_aux_loss_coef. Set config.router_aux_loss_coef, or "
                    "config.output_router_logits=False."
                )
            found["aux_loss"] = auxiliary * coefficient
        job.found = found
        return dict(found)

    @property
    def balance_coefficient(self) -> Any:
        """Return the model's coefficient of the balancing loss of a mixture of experts, or None."""
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            coefficient = getattr(self.inner, name, getattr(self.config, name, None))
            if coefficient is not None:
                return coefficient
        return None


def _refuse_logit_hooks(model: nn.Module, head: nn.Module, around: list[Any]) -> None:
    """Refuse hooks of users, and functions around the model's forward, that ask for logits or gradients."""
    codes = _codes([*model._forward_hooks.values(), *around])
    asking = [code for code in codes if "logits" in _words(code)]
    asking += _codes([*head._backward_hooks.values(), *head._backward_pre_hooks.values()])
    for code in asking:
        raise ValueError(
            f"The hook {_named(code)} on {type(model).__name__} or its head asks for logits or their "
            "gradients, and causal_lm_loss never makes them. Remove it during the loss, put what it does "
            "into the model's forward, or use the model's own logits."
        )


def _refuse_changes(
    hooks: list[CodeType], found: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> None:
    """Refuse hooks that changed what the head computed, which stands in the place of the model's outputs."""
    for name, value in found.items():
        if outputs[name] is not value and not torch.allclose(outputs[name], value, rtol=0, equal_nan=True):
            raise ValueError(
                f"A forward hook of the model, one of {', '.join(map(_named, hooks))}, changes its outputs, "
                "which are the loss itself here and not logits. Remove it during the loss, or put what it "
                "does into the model's forward."
            )


def _named(code: CodeType) -> str:
    return f"{code.co_name} ({described(code.co_filename, code.co_firstlineno)})"


def _codes(hooks: Iterable[Any]) -> list[CodeType]:
    """Return the code of users' hooks: functions, methods, partials and objects that can be called."""
    found = []
    for hook in hooks:
        while isinstance(hook, functools.partial):
            hook = hook.func
        hook = inspect.unwrap(hook)
        function = hook if hasattr(hook, "__code__") or hasattr(hook, "__func__") else type(hook).__call__
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is not None and is_users(code.co_filename):
            found.append(code)
    return found


def _words(code: CodeType) -> set[str]:
    """Return the names and strings in a function, and in those inside it."""
    inside = [_words(each) for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))}.union(*inside)


@functools.cache
def _warn_of_labels() -> None:
    """Warn once that the loss of tokens does not use labels of whole sequences."""
    rank_zero_warn(
        "Samples carry a label for each sequence: causal_lm_loss does not use the label, but self.log weighs "
        "batches by their sequences in place of their loss tokens. Drop the key or the column, if it "
        "is there by accident."
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _outside_compile(function: Callable[..., Any], argument: Any) -> Any:
    """Call a function that torch.compile must not trace; eager calls skip this, because it takes longer."""
    return function(argument)
