"""Graphs and static buffers of one bucket -> a callable that runs a batch through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_thd.batch import THDBatch
from lightning_thd.cuda_graph.limits.attribute_reads import Reads
from lightning_thd.cuda_graph.limits.guards import LoggedValue
from lightning_thd.cuda_graph.shapes.static_batch import StaticInputs


class CapturedStep:
    """The captured step of one bucket, ready to replay.

    Args:
        inputs: static buffers.
        leaves: parameters that gradients go to.
        call: runs the step on what the buffers hold; replays a pair, or runs eagerly around captured layers.
        logged: what the step logs.
        reads: what the graphs have baked in of the module.
        module: what ``self.log`` is called on.
    """

    def __init__(
        self,
        inputs: StaticInputs,
        leaves: list[Tensor],
        call: Callable[..., Any],
        logged: list[LoggedValue],
        module: nn.Module,
        reads: Reads,
    ) -> None:
        self.inputs, self.leaves, self.reads = inputs, leaves, reads
        self.logged = logged
        self._call, self._module = call, module

    def run(self, batch: THDBatch, *rest: Any) -> Any:
        """Copy a batch into the buffers and run the step, without logging."""
        self.inputs.fill(batch)
        return self._call(batch, *rest)

    def __call__(self, batch: THDBatch, *rest: Any) -> Any:
        """Run the step on a batch and log what it logs, with this batch's values."""
        output = self.run(batch, *rest)
        log: Any = getattr(self._module, "log", None)
        for name, value, args, kwargs in self.logged:
            log(name, value.clone() if isinstance(value, Tensor) else value, *args, **kwargs)
        return output
