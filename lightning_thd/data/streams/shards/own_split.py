"""Sources that one rank reads for all -> an error for those that would give each rank a part only.

A dataset that splits itself by rank cannot be told from one that does not by what it gives: comparing records
between ranks would read them twice and call every random stream a split one. What can be told is that its
values differ between ranks (it was split when it was made), and that its code asks for the rank (it will be
split while it is read).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from types import CellType, CodeType, FunctionType
from typing import Any

# What code uses that asks which process it runs in: of torch, of Accelerate, and in the environment.
_ASKS = frozenset(
    {"get_rank", "get_world_size", "get_node_local_rank", "split_dataset_by_node", "process_index"}
)
_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS"})
_EMPTY = CellType()  # of a name that was not bound yet
_MOST = 10_000  # entries of a list that are compared
_OURS = ("torch.", "datasets.", "builtins", "torchdata.")


def asked_rank(source: Any) -> str | None:
    """Return the call by which a source's code learns its rank, or None.

    Looks at the function itself, or the methods of the object's class, and the functions of the same module
    that they call.
    """
    seen: set[int] = set()
    for function in _functions(source):
        if found := _asked(function, seen):
            return found
    return None


def _functions(source: Any) -> Iterator[FunctionType]:
    inner = inspect.unwrap(source) if isinstance(source, FunctionType) else source
    if isinstance(inner, FunctionType):
        yield inner
        return
    for base in type(source).__mro__:
        if not f"{base.__module__}.".startswith(_OURS):
            yield from (value for value in vars(base).values() if isinstance(value, FunctionType))


def _asked(function: FunctionType, seen: set[int]) -> str | None:
    if id(function) in seen:
        return None
    seen.add(id(function))
    for code in _codes(function.__code__):
        asked = _ASKS.intersection(code.co_names) or _VARIABLES.intersection(
            value for value in code.co_consts if isinstance(value, str)
        )
        if asked:
            return sorted(asked)[0]
        for name in code.co_names:
            called = function.__globals__.get(name)
            if not isinstance(called, FunctionType) or called.__module__ != function.__module__:
                continue
            if found := _asked(called, seen):
                return found
    return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _codes(value)


def traits(source: Any) -> dict[str, Any]:
    """Collect the plain values (numbers, texts, lists) of an object or a function's closure.

    Devices and values of other kinds say nothing of what is read.
    """
    held: dict[str, Any] = dict(getattr(source, "__dict__", {}))
    if isinstance(source, FunctionType):
        cells = zip(source.__code__.co_freevars, source.__closure__ or (), strict=True)
        held |= {name: cell.cell_contents for name, cell in cells if cell != _EMPTY}
    elif isinstance(source, partial):
        held |= {f"argument {i}": value for i, value in enumerate(source.args)} | source.keywords
    return {
        name: value
        for name, value in held.items()
        if "device" not in name and (_is_plain(value) or _is_plain_list(value))
    }


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | str)


def _is_plain_list(value: object) -> bool:
    return isinstance(value, list | tuple | range) and len(value) <= _MOST and all(map(_is_plain, value))


def refuse_split(alone: Mapping[str, Any], of_ranks: list[dict[str, dict[str, Any]]]) -> None:
    """Refuse sources that split themselves by rank.

    Args:
        alone: what one rank reads for all, by its name.
        of_ranks: the traits of each, by its name, of every data-parallel rank.

    Raises:
        ValueError: naming the source, and what differs or asks; on every rank.
    """
    for name, source in alone.items():
        first = of_ranks[0].get(name, {})
        for rank, found in enumerate(of_ranks):
            for key, value in found.get(name, {}).items():
                if key in first and first[key] != value:
                    raise ValueError(
                        f"{name} holds {key}={_short(first[key])} on rank 0 and {_short(value)} on rank "
                        f"{rank}, so it was split by rank. {_advice(name)}"
                    )
        if asked := asked_rank(source):
            raise ValueError(f"{name} uses {asked!r}, so it may split itself by rank. {_advice(name)}")


def _advice(name: str) -> str:
    return (
        "One rank reads it for all, and would give its own part alone. Pass a function make(part, parts) "
        "that begins one part, or give the dataset the attributes data_rank and data_size; if it gives every "
        f"record, pass a function that returns it, lambda: {name.rpartition('/')[2].lower()}."
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
