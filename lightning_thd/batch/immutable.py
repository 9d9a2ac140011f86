"""Fields -> an object whose slots are set once, which Lightning moves and passes on without rewriting it."""

from __future__ import annotations

from typing import Any, NoReturn


class Immutable:
    """Base of classes with slots that are set once; Lightning would rewrite a dataclass or a list."""

    __slots__ = ()

    def _set(self, **fields: object) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"{type(self).__name__}.{name} cannot be assigned: batches are immutable. "
            "Make a changed copy with .replace(...)."
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be deleted: batches are immutable.")

    def __getstate__(self) -> dict[str, Any]:
        names: tuple[str, ...] = self.__slots__
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set(**state)
