"""A module -> the same module on tensors that share its parameters' memory but not their autograd nodes.

DDP keeps the node that accumulates a parameter's gradient, and a node remembers the stream it was made on. A
capture that meets one made on the default stream makes that stream part of the graph, which CUDA refuses.
Hooks that users put on parameters would run at capture, and once more at every replay. So what is captured
never touches the parameters themselves; gradients reach them when a replay is differentiated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn


class StandIns:
    """Leaf tensors that stand in for a module's parameters and share their memory.

    Args:
        module: holds the parameters; a tied one gets one stand-in.
        parameters: those that require a gradient.

    Attributes:
        leaves: one for each of ``parameters``, in their order.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[Tensor]) -> None:
        self.leaves = [_stand_in(parameter) for parameter in parameters]
        by_id = {id(p): leaf for p, leaf in zip(parameters, self.leaves, strict=True)}
        self._places: list[tuple[dict[str, Any], str, Tensor]] = [
            (child._parameters, name, by_id[id(parameter)])
            for child in module.modules()
            for name, parameter in child._parameters.items()
            if parameter is not None and id(parameter) in by_id
        ]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the stand-ins into the module inside this context."""
        before = [(held, name, held[name]) for held, name, _ in self._places]
        for held, name, leaf in self._places:
            held[name] = leaf
        try:
            yield
        finally:
            for held, name, parameter in before:
                held[name] = parameter


def _stand_in(parameter: Tensor) -> Tensor:
    leaf = nn.Parameter(parameter.detach())
    leaf.__dict__.update(parameter.__dict__)  # marks that libraries leave on parameters
    return leaf
