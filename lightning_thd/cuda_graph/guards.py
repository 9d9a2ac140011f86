"""A LightningModule under capture -> its logged values, and errors where it reads values that change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import lightning.pytorch as L
from torch import Tensor, nn

from lightning_thd.cuda_graph.errors import CaptureError, refuse

# What changes while training goes on; asking for the rest (devices, world size, precision) is fine.
_CHANGING = frozenset(
    (
        *("global_step", "current_epoch", "fit_loop", "strategy", "optimizers", "lr_scheduler_configs"),
        *("callback_metrics", "logged_metrics", "progress_bar_metrics", "is_last_batch", "should_stop"),
        *("datamodule", "train_dataloader"),
    )
)
_UNARY = ("bool", "int", "float", "index", "str", "repr", "hash", "neg", "abs")
_COMPARED = ("format", "eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")


def _refuse_value(name: str) -> None:
    refuse(
        f"the step uses {name}, which changes from batch to batch; a captured step would go on with the "
        "value it was captured with. Move it to a hook, or keep it in a tensor that a hook updates in place."
    )


class HostValue:
    """Stands in for a number such as ``batch_idx``: passing it on is allowed, any other use is refused."""

    def __init__(self, name: str, value: Any = 0) -> None:
        self._name, self._value = name, value


def _used(operator: str) -> Callable[..., Any]:
    def use(self: HostValue, *args: Any) -> Any:
        _refuse_value(self._name)
        return getattr(self._value, operator)(*args)

    return use


for _name in (*_UNARY, *_COMPARED, *_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC)):
    setattr(HostValue, f"__{_name}__", _used(f"__{_name}__"))


class _TrainerGuard:
    """Stands in for the Trainer and refuses reads of attributes that change from step to step."""

    def __init__(self, trainer: Any) -> None:
        self.__dict__["_guarded"] = trainer

    def __getattr__(self, name: str) -> Any:
        if name in _CHANGING:
            _refuse_value(f"trainer.{name}")
        return getattr(self.__dict__["_guarded"], name)


class LoggedValue(NamedTuple):
    """One recorded call of ``self.log``; the value is a static tensor or a number."""

    name: str
    value: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextlib.contextmanager
def guarded(module: nn.Module) -> Iterator[list[LoggedValue]]:
    """Yield the step's ``self.log`` calls, and refuse reads of the Trainer's progress in this context."""
    logged: list[LoggedValue] = []
    if not isinstance(module, L.LightningModule):
        yield logged
        return

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, Tensor):
            value = value.detach()
        elif isinstance(value, bool) or not isinstance(value, int | float):
            refuse(
                f"the step logs {name!r}, a {type(value).__name__}, whose state a replay would not update. "
                "Log a tensor, or update the metric in on_train_batch_end from what the step returns."
            )
            return
        logged.append(LoggedValue(name, value, args, kwargs))

    def log_dict(dictionary: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in dictionary.items():
            log(name, value, *args, **kwargs)

    trainer = module._trainer
    with _attribute(module, "log", log), _attribute(module, "log_dict", log_dict):
        if trainer is not None:
            module._trainer = _TrainerGuard(trainer)  # type: ignore[assignment]
        try:
            yield logged
        finally:
            module._trainer = trainer


@contextlib.contextmanager
def _attribute(module: nn.Module, name: str, value: Callable[..., Any]) -> Iterator[None]:
    before = module.__dict__.get(name)
    module.__dict__[name] = value
    try:
        yield
    finally:
        if before is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before


def check_numbers(runs: list[list[LoggedValue]], sizes: set[int]) -> None:
    """Refuse logged Python numbers that are not constant over runs, or are sizes of the bucket."""
    first = runs[0]
    if any([x.name for x in run] != [x.name for x in first] for run in runs):
        raise CaptureError(
            "the step logs other keys from run to run; a replay would log the same ones always."
        )
    for values in zip(*runs, strict=True):
        numbers = [x.value for x in values if not isinstance(x.value, Tensor)]
        if numbers and (len(set(numbers)) > 1 or numbers[0] in sizes):
            raise CaptureError(
                f"the step logs {values[0].name!r} as the Python number {numbers[0]}, which depends on the "
                "batch or changes by itself; a replay would log the same number always. Log a tensor, or log "
                "it in on_train_batch_end."
            )
