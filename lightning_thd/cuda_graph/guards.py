"""A module under capture -> its logged values, and errors for work that a replay would not repeat."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import lightning.pytorch as L
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lightning_thd._modes import watch_operators
from lightning_thd._private import private_of
from lightning_thd._trainer import trainer_of
from lightning_thd._trees import tree_leaves
from lightning_thd.batch.upload import version
from lightning_thd.cuda_graph.errors import CaptureError, Report, calling_line, refuse
from lightning_thd.cuda_graph.fingerprint import ABSENT, PLAIN, USUAL
from lightning_thd.models.families.ropes import keep_frequencies

# Attributes of the Trainer that change during training. All others (devices, precision) may be read.
_CHANGING = frozenset(
    {
        "callback_metrics",
        "current_epoch",
        "datamodule",
        "fit_loop",
        "global_step",
        "is_last_batch",
        "logged_metrics",
        "lr_scheduler_configs",
        "optimizers",
        "progress_bar_metrics",
        "should_stop",
        "strategy",
        "train_dataloader",
    }
)
# Python's operators, without their underscores, by which a step could use a number.
_UNARY = ("bool", "int", "float", "index", "str", "repr", "hash", "neg", "abs")
_COMPARISONS = ("format", "eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_REFLECTED = tuple(f"r{name}" for name in _ARITHMETIC)


def _report_use(report: Report, name: str) -> None:
    """Report the use of a value that changes from batch to batch."""
    message = (
        f"the step uses {name}, which changes from batch to batch; a captured step would keep the "
        "value of its capture. Move it to a hook, or keep it in a tensor that a hook updates in place."
    )
    report(message, calling_line())


class HostValue:
    """Replaces a number such as ``batch_idx``: a step may pass it on, but any other use is reported."""

    def __init__(self, name: str, report: Report = refuse) -> None:
        self._name = name
        self._value = 0
        self._report = report


def _refused(operator: str) -> Callable[..., Any]:
    """Return a method that refuses an operator, and then computes it, because lint_capture goes on."""

    def use(self: HostValue, *args: Any) -> Any:
        _report_use(self._report, self._name)
        result = getattr(self._value, operator)(*args)
        if result is NotImplemented and isinstance(args[0], Tensor):
            return args[0]  # any tensor will do as the result of an operator on a tensor
        return result

    return use


for _name in (*_UNARY, *_COMPARISONS, *_ARITHMETIC, *_REFLECTED):
    setattr(HostValue, f"__{_name}__", _refused(f"__{_name}__"))


class _TrainerGuard:
    """Replaces the Trainer and reports reads of attributes that change from step to step."""

    def __init__(self, trainer: Any, report: Report) -> None:
        self._guarded = trainer
        self._report = report

    def __getattr__(self, name: str) -> Any:
        fields = vars(self)  # a copy that is being made has none yet
        if name in _CHANGING:
            _report_use(fields["_report"], f"trainer.{name}")
        return getattr(fields["_guarded"], name)


class LoggedValue(NamedTuple):
    """One recorded call of ``self.log``; the value is a detached tensor or a number."""

    name: str
    value: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextlib.contextmanager
def guarded(module: nn.Module, report: Report = refuse) -> Iterator[list[LoggedValue]]:
    """Collect the step's ``self.log`` calls in a list, and report reads of the Trainer's progress."""
    logged: list[LoggedValue] = []
    if not isinstance(module, L.LightningModule):
        yield logged
        return

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, Tensor):
            value = value.detach()
        elif isinstance(value, bool) or not isinstance(value, int | float):
            message = (
                f"the step logs {name!r}, a {type(value).__name__}, which a replay would not update. "
                "Log a tensor, or update the metric in on_train_batch_end from what the step returns."
            )
            report(message, calling_line())
            return
        logged.append(LoggedValue(name, value, args, kwargs))

    def log_dict(dictionary: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in dictionary.items():
            log(name, value, *args, **kwargs)

    trainer = trainer_of(module)
    with attribute(module, "log", log), attribute(module, "log_dict", log_dict):
        if trainer is not None:
            module.trainer = _TrainerGuard(trainer, report)  # type: ignore[assignment]
        try:
            yield logged
        finally:
            if trainer is not None:
                module.trainer = trainer


@contextlib.contextmanager
def attribute(module: nn.Module, name: str, value: Callable[..., Any]) -> Iterator[None]:
    """Set an attribute of a module inside this context."""
    had_attribute = name in module.__dict__
    previous = module.__dict__.get(name)
    module.__dict__[name] = value
    try:
        yield
    finally:
        module.__dict__.pop(name, None)
        if had_attribute:
            module.__dict__[name] = previous


def check_numbers(runs: list[list[LoggedValue]], sizes: set[int]) -> None:
    """Refuse logged Python numbers that differ between runs, or are ``sizes`` of the captured batch."""
    if len(set(map(len, runs))) > 1:
        raise CaptureError("the step logs more in one run than in another. Log the same keys in every step.")
    for values in zip(*runs, strict=True):
        numbers = [x.value for x in values if not isinstance(x.value, Tensor)]
        if numbers and (len(set(numbers)) > 1 or numbers[0] in sizes):
            raise CaptureError(
                f"the step logs {values[0].name!r} as the Python number {numbers[0]}, which depends on the "
                "batch or changes by itself; every replay would log the same number. Log a tensor, or log "
                "it in on_train_batch_end."
            )


_CONTAINERS = (list, dict, set, tuple)
_SHARDED = ("FSDPModule", "FullyShardedDataParallel", "FullyShardedDataParallelPlus", "DeepSpeedEngine")


class Attribute(NamedTuple):
    """What is compared of an attribute of a module, before and after a step."""

    value: Any  # must be the same object; None if it may be replaced by an equal one
    state: Any  # must be equal: a plain value, the size of a container, or the version of a tensor


_MISSING = Attribute(ABSENT, None)
# The attributes of a module and its children, by the child's index in ``modules()`` and their name.
HostState = dict[tuple[int, str], Attribute]


def host_state(module: nn.Module) -> HostState:
    """Collect all plain attributes, container sizes and buffers, and every attribute of ``module`` itself."""
    attributes: HostState = {}
    for i, child in enumerate(module.modules()):
        for name, value in (*vars(child).items(), *child._buffers.items()):
            is_users = i == 0 and _may_be_users(name)  # the user's hooks may read it
            if isinstance(value, PLAIN):
                attributes[i, name] = Attribute(None, value)
            elif isinstance(value, _CONTAINERS) and name != "_buffers":
                attributes[i, name] = Attribute(value if is_users else None, len(value))
            elif is_users or name in child._buffers:
                state = version(value) if isinstance(value, Tensor) else None
                attributes[i, name] = Attribute(value, state)

    return attributes


def _may_be_users(name: str) -> bool:
    """Return whether an attribute is neither torch's nor Lightning's nor ours."""
    return name not in USUAL and not name.startswith("_thd")


def refuse_host_changes(module: nn.Module, before: HostState) -> None:
    """Raise if a step changes Python state, because a replay would not change it again."""
    after = host_state(module)
    for key in (*before, *after):
        old = before.get(key, _MISSING)
        new = after.get(key, _MISSING)
        same_state = old.state is new.state or old.state == new.state  # NaN does not equal itself
        if old.value is new.value and same_state:
            continue

        index, name = key
        owner = type(list(module.modules())[index]).__name__
        raise CaptureError(
            f"the step changes {owner}.{name}. A replay would not change Python state again, and would count "
            "dummy tokens of padding in a buffer. Move counters, lists, metrics and running "
            "statistics to on_train_batch_end."
        )


class _Saved(NamedTuple):
    """An attribute of an object, its value, and a copy of what the value held."""

    space: dict[str, Any]  # the attributes of the object
    name: str
    value: Any
    contents: Any

    @classmethod
    def of(cls, space: dict[str, Any], name: str) -> _Saved:
        value = space[name]
        contents = value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
        return cls(space, name, value, contents)

    def restore(self) -> None:
        value = self.value
        self.space[self.name] = value
        if isinstance(value, Tensor):
            if not _is_expanded(value):  # no step can write to an expanded tensor
                value.copy_(self.contents)
        elif isinstance(value, list):
            value[:] = self.contents
        elif isinstance(value, dict | set):
            value.clear()
            value.update(self.contents)


def remembered(spaces: Iterable[dict[str, Any]]) -> Callable[[], None]:
    """Return a function that restores the values that these attributes have now, and their contents."""
    kinds = (*PLAIN, *_CONTAINERS, Tensor)
    saved = [
        _Saved.of(space, name)
        for space in spaces
        for name, value in space.items()
        if isinstance(value, kinds) and _may_be_users(name)
    ]

    @torch.no_grad()
    def give_back() -> None:
        for attribute in saved:
            attribute.restore()

    return give_back


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether several entries of a tensor share memory, as after ``expand``."""
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, strides, strict=False))


@contextlib.contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Restore random states and the values of buffers when this context ends."""
    keep_frequencies(module)  # otherwise a graph would use buffers that are freed when this context ends
    give_back = remembered(child._buffers for child in module.modules())
    devices = sorted({x.device.index or 0 for x in module.parameters() if x.is_cuda})
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            give_back()


def refuse_sums_over_slots(module: nn.Module) -> None:
    """Refuse the balancing loss of a MoE model, because dummy tokens would change it."""
    for child in module.modules():
        if getattr(getattr(child, "config", None), "output_router_logits", False):
            raise CaptureError(
                f"{type(child).__name__} has config.output_router_logits=True: its balancing loss would "
                "count the dummy tokens of padding. Set it to False, or train this model eagerly."
            )


def refuse_fp8(module: nn.Module) -> None:
    """Refuse Transformer Engine's FP8, unless its recipe is known to have no history of scales."""
    marks = [vars(child).get("_thd_fp8") for child in module.modules()]
    recipes = [recipe for recipe in marks if recipe is not None]
    has_history = any(recipe.has_history for recipe in recipes)
    if recipes and not has_history:
        return  # scales are computed from the current values, inside the graph

    layers = [
        child
        for child in module.modules()
        if "TransformerEngineBaseModule" in [cls.__name__ for cls in type(child).__mro__]
    ]
    runs_fp8 = bool(layers) and _engine_runs_fp8()
    if has_history or runs_fp8 or any(getattr(layer, "fp8", False) for layer in layers):
        raise CaptureError(
            f"Transformer Engine runs {len(layers)} layers in fp8: their scales follow a history kept beside "
            "the module, which warm-up on dummy tokens would change and a replay would not write. Train "
            "in bf16 to have graphs, or with FP8Precision('current'), whose scales have no history."
        )


def _engine_runs_fp8() -> bool:
    """Return whether Transformer Engine is loaded and an autocast of its FP8 is under way."""
    for name in ("quantization", "fp8"):  # the module of the state, in new releases and in old ones
        engine = sys.modules.get(f"transformer_engine.pytorch.{name}")
        state: Any = getattr(engine, "FP8GlobalStateManager", None)
        if state is not None and state.is_fp8_enabled():
            return True
    return False


def sharded_by(module: nn.Module) -> str | None:
    """Return the name of the class that shards the module's parameters, or None."""
    names = (cls.__name__ for child in module.modules() for cls in type(child).__mro__)
    return next((name for name in names if name in _SHARDED), None)


class RandomUse:
    """Records what a step draws, whether checkpointing saves random states, and which leaves it uses."""

    def __init__(self) -> None:
        self.draws = False
        self.saves = False
        self._leaves: dict[int, Tensor] = {}
        self._mode = watch_operators(self._call)

    def __enter__(self) -> RandomUse:
        self._mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)

    @property
    def leaves(self) -> list[Tensor]:
        """Return the tensors that learn and that the step gave to operators."""
        return [*self._leaves.values()]

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        for value in tree_leaves((args, dict(kwargs))):
            if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
                self._leaves[id(value)] = value
        if torch.Tag.nondeterministic_seeded in func.tags and not _drops_nothing(func, args, kwargs):
            self.draws = True
        return func(*args, **kwargs)

    def refuse(self) -> None:
        """Raise if checkpointing would have to restore a random state."""
        if self.draws and self.saves:
            raise CaptureError(
                "activation checkpointing saves random states (preserve_rng_state=True) in a step that "
                "draws random numbers, and a graph cannot restore them. Switch checkpointing or dropout off."
            )


def _drops_nothing(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator that can drop values is called with a probability of 0."""
    if func is torch.ops.aten.native_dropout.default:
        return not (args[1] and args[2])
    arguments = private_of(func, "torch.ops.operator._schema").arguments
    named = {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    return (named | dict(kwargs)).get("dropout_p") == 0.0


@contextlib.contextmanager
def without_saved_states(use: RandomUse | None = None) -> Iterator[None]:
    """Stop checkpointing from saving and setting random states; ``use`` records that it tried to save."""
    # It does both on the host, which a graph cannot hold. Only steps that draw random numbers need it.
    checkpoint: Any = torch.utils.checkpoint
    namespace: Any = torch
    original_get = torch.get_rng_state
    original_set = torch.set_rng_state
    original_of_devices = checkpoint.get_device_states
    empty = torch.empty(0, dtype=torch.uint8)

    def get_rng_state() -> Tensor:
        if use is not None:
            use.saves = True
        return empty

    namespace.get_rng_state = get_rng_state
    namespace.set_rng_state = lambda state: None
    checkpoint.get_device_states = lambda *args: ([], [])
    try:
        yield
    finally:
        namespace.get_rng_state = original_get
        namespace.set_rng_state = original_set
        checkpoint.get_device_states = original_of_devices
