"""A module and its step -> errors for state that a replay would not change as the step does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_thd.cuda_graph.errors import CaptureError
from lightning_thd.cuda_graph.limits.attribute_reads import ABSENT, PLAIN

_CONTAINERS = (list, dict, set, tuple)


def host_state(module: nn.Module) -> dict[tuple[int, str], Any]:
    """Collect plain attributes, container sizes and buffers of all submodules, to detect changes."""
    found: dict[tuple[int, str], Any] = {}
    for i, child in enumerate(module.modules()):
        for name, value in vars(child).items():
            if isinstance(value, PLAIN):
                found[i, name] = value
            elif isinstance(value, _CONTAINERS) and name != "_buffers":
                found[i, name] = len(value)
        for name, buffer in child._buffers.items():
            found[i, name] = None if buffer is None else (id(buffer), buffer._version)
    return found


def refuse_host_changes(module: nn.Module, before: dict[tuple[int, str], Any]) -> None:
    """Raise for a step that changes Python state, which a replay would not change again.

    Raises:
        CaptureError: naming the attribute.
    """
    after = host_state(module)
    for key in (*before, *after):
        if before.get(key, ABSENT) == after.get(key, ABSENT):
            continue
        index, name = key
        owner = type(list(module.modules())[index]).__name__
        raise CaptureError(
            f"the step changes {owner}.{name}, which a replay does not run again, or, if it is a buffer, "
            "would count the dummy tokens of the tail into. Move counters, lists, metrics and running "
            "statistics to on_train_batch_end."
        )


@contextlib.contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Restore random states and the values of buffers when this context ends."""
    held = [(child._buffers, name) for child in module.modules() for name in child._buffers]
    buffers = [(owner, name, owner[name], _cloned(owner[name])) for owner, name in held]
    devices = sorted({x.device.index or 0 for x in module.parameters() if x.is_cuda})
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for owner, name, buffer, value in buffers:
                    owner[name] = buffer
                    if buffer is not None and value is not None:
                        buffer.copy_(value)


def _cloned(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.clone()


def refuse_sums_over_slots(module: nn.Module) -> None:
    """Refuse losses that also count padding, as a MoE balancing loss does: dummy tokens change them.

    Raises:
        CaptureError: for the balancing loss of a mixture of experts.
    """
    for child in module.modules():
        if getattr(getattr(child, "config", None), "output_router_logits", False):
            raise CaptureError(
                f"{type(child).__name__} has config.output_router_logits=True: its balancing loss would "
                "count the dummy tokens of the tail. Set it to False, or train this model eagerly."
            )


def refuse_fp8(module: nn.Module) -> None:
    """Refuse Transformer Engine's low precision: warm-up on dummy tokens would enter its scaling history.

    Raises:
        CaptureError: where a layer of it runs, or is about to run, in fp8 or fp4.
    """
    layers = [child for child in module.modules() if _is_te(child)]
    engines = [sys.modules.get(f"transformer_engine.pytorch.{name}") for name in ("quantization", "fp8")]
    states: list[Any] = [getattr(engine, "FP8GlobalStateManager", None) for engine in engines]
    about_to = bool(layers) and any(state is not None and state.is_fp8_enabled() for state in states)
    recipes = [recipe for child in module.modules() if (recipe := child.__dict__.get("_thd_fp8")) is not None]
    history = any(recipe.has_history for recipe in recipes)
    if recipes and not history:
        return  # scales are made of the numbers at hand, inside the graph
    if history or about_to or any(getattr(layer, "fp8", False) for layer in layers):
        raise CaptureError(
            f"Transformer Engine runs {len(layers)} layers in fp8: their scales follow a history kept beside "
            "the module, which warm-up on dummy tokens would change and a replay would not write. Train "
            "in bf16 to have graphs, or with FP8Precision('current'), whose scales have no history."
        )


def _is_te(module: nn.Module) -> bool:
    return any(cls.__name__ == "TransformerEngineBaseModule" for cls in type(module).__mro__)
