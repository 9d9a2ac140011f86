"""Two runs of a model that ought to agree -> the first module whose inputs agree and whose outputs do not.

Legend: T slots of a run; the two runs may have different ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn


class _Call(NamedTuple):
    """The inputs and outputs of one call of a module, cut down to the rows that are compared."""

    inputs: list[Tensor]
    outputs: list[Tensor]


_Key = tuple[str, int]  # name of a module, how often it had been called before


def first_leaking_module(
    model: nn.Module,
    first: Callable[[], Tensor],
    second: Callable[[], Tensor],
    first_rows: Tensor,
    second_rows: Tensor,
    *,
    tolerance: float = 1e-6,
) -> str | None:
    """Return the first module whose inputs agree in two runs while its outputs differ.

    Args:
        model: both runs call it.
        first: runs it and returns logits ``[T, V]``.
        second: the same with other inputs.
        first_rows: int64 ``[N]``, slots of the first run that ought to equal
        second_rows: int64 ``[N]``, those of the second.
        tolerance: relative to the largest entry of a tensor.

    Returns:
        ``"model.layers.0.mixer (MambaMixer)"``, or None when no module has clean inputs and wrong outputs.
    """
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    with _recorded(model, first_rows) as calls:
        first()
    with _recorded(model, second_rows) as others:
        second()
    for key, call in calls.items():  # in the order in which the calls ended: inner modules first
        other = others.get(key)
        if other is None:
            continue
        clean = _agree(call.inputs, other.inputs, tolerance)
        if clean and not _agree(call.outputs, other.outputs, tolerance):
            return f"{key[0] or 'the model itself'} ({kinds[key[0]]})"
    return None


def _agree(ours: Iterable[Tensor], theirs: Iterable[Tensor], tolerance: float) -> bool:
    for a, b in zip(ours, theirs, strict=False):
        if a.shape != b.shape:
            continue
        largest = a.abs().max().item() if a.numel() else 0.0
        if a.numel() and not (a - b).abs().max().item() <= tolerance * largest:
            return False
    return True


@contextmanager
def _recorded(model: nn.Module, rows: Tensor) -> Generator[dict[_Key, _Call]]:
    """Record the per-token tensors of every call of every module, for packs of a few dozen tokens."""
    calls: dict[_Key, _Call] = {}
    counts: defaultdict[str, int] = defaultdict(int)
    handles = []
    slots: list[int] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not slots:
                slots.extend(_find_slots(args, kwargs))
            key = (name, counts[name])
            counts[name] += 1
            calls[key] = _Call(
                _token_rows((*args, *kwargs.values()), slots, rows), _token_rows((output,), slots, rows)
            )

        return hook

    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(watch(name), with_kwargs=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _find_slots(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return T, the number of ids the embedding got: its call is the first of all modules' to end."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return [value.numel()]
    return []


def _token_rows(values: Iterable[Any], slots: list[int], rows: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    for value in _tensors(values):
        dim = next((d for d, size in enumerate(value.shape) if slots and size == slots[0]), None)
        if dim is not None and value.is_floating_point():
            found.append(value.detach().movedim(dim, 0)[rows.to(value.device)].float().cpu())
    return found


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
