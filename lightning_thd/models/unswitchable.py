"""A model whose attention cannot be chosen -> the same model, which refuses to be switched to "thd".

transformers only logs a warning when such a model is switched. Its attention stays as it is, and sequences of
a pack would see each other in the next call.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, ClassVar

from lightning_thd.models.refusals import ignores_attention, is_tower, refuse_ignored_attention
from lightning_thd.models.switching import NAME


def watch_switching(model: Any) -> None:
    """Make a model refuse a switch to "thd" if transformers would ignore it; leave all other models alone."""
    kind: Any = type(model)
    if not issubclass(kind, Unswitchable) and ignores_attention(kind) and not is_tower(model):
        model.__class__ = _unswitchable(kind)


class Unswitchable:
    """The base of classes of such models; their forward is that of their original class."""

    _thd_original: ClassVar[type]

    def set_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Switch the attention as transformers does, and raise if the model was to get "thd"."""
        super().set_attn_implementation(attn_implementation, *args, **kwargs)  # type: ignore[misc]
        asked = attn_implementation
        if isinstance(asked, dict):
            asked = asked.get("")
        if asked == NAME and self.config._attn_implementation != NAME:
            refuse_ignored_attention(self)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        """Copy the model; the copy refuses too."""
        kind = type(self)
        self.__class__ = self._thd_original
        try:
            copied = copy.deepcopy(self, memo)
        finally:
            self.__class__ = kind
        copied.__class__ = kind
        return copied

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickle the model as one of its original class, so that it can be loaded without this package."""
        reduced: Any = super().__reduce_ex__(protocol)
        return object.__new__, (self._thd_original,), *reduced[2:]


@functools.cache
def _unswitchable(original: Any) -> Any:
    members = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_thd_original": original,
    }
    return type(original.__name__, (Unswitchable, original), members)
