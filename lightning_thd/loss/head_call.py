"""One call of a model with its head replaced -> values computed from hidden states instead of logits.

Legend: T slots, R rows (selected slots), H hidden size, V vocabulary, n values of a head call, E experts. The
model's own ``forward`` runs through ``__call__`` with all hooks, so FSDP2, DDP, PEFT and checkpointing keep
working. The head returns ``LazyLogits``, which record the model's operations on the logits as a ``LogitMap``.
Full logits, T x V numbers, are computed in three cases only: the head is not a plain linear layer; the user's
code may read the logits; no fixed ``LogitMap`` describes how the model changes them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_thd._find import text_config, unwrapped
from lightning_thd._user_code import users_function
from lightning_thd.batch import THDBatch
from lightning_thd.loss.lazy_logits import LazyLogits, Record, carry_values, open_values
from lightning_thd.loss.prepare import LossArgs, is_dtensor, local_hidden, plain, vocabulary_group
from lightning_thd.loss.router_balance import Experts, Routers
from lightning_thd.loss.tiles.logits import LogitMap
from lightning_thd.models.pack import BOUNDARIES, STATE, Scope
from lightning_thd.models.preparing import is_prepared
from lightning_thd.models.preparing import prepare as prepare_model
from lightning_thd.models.refusals import refuse_losing_adapters
from lightning_thd.parallel.pipeline.stage import STAGE, Stage
from lightning_thd.parallel.routers import require_gradients
from lightning_thd.warnings import SlowWarning, THDWarning, warn

_ATTRIBUTE = "_thd_head_call"
# The module of the hooks that torch's composable activation checkpoint sets on a module.
_COMPOSABLE_CHECKPOINT = "torch.distributed._composable.checkpoint_activation"
LINEAR_FORWARD = nn.Linear.forward


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOperands:
    """The hidden states, weight and bias of a head as plain tensors on this rank, or finished logits."""

    hidden: Tensor  # ``[..., T, H]``; logits ``[..., T, V]`` if ``weight`` is None
    weight: Tensor | None  # ``[V, H]``, or this rank's rows of it
    bias: Tensor | None = None  # ``[V]``, or this rank's part of it
    tp_group: dist.ProcessGroup | None = None  # ranks that share the vocabulary
    partial_hidden: bool = False  # whether DTensor, not the loss, sums the gradient of ``hidden``
    vocabulary: int  # V over all ranks

    def at(self, slots: Tensor) -> HeadOperands:
        """Return operands with the hidden states of some slots, int64 ``[R]``; slots may repeat."""
        return replace(self, hidden=self.hidden.flatten(0, -2).index_select(0, slots))

    def loss_args(self, targets: Tensor, logit_map: LogitMap, loss_tokens: int | None) -> LossArgs:
        """Build the arguments of a fused loss, with one target per row of ``hidden``."""
        targets = targets.view(self.hidden.shape[:-1])
        how = {"tp_group": self.tp_group, "loss_tokens": loss_tokens, "partial_hidden": self.partial_hidden}
        return LossArgs(self.hidden, self.weight, targets, self.bias, logit_map, **how)  # type: ignore[arg-type]


# (the head's operands, the number of its earlier calls, the logit map) -> values ``[n]``, such as a loss
Values = Callable[[HeadOperands, int, LogitMap], Tensor]


@dataclass(slots=True)
class _Job:
    """The inputs and the results of one forward pass."""

    values: Values  # see ``Values``
    size: int  # n, the number of values of a head call
    slots: int  # T
    head: Any  # the model's head
    own_head_forward: Any  # a forward that other code has set on this head object, or None
    model_forward: Any  # the model's own forward, which this pass replaces
    stage: Stage | None  # the stage of a pipeline that this rank holds
    routers: Routers | None  # computes the routers' loss; None leaves it to the model
    whole: str  # why the full logits are computed; empty if they are not
    called: bool = False  # whether the model's forward ran
    logits: list[Tensor] = field(default_factory=list)  # what the head returned, one entry per call
    seen: Record | None = None  # what the model did to the logits that it returned
    lost: str = ""  # why this pass has no values
    found: dict[str, Tensor] = field(default_factory=dict)  # what ``run`` returns, before a wrapper rounds it


class HeadCall:
    """Replaces the forward of a model and of its head, so that logits are computed only if they must be."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.logit_map: LogitMap = guess_logit_map(inner)
        self._record: Record | None = None  # the operations that made ``logit_map``
        self._here = threading.local()  # ``job``: this thread's forward pass, if it runs a loss
        self._own: tuple[Callable[..., Tensor], ...] = ()  # the forwards of model and head, for other threads
        self._lock = threading.RLock()
        self.experts: Experts | None = None
        self._hooks: list[Any] | None = None  # the hooks for which ``_whole`` was decided
        self._whole = ""  # why the full logits are computed; empty if they are not
        self._warned = False
        self.choices: Tensor | None = None  # how often each expert was chosen in the step so far, [E]
        self._config: Any = None  # the whole model's config; ``config`` is its language model's
        self.config: Any = None

    @classmethod
    def of(cls, model: nn.Module) -> HeadCall:
        """Return the ``HeadCall`` of the language model inside ``model``, made in the first call."""
        call = getattr(model, "__dict__", {}).get(_ATTRIBUTE)
        if call is None or call.inner is not model:  # a wrapper, a new model, or a copy with an old HeadCall
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
                "sequences see each other without an error. Build it with attn_implementation='thd' and its "
                "own copy of the config, or call model.set_attn_implementation('thd')."
            )
        if not is_prepared(call.inner):
            prepare_model(model)
        return call

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())  # copies of the model make a new HeadCall

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

        If the model changes its logits in another way than ``logit_map`` says, it is called again. Returns
        ``{"values": [size]}``, those of further head calls as "value_1", ..., a routers' loss as "aux_loss".
        """
        stage = self.inner.__dict__.get(STAGE)
        found = self._run(model, batch, values, size, routers, stage)
        if stage is None or not torch.is_grad_enabled():
            return found
        of_pass: dict[str, Tensor] = stage.seam.cut(found)
        return of_pass

    def _run(
        self,
        model: nn.Module,
        batch: THDBatch,
        values: Values,
        size: int,
        routers: Routers | None,
        stage: Stage | None,
    ) -> dict[str, Tensor]:
        """Call the model until it changes its logits as ``logit_map`` says."""
        inner = self.inner
        self._look_at_hooks(model)
        for attempt in range(3):
            slots, head = batch.input_ids.shape[-1], inner.get_output_embeddings()
            with self._lock:  # else a thread could save another's replacement as the model's own forward
                own_head = head.__dict__.get("forward")
                job = _Job(values, size, slots, head, own_head, inner.forward, stage, routers, self._whole)
                outputs: dict[str, Tensor] = self._call(model, batch, job)
            for made in job.logits:
                if isinstance(made, LazyLogits):
                    made.over = True
            if not job.called:
                raise ValueError(
                    f"{type(model).__name__} never called the replaced {type(inner).__name__}.forward: "
                    "it holds an earlier forward, as PEFT's adaption prompts do. Use another wrapper."
                )
            if job.whole:
                self._warn_of_memory(job.whole)
                return self._values_of_logits(job, outputs)
            if self._followed(job, again=attempt > 0) or (stage is not None and not stage.again()):
                break
        for name, value in job.found.items():
            # FSDP2 with an output_dtype (Accelerate's default for bf16) rounds outputs: return exact values.
            if outputs[name].dtype.itemsize < value.dtype.itemsize:
                outputs[name] = value
        return outputs

    def _call(self, model: nn.Module, batch: THDBatch, job: _Job) -> Any:
        inner, before = self.inner, getattr(STATE, "scope", None)
        own, kwargs = inner.__dict__.get("forward"), batch.hf_kwargs()
        kwargs["attention_mask"] = None  # the language model has "thd", and wrappers may look at a mask
        if kwargs.pop("labels", None) is not None:
            _warn_of_labels()
        scope = STATE.scope = Scope(kwargs[BOUNDARIES], None)
        self._here.job, self._own = job, (job.model_forward, job.head.forward)
        if job.stage is not None:
            job.stage.in_loss = True
        job.head.__dict__["forward"], inner.__dict__["forward"] = self.head_forward, self.forward
        # Inside PEFT's disable_adapter(), a wrapper of prompt tuning holds the forward of its base model.
        held = model.__dict__.get("forward")
        holds_base = model is not inner and held is not None and held == job.model_forward
        if holds_base:
            model.__dict__["forward"] = self.forward
        try:
            with nullcontext() if job.routers is None else job.routers.requested(inner, kwargs):
                outputs = model(**kwargs)
        finally:
            STATE.scope, self._here.job = before, None
            if job.stage is not None:
                job.stage.in_loss = False
            if holds_base:
                model.__dict__["forward"] = held
            for module, forward in ((inner, own), (job.head, job.own_head_forward)):
                if forward is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = forward
        if scope.sees_later is not None:
            raise ValueError(
                f"{scope.sees_later} of {type(inner).__name__} attends to later tokens, so "
                "each token would see its own target. Set is_decoder=True in its config, if it has that. Or "
                "call loss.fused_linear_cross_entropy on the last hidden states with your own targets."
            )
        return outputs

    def _followed(self, job: _Job, *, again: bool) -> bool:
        """Return whether a pass used the right logit map; else choose a map, or full logits, for the next."""
        if job.lost:
            if job.stage is not None:
                raise NotImplementedError(
                    f"In a pipeline causal_lm_loss supports factors, a tanh cap, casts and vocabulary slices "
                    f"of logits, but {job.lost}. Set pipeline_parallel_size=1."
                )
            self._whole = job.lost
            return False
        assert job.seen is not None
        if job.seen == self._record:
            return True
        self._record, found = job.seen, job.seen.as_map()
        if found.agrees(self.logit_map):
            return True
        self.logit_map = found
        if again:
            self._whole = "the model changes them in another way in every call"
        return False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward; in a thread that runs a loss, return values in place of the outputs."""
        job: _Job | None = getattr(self._here, "job", None)
        if job is None:
            return self._own[0](*args, **kwargs)
        return self._finish(job.model_forward(*args, **kwargs))

    def head_forward(self, hidden: Tensor) -> Tensor:
        """Return lazy logits of hidden states ``[1, T, H]``; real ones outside a loss or if ``job.whole``."""
        if torch.compiler.is_dynamo_compiling():
            outside: Tensor = _outside_compile(self.head_forward, hidden)
            return outside
        job: _Job | None = getattr(self._here, "job", None)
        if job is None:
            return self._own[1](hidden)
        head, stage = job.head, job.stage
        if stage is not None and not stage.holds_head:
            values = stage.stand_in(job.size, hidden)
            logits: Tensor = carry_values(values, (*hidden.shape[:-1], head.out_features))
            job.logits.append(logits)
            return logits
        linear = None if job.whole else plain_linear(head, job.own_head_forward)
        if linear is None:
            kind = f"{type(head).__module__}.{type(head).__name__}"
            job.whole = job.whole or f"its head is not a plain linear layer but a {kind}"
            logits = (job.own_head_forward or functools.partial(type(head).forward, head))(hidden)
        else:
            operands = head_operands(linear, hidden)
            _check_slots(job, operands.hidden)
            values = job.values(operands, len(job.logits), self.logit_map)
            values = values if stage is None else stage.share(values)
            logits = carry_values(values, (*operands.hidden.shape[:-1], operands.vocabulary))
        job.logits.append(logits)
        return logits

    def _finish(self, outputs: Any) -> Any:
        """Return values in place of the model's outputs; the outputs if ``job.whole`` or ``job.lost``."""
        if torch.compiler.is_dynamo_compiling():
            return _outside_compile(self._finish, outputs)
        job: _Job = self._here.job
        job.called = True
        logits = getattr(outputs, "logits", None)
        if job.whole:
            return outputs
        lazy = [made for made in job.logits if isinstance(made, LazyLogits)]
        job.lost = next((f"the model applies {made.lost} to them" for made in lazy if made.lost), "")
        source = logits.source if isinstance(logits, LazyLogits) else None
        if not job.lost and not any(made is source for made in lazy):
            _require_logits(outputs, self.inner)
            job.lost = "the model returns other logits than those of its head"
        if job.lost:
            return outputs
        assert isinstance(logits, LazyLogits)
        job.seen = logits.record
        found = {"values": open_values(logits)}
        found |= {f"value_{i}": open_values(x) for i, x in enumerate((x for x in lazy if x is not source), 1)}
        job.found = found | self._auxiliary(job, outputs)
        return dict(job.found)

    def _values_of_logits(self, job: _Job, outputs: Any) -> dict[str, Tensor]:
        """Compute the values from the logits that the model, its hooks and its wrappers returned."""
        logits, stage = _require_logits(outputs, self.inner), job.stage
        if len(job.logits) > 1:
            raise ValueError(
                f"{type(self.inner).__name__} calls its head {len(job.logits)} times, to predict further "
                f"tokens, and its logits are computed whole, because {job.whole}. Use the model's own logits."
            )
        if stage is not None and not stage.holds_head:
            made: Any = job.logits[0]
            return {"values": open_values(made), **self._auxiliary(job, outputs)}
        _check_slots(job, logits)
        operands = HeadOperands(hidden=logits, weight=None, vocabulary=logits.shape[-1])
        values = job.values(operands, 0, LogitMap())
        if stage is not None:  # carry the values, so that all stages run the same operations
            values = open_values(carry_values(stage.share(values), logits.shape))
        return {"values": values, **self._auxiliary(job, outputs)}

    def _auxiliary(self, job: _Job, outputs: Any) -> dict[str, Tensor]:
        """Return the loss of ``job.routers``, else the model's balancing loss of experts, if it has one."""
        if job.routers is not None:
            return {"aux_loss": job.routers.loss(self.inner, outputs)}
        if not isinstance(auxiliary := getattr(outputs, "aux_loss", None), Tensor):
            return {}
        if (coefficient := self.balance_coefficient) is None:
            raise ValueError(
                f"{type(self.inner).__name__} returned an auxiliary loss, but neither it nor its config has "
                "router_aux_loss_coef. Set it, or config.output_router_logits=False."
            )
        if coefficient:
            require_gradients(self.inner, getattr(outputs, "router_logits", None) or ())
        return {"aux_loss": auxiliary * coefficient}

    @property
    def balance_coefficient(self) -> Any:
        """Return the model's coefficient of the balancing loss of a mixture of experts, or None."""
        names = ("router_aux_loss_coef", "aux_loss_coef")
        found = (getattr(self.inner, name, getattr(self.config, name, None)) for name in names)
        return next((coefficient for coefficient in found if coefficient is not None), None)

    def _look_at_hooks(self, model: nn.Module) -> None:
        """Choose full logits if the user's hooks, or code around the forward, may read them."""
        inner, head = self.inner, self.inner.get_output_embeddings()
        peft = [model.base_model] if hasattr(model, "get_base_model") else []
        called = {id(x): x for x in (model, *peft, inner)}.values()
        reading = [hook for module in called for hook in module._forward_hooks.values()]
        reading += [*head._backward_hooks.values(), *head._backward_pre_hooks.values()]
        hooks = [*reading, *head._forward_hooks.values(), *map(type, called)]
        if hooks == self._hooks:
            return
        if any(getattr(hook, "__module__", "") == _COMPOSABLE_CHECKPOINT for hook in reading):
            raise ValueError(
                f"{type(inner).__name__} is checkpointed as a whole by torch's composable checkpoint(), "
                "which would run it again in backward without its loss. Call checkpoint(layer) for each "
                "of its layers, or model.gradient_checkpointing_enable()."
            )
        reading += [type(module).__call__ for module in called]
        reading += [type(module).forward for module in called if module is not inner]
        self._hooks = hooks
        self._whole = next((f"{found} may read them" for found in map(users_function, reading) if found), "")

    def _warn_of_memory(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            warn(
                f"causal_lm_loss computes the logits of {type(self.inner).__name__} whole, in memory for all "
                f"slots times the vocabulary, because {why}.",
                SlowWarning,
            )


def _require_logits(outputs: Any, inner: Any) -> Tensor:
    logits = getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        raise ValueError(
            f"{type(inner).__name__} returned a {type(outputs).__name__} without logits. Set "
            "config.return_dict=True if it is a tuple; else use loss.fused_linear_cross_entropy on the "
            "last hidden states."
        )
    return logits


def _check_slots(job: _Job, rows: Tensor) -> None:
    if rows.shape[:-1].numel() != job.slots:
        raise ValueError(
            f"The head got or gave {list(rows.shape)} for {job.slots} slots, wanted one row per slot. Do "
            "not pass logits_to_keep, or inputs that add tokens."
        )


@functools.cache
def _warn_of_labels() -> None:
    warn(
        "Samples carry a label: causal_lm_loss does not use the label, but because of it self.log weighs a "
        "batch by its number of sequences, not of loss tokens. Drop the key or column if you do not need it.",
        THDWarning,
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _outside_compile(function: Callable[..., Any], argument: Any) -> Any:
    return function(argument)


def language_model(model: nn.Module) -> Any:
    """Return the causal model inside DDP, torch.compile and PEFT; refuse a model without a head."""
    inner: Any = unwrapped(model, on_peft=refuse_losing_adapters)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if not isinstance(head, nn.Module) or not hasattr(inner, "config"):
        raise ValueError(
            f"causal_lm_loss got a {type(inner).__name__}, wanted a Hugging Face causal language model. Load "
            "it as AutoModelForCausalLM, or call loss.fused_linear_cross_entropy on the last hidden states."
        )
    return inner


def guess_logit_map(inner: Any) -> LogitMap:
    """Read the usual logit scale and cap from the config; a call of the model checks them."""
    config = text_config(inner.config)
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return LogitMap(scale=float(scale), softcap=None if softcap is None else float(softcap))


def plain_linear(head: Any, forward: object) -> nn.Linear | None:
    """Return the plain linear layer inside a head, or None; ``forward`` is one that was set on the head."""
    if hasattr(head, "_orig_mod"):  # torch.compile's wrapper has another forward
        head = head._orig_mod
        forward = head.__dict__.get("forward")
    copies = head._modules.get("modules_to_save")
    if copies is not None:  # PEFT trains a copy of the head
        active = [] if head.disable_adapters else head.active_adapters
        head = copies[active[0]] if active and active[0] in copies else head.original_module
        forward = forward or head.__dict__.get("forward") or head._forward_pre_hooks or head._forward_hooks
    if type(head).forward is not LINEAR_FORWARD:
        return None
    weight = head._parameters.get("weight")
    if type(weight) is not nn.Parameter and is_dtensor(weight):
        linear: nn.Linear = head  # tensor parallelism may set ``forward``
        return linear
    # FSDP1 shows a weight as a plain tensor during the forward pass; other classes may be quantised.
    other = weight is not None and type(weight).__module__.partition(".")[0] != "torch"
    return None if forward or other else head


def head_operands(head: nn.Linear, hidden: Tensor) -> HeadOperands:
    """Return the operands of a head; call this in the head's forward, when FSDP has gathered the weight."""
    weight: Tensor = head.weight  # read once: a parametrization may change with every read
    bias: Tensor | None = head.bias
    group, partial = None, False
    if type(weight) is not nn.Parameter and is_dtensor(weight):
        group = vocabulary_group(weight)
        weight, bias = plain(weight), None if bias is None else plain(bias)
    if type(hidden) is not Tensor and is_dtensor(hidden):
        hidden, partial = local_hidden(hidden, group)
    return HeadOperands(
        hidden=hidden,
        weight=weight,
        bias=bias,
        tp_group=group,
        partial_hidden=partial,
        vocabulary=weight.shape[0] * (1 if group is None else dist.get_world_size(group)),
    )
