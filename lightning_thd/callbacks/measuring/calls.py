"""The models of one step -> how often the step's tokens went through each, with gradients and without.

Watched in the first step only: a reference under ``no_grad``, a teacher, a policy that is run twice, a
model that is not run at all. Nothing is read from the device: shapes and the grad mode are enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_thd.callbacks.measuring.batches import Seen
from lightning_thd.cuda_graph.limits.fingerprint import only_looking

_INPUTS = ("input_ids", "inputs_embeds", "hidden_states")


@dataclass(frozen=True, slots=True)
class Passes:
    """How often each token goes through a model in one step, with and without gradients.

    Attributes:
        training: forward and backward.
        forward: forward under ``no_grad``.
    """

    training: float = 1.0
    forward: float = 0.0


@dataclass(slots=True)
class _Calls:
    """Counts of one module's calls, by grad mode, and of their slots where the inputs' shape tells them."""

    number: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    slots: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    unknown: bool = False
    recomputed: bool = False


class CallWatch:
    """Counts the calls of every model of a step by forward hooks, until ``stop``.

    A model called as a whole tells by its own calls. One that is called below its outermost module tells by
    the calls of its first layer.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = dict(models)
        self._whole = {name: _Calls() for name in models}
        self._layer = {name: _Calls() for name in models}
        self._seen: set[str] = set()
        self._handles: list[RemovableHandle] = []
        for name, model in models.items():
            if self._watch(model, self._whole[name]):
                self._seen.add(name)
            layers = [child for child in model.modules() if isinstance(child, nn.ModuleList) and len(child)]
            if layers:
                self._watch(layers[0][0], self._layer[name])

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def passes(self, step: Sequence[Seen], *, sharded: bool) -> dict[str, Passes]:
        """Return how often a token went through each model: its slots over those of the step.

        Args:
            step: the step's microbatches on this rank.
            sharded: whether a rank sees a part of each pack (context parallelism): slots tell nothing then.

        Returns:
            By path; a model that was not called has no pass. A model whose calls cannot be watched, since
            ``model.compile()`` has taken them over, counts as trained once, or as a forward pass when it
            alone ended the step without gradients.
        """
        slots = sum(stats.slots for stats, _ in step)
        found = {}
        for name in self._models:
            calls = self._whole[name]
            if not any(calls.number.values()):
                calls = self._layer[name]
            if name not in self._seen and not any(calls.number.values()):
                found[name] = self._guess(name)
                continue
            known = 0 if sharded or calls.unknown else slots
            training, forward = (
                _share(calls.number[grad], calls.slots[grad], len(step), known) for grad in (True, False)
            )
            found[name] = Passes(training + forward, 0.0) if calls.recomputed else Passes(training, forward)
        return found

    def _guess(self, name: str) -> Passes:
        with_gradients = {
            path: any(parameter.grad is not None for parameter in model.parameters())
            for path, model in self._models.items()
        }
        alone = any(with_gradients.values()) and not with_gradients[name]
        return Passes(0.0, 1.0) if alone else Passes()

    def _watch(self, module: nn.Module, calls: _Calls) -> bool:
        if module._compiled_call_impl is not None:  # hooks would be traced, and trace again when they go
            return False
        hook = only_looking(partial(_note, calls))
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return True


def _note(calls: _Calls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch._C._current_graph_task_id() != -1:  # a checkpoint runs the layer again inside the backward
        calls.recomputed = True
        return
    grad = torch.is_grad_enabled()
    slots = _slots(args, kwargs)
    calls.number[grad] += 1
    calls.slots[grad] += slots or 0
    calls.unknown = calls.unknown or slots is None


def _slots(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    named = [kwargs[name] for name in _INPUTS if kwargs.get(name) is not None]
    value = next(iter([*named, *args]), None)
    if (stats := getattr(value, "stats", None)) is not None:
        return int(stats.slots)
    if not isinstance(value, Tensor) or value.dim() == 0:
        return None
    return value.shape[:-1].numel() if value.is_floating_point() else value.numel()


def _share(calls: int, slots: int, microbatches: int, total: int) -> float:
    """Return passes per token: calls a microbatch where that is whole, else the share of slots."""
    if not calls:
        return 0.0
    if not microbatches or not total:
        return float(max(1, round(calls / microbatches))) if microbatches else 1.0
    if calls % microbatches == 0 and slots >= 0.9 * total * calls / microbatches:
        return calls / microbatches  # padding to the bucket of a graph adds slots and no pass
    return slots / total
