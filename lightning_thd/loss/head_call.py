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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_thd._find import inside_compiled, is_compiled_wrapper, text_config, unwrapped
from lightning_thd._hooks import hooks_of
from lightning_thd._static import RUN
from lightning_thd._user_code import users_function
from lightning_thd.batch import THDBatch
from lightning_thd.loss.arguments import LossArgs, is_dtensor, local_hidden, plain, vocabulary_group
from lightning_thd.loss.lazy_logits import LazyLogits, Record, carry_values, open_values
from lightning_thd.loss.tiles.logits import LogitMap
from lightning_thd.models.announce import Announcing
from lightning_thd.models.pack import BOUNDARIES, Scope
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
        return LossArgs(
            self.hidden,
            self.weight,  # None for finished logits
            targets,
            self.bias,
            logit_map,
            tp_group=self.tp_group,
            loss_tokens=loss_tokens,
            partial_hidden=self.partial_hidden,
        )


class RouterLoss(Protocol):
    """Computes the loss of a model's routers in place of the model, as ``loss.router_balance`` does."""

    def requested(self, inner: Any, kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """Request router logits from the model inside this context."""

    def loss(self, inner: Any, outputs: Any) -> Tensor:
        """Compute the loss from the model's outputs."""


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
    routers: RouterLoss | None  # computes the routers' loss; None leaves it to the model
    whole: str  # why the full logits are computed; empty if they are not
    called: bool = False  # whether the model's forward ran
    logits: list[Tensor] = field(default_factory=list)  # what the head returned, one entry per call
    seen: Record | None = None  # what the model did to the logits that it returned
    lost: str = ""  # why this pass has no values
    # What ``run`` returns, before a wrapper rounds it.
    results: dict[str, Tensor] = field(default_factory=dict)


class HeadCall:
    """Replaces the forward of a model and of its head, so that logits are computed only if they must be."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.logit_map: LogitMap = guess_logit_map(inner)
        self._record: Record | None = None  # the operations that made ``logit_map``
        self._here = threading.local()  # ``job``: this thread's forward pass, if it runs a loss
        # The model's and the head's own forward, which run in threads that run no loss.
        self._model_forward: Callable[..., Any] | None = None
        self._head_forward: Callable[..., Tensor] | None = None
        self._lock = threading.RLock()
        self.experts: Any = None  # the model's experts, as ``loss.router_balance`` has read them
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
            call._config = call.inner.config
            call.config = text_config(call.inner.config)

        attention = getattr(call.config, "_attn_implementation", None)
        if attention != "thd":
            raise ValueError(
                f"{type(call.inner).__name__} runs attn_implementation={attention!r}, which can let packed "
                "sequences see each other without an error. Build it with attn_implementation='thd' and its "
                "own copy of the config, or call model.set_attn_implementation('thd')."
            )

        if not isinstance(call.inner, Announcing):
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
        routers: RouterLoss | None = None,
    ) -> dict[str, Tensor]:
        """Call the model on a batch with its head replaced, and return what the head computed.

        If the model changes its logits in another way than ``logit_map`` says, it is called again. Returns
        ``{"values": [size]}``, those of further head calls as "value_1", ..., a routers' loss as "aux_loss".
        """
        inner = self.inner
        stage: Stage | None = inner.__dict__.get(STAGE)
        self._look_at_hooks(model)
        for attempt in range(3):
            head = inner.get_output_embeddings()
            with self._lock:  # else a thread could save another's replacement as the model's own forward
                job = _Job(
                    values=values,
                    size=size,
                    slots=batch.input_ids.shape[-1],
                    head=head,
                    own_head_forward=head.__dict__.get("forward"),
                    model_forward=inner.forward,
                    stage=stage,
                    routers=routers,
                    whole=self._whole,
                )
                outputs: dict[str, Tensor] = self._call(model, batch, job)

            if job.whole:
                self._warn_of_memory(job.whole)
                outputs = self._values_of_logits(job, outputs)
                break
            if self._followed(job, again=attempt > 0):
                break
            if stage is not None and not stage.again():
                break

        for name, value in job.results.items():
            # FSDP2 with an output_dtype (Accelerate's default for bf16) rounds outputs: return exact values.
            if outputs[name].dtype.itemsize < value.dtype.itemsize:
                outputs[name] = value
        if stage is None or not torch.is_grad_enabled():
            return outputs

        outputs_of_pass: dict[str, Tensor] = stage.seam.cut(outputs)
        return outputs_of_pass

    def _call(self, model: nn.Module, batch: THDBatch, job: _Job) -> Any:
        """Call the model once with its forward and its head's replaced, and restore them."""
        inner = self.inner
        kwargs = batch.hf_kwargs()
        kwargs["attention_mask"] = None  # the language model has "thd", and wrappers may look at a mask
        if kwargs.pop("labels", None) is not None:
            _warn_of_labels()

        outer_scope = getattr(RUN, "scope", None)
        scope = Scope(kwargs[BOUNDARIES], None, balanced=job.routers is not None)
        RUN.scope = scope
        self._here.job = job
        if job.stage is not None:
            job.stage.in_loss = True
        own_forwards = self._replace_forwards(model, job)

        try:
            with nullcontext() if job.routers is None else job.routers.requested(inner, kwargs):
                outputs = model(**kwargs)
        finally:
            RUN.scope = outer_scope
            self._here.job = None
            if job.stage is not None:
                job.stage.in_loss = False
            for module, forward in own_forwards:
                if forward is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = forward

        for logits in job.logits:
            if isinstance(logits, LazyLogits):
                logits.over = True
        if not job.called:
            raise ValueError(
                f"{type(model).__name__} never called the replaced {type(inner).__name__}.forward: "
                "it holds an earlier forward, as PEFT's adaption prompts do. Use another wrapper."
            )
        if scope.sees_later is not None:
            raise ValueError(
                f"{scope.sees_later} of {type(inner).__name__} attends to later tokens, so "
                "each token would see its own target. Set is_decoder=True in its config, if it has that. Or "
                "call loss.fused_linear_cross_entropy on the last hidden states with your own targets."
            )
        return outputs

    def _replace_forwards(self, model: nn.Module, job: _Job) -> list[tuple[nn.Module, Any]]:
        """Replace the forwards of the model and its head; return those that other code had set on them."""
        inner = self.inner
        own_forwards = [(inner, inner.__dict__.get("forward")), (job.head, job.own_head_forward)]
        self._model_forward = job.model_forward
        self._head_forward = job.head.forward
        job.head.__dict__["forward"] = self.head_forward
        inner.__dict__["forward"] = self.forward

        # Inside PEFT's disable_adapter(), a wrapper of prompt tuning holds the forward of its base model.
        wrapper_forward = None if model is inner else model.__dict__.get("forward")
        if wrapper_forward is not None and wrapper_forward == job.model_forward:
            own_forwards.append((model, wrapper_forward))
            model.__dict__["forward"] = self.forward
        return own_forwards

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

        self._record = job.seen
        recorded_map = job.seen.as_map()
        if recorded_map.agrees(self.logit_map):
            return True

        self.logit_map = recorded_map
        if again:
            self._whole = "the model changes them in another way in every call"
        return False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward; in a thread that runs a loss, return values in place of the outputs."""
        job: _Job | None = getattr(self._here, "job", None)
        if job is None:
            assert self._model_forward is not None
            return self._model_forward(*args, **kwargs)
        return self._finish(job.model_forward(*args, **kwargs))

    def head_forward(self, hidden: Tensor) -> Tensor:
        """Return lazy logits of hidden states ``[1, T, H]``; real ones outside a loss or if ``job.whole``."""
        if torch.compiler.is_dynamo_compiling():
            outside: Tensor = _outside_compile(self.head_forward, hidden)
            return outside

        job: _Job | None = getattr(self._here, "job", None)
        if job is None:
            assert self._head_forward is not None
            return self._head_forward(hidden)

        head = job.head
        stage = job.stage
        if stage is not None and not stage.holds_head:
            values = stage.stand_in(job.size, hidden)
            logits: Tensor = carry_values(values, (*hidden.shape[:-1], head.out_features))
            job.logits.append(logits)
            return logits

        linear = None if job.whole else plain_linear(head, job.own_head_forward)
        if linear is None:
            kind = f"{type(head).__module__}.{type(head).__name__}"
            job.whole = job.whole or f"its head is not a plain linear layer but a {kind}"
            head_forward = job.own_head_forward or functools.partial(type(head).forward, head)
            logits = head_forward(hidden)
        else:
            operands = head_operands(linear, hidden)
            _check_slots(job, operands.hidden)
            values = job.values(operands, len(job.logits), self.logit_map)
            if stage is not None:
                values = stage.share(values)
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

        lazy = [of_call for of_call in job.logits if isinstance(of_call, LazyLogits)]
        reasons = [f"the model applies {of_call.lost} to them" for of_call in lazy if of_call.lost]
        job.lost = reasons[0] if reasons else ""
        source = logits.source if isinstance(logits, LazyLogits) else None
        if not job.lost and not any(of_call is source for of_call in lazy):
            _require_logits(outputs, self.inner)
            job.lost = "the model returns other logits than those of its head"
        if job.lost:
            return outputs

        assert isinstance(logits, LazyLogits)
        job.seen = logits.record
        job.results = {"values": open_values(logits)}
        further_calls = [of_call for of_call in lazy if of_call is not source]
        for number, of_call in enumerate(further_calls, start=1):
            job.results[f"value_{number}"] = open_values(of_call)
        job.results |= self._auxiliary(job, outputs)
        return dict(job.results)

    def _values_of_logits(self, job: _Job, outputs: Any) -> dict[str, Tensor]:
        """Compute the values from the logits that the model, its hooks and its wrappers returned."""
        logits = _require_logits(outputs, self.inner)
        stage = job.stage
        if len(job.logits) > 1:
            raise ValueError(
                f"{type(self.inner).__name__} calls its head {len(job.logits)} times, to predict further "
                f"tokens, and its logits are computed whole, because {job.whole}. Use the model's own logits."
            )

        if stage is not None and not stage.holds_head:
            stand_in: Any = job.logits[0]
            return {"values": open_values(stand_in), **self._auxiliary(job, outputs)}

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

        auxiliary = getattr(outputs, "aux_loss", None)
        if not isinstance(auxiliary, Tensor):
            return {}
        coefficient = self.balance_coefficient
        if coefficient is None:
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
        for name in names:
            coefficient = getattr(self.inner, name, getattr(self.config, name, None))
            if coefficient is not None:
                return coefficient
        return None

    def _look_at_hooks(self, model: nn.Module) -> None:
        """Choose full logits if the user's hooks, or code around the forward, may read them."""
        inner = self.inner
        head = inner.get_output_embeddings()
        peft = [model.base_model] if hasattr(model, "get_base_model") else []
        called = {id(module): module for module in (model, *peft, inner)}.values()
        hooks = hooks_of([*called, head], "forward", "full_backward", "full_backward_pre")
        hooks += map(type, called)
        if hooks == self._hooks:
            return

        reading = hooks_of(called, "forward")
        reading += hooks_of([head], "full_backward", "full_backward_pre")
        if any(getattr(hook, "__module__", "") == _COMPOSABLE_CHECKPOINT for hook in reading):
            raise ValueError(
                f"{type(inner).__name__} is checkpointed as a whole by torch's composable checkpoint(), "
                "which would run it again in backward without its loss. Call checkpoint(layer) for each "
                "of its layers, or model.gradient_checkpointing_enable()."
            )

        reading += [type(module).__call__ for module in called]
        reading += [type(module).forward for module in called if module is not inner]
        self._hooks = hooks
        names = [name for name in map(users_function, reading) if name]
        self._whole = f"{names[0]} may read them" if names else ""

    def _warn_of_memory(self, why: str) -> None:
        """Warn once a model that full logits take memory."""
        if self._warned:
            return
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
    if type(head).forward is not LINEAR_FORWARD and is_compiled_wrapper(head):
        head = inside_compiled(head)
        forward = head.__dict__.get("forward")

    copies = head._modules.get("modules_to_save")
    if copies is not None:  # PEFT trains a copy of the head
        active = [] if head.disable_adapters else head.active_adapters
        head = copies[active[0]] if active and active[0] in copies else head.original_module
        forward = forward or head.__dict__.get("forward") or hooks_of([head], "forward_pre", "forward")

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
    group = None
    partial = False
    if type(weight) is not nn.Parameter and is_dtensor(weight):
        group = vocabulary_group(weight)
        weight = plain(weight)
        bias = None if bias is None else plain(bias)

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
