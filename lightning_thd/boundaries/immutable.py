"""The base of batches and boundaries: plain classes with slots whose attributes cannot be assigned."""

from __future__ import annotations

from typing import Any, NoReturn


class Immutable:
    """Base of immutable classes with slots.

    They are no dataclasses, because Lightning's precision plugins and FSDP rebuild dataclasses that they
    find in the arguments of a module, and set their fields.
    """

    __slots__ = ()

    def _set(self, **fields: object) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object = None) -> NoReturn:
        raise AttributeError(
            f"{type(self).__name__}.{name} cannot be assigned or deleted: batches are immutable. "
            "Make a changed copy of a THDBatch with .replace(...)."
        )

    __delattr__ = __setattr__

    def __getstate__(self) -> dict[str, Any]:
        names: tuple[str, ...] = self.__slots__
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set(**state)
