"""A module and an adapter -> the same module, whose class is now a subclass of its class.

transformers' classes stay as they are, so models without "thd" run the code that they always ran. torch does
the same for FSDP2. Copies and pickles of an adapted module are adapted too.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Container
from typing import Any, ClassVar


class Adapter:
    """The base of adapters: a subclass says what the forward of an adapted module does.

    The class that :func:`adapt` makes inherits from an adapter and from the module's class. It keeps the name
    of the latter, because transformers and PEFT look classes up by name.
    """

    _thd_original: ClassVar[type]  # the module's class before all adapters
    _thd_adapters: ClassVar[tuple[type[Adapter], ...]] = ()

    @classmethod
    def _thd_describe(cls, original: Any) -> dict[str, Any]:
        """Return attributes of the adapted class that follow from the ``original`` class."""
        return {}

    @classmethod
    def _thd_forward(cls, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of an adapted class; ``run(self, ...)`` is that of the module's class."""

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return cls._thd_run(self, run, *args, **kwargs)

        return forward

    def _thd_run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the adapted module; ``forward(self, ...)`` is the forward of its class."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the module by its original class, because nobody can import the adapted one."""
        made: Any = super().__reduce_ex__(protocol)
        if made[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            cls = type(self)
            return _rebuild, (cls._thd_original, cls._thd_adapters), *made[2:]
        return made


def adapt(module: Any, adapter: Any) -> None:
    """Give a module an adapter, once."""
    if adapter not in getattr(module, "_thd_adapters", ()):
        cls: Any = type(module)
        module.__class__ = adapted_class(cls, adapter)


def kind_of(module: object, names: Container[str]) -> str | None:
    """Return the name of a module's class, or of a class that it inherits from, that is among ``names``."""
    return next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in names), None)


@functools.cache
def adapted_class(original: Any, adapter: Any) -> Any:
    """Make the class of adapted modules; more calls return the same class, so compiled code stays valid."""
    run = original.forward
    members = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_thd_original": getattr(original, "_thd_original", original),
        "_thd_adapters": (*getattr(original, "_thd_adapters", ()), adapter),
        "forward": functools.wraps(run)(adapter._thd_forward(run)),
        **adapter._thd_describe(original),
    }
    return type(original.__name__, (adapter, original), members)


def _rebuild(original: type, adapters: tuple[Any, ...]) -> Any:
    """Make an empty module of an adapted class, for a copy or a pickle that then sets its state."""
    cls: Any = original
    for adapter in adapters:
        cls = adapted_class(cls, adapter)
    return cls.__new__(cls)
