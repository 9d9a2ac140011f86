"""A module and its step -> errors for state that a replay would not change as the step does.

``torch.utils.checkpoint`` reads and sets the generator's state on the host. Without a random operator in the
step that changes nothing and is left out; with one, the recomputed mask would differ from the first.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_thd.cuda_graph.errors import CaptureError
from lightning_thd.cuda_graph.fingerprint import ABSENT, PLAIN
from lightning_thd.models.positions import keep_frequencies

_CONTAINERS = (list, dict, set, tuple)
_SHARDED = ("FSDPModule", "FullyShardedDataParallel", "FullyShardedDataParallelPlus", "DeepSpeedEngine")


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
    """Raise for a step that changes Python state, which a replay would not change again."""
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
    keep_frequencies(module)  # else the step's own buffers of these would be freed here, under its graph
    buffers = [
        (child._buffers, name, x, None if x is None else x.clone())
        for child in module.modules()
        for name, x in child._buffers.items()
    ]
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


def refuse_sums_over_slots(module: nn.Module) -> None:
    """Refuse losses that also count padding, as a MoE balancing loss does: dummy tokens change them."""
    for child in module.modules():
        if getattr(getattr(child, "config", None), "output_router_logits", False):
            raise CaptureError(
                f"{type(child).__name__} has config.output_router_logits=True: its balancing loss would "
                "count the dummy tokens of the tail. Set it to False, or train this model eagerly."
            )


def refuse_fp8(module: nn.Module) -> None:
    """Refuse Transformer Engine's low precision: warm-up on dummy tokens would enter its scaling history."""
    layers = [
        child
        for child in module.modules()
        if "TransformerEngineBaseModule" in [cls.__name__ for cls in type(child).__mro__]
    ]
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


def sharded_by(module: nn.Module) -> str | None:
    """Return the name of what shards the module's parameters, or None."""
    names = (cls.__name__ for child in module.modules() for cls in type(child).__mro__)
    return next((name for name in names if name in _SHARDED), None)


class RandomUse(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records whether a step draws random numbers, and whether checkpointing saves random states."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = False
        self.saves = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not _drops_nothing(func, args, kwargs or {}):
            self.draws = True
        return func(*args, **(kwargs or {}))

    def refuse(self) -> None:
        """Raise where checkpointing would have to restore a random state."""
        if self.draws and self.saves:
            raise CaptureError(
                "activation checkpointing saves random states (preserve_rng_state=True) in a step with "
                "dropout, and a graph cannot restore them. Set dropout to 0, or switch checkpointing off."
            )


def _drops_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator has a probability of dropout, which is 0."""
    if func is torch.ops.aten.native_dropout.default:
        return not (args[1] and args[2])
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    return (named | kwargs).get("dropout_p") == 0.0


@contextlib.contextmanager
def without_saved_states(use: RandomUse | None = None) -> Iterator[None]:
    """Stop checkpointing from saving and setting random states inside this context."""
    checkpoint: Any = torch.utils.checkpoint
    namespace: Any = torch
    get, set_, devices = torch.get_rng_state, torch.set_rng_state, checkpoint.get_device_states
    empty = torch.empty(0, dtype=torch.uint8)

    def get_rng_state() -> Tensor:
        if use is not None:
            use.saves = True
        return empty

    namespace.get_rng_state = get_rng_state
    namespace.set_rng_state = lambda state: None
    checkpoint.get_device_states = lambda *args: ([], [])
    try:
        yield
    finally:
        namespace.get_rng_state, namespace.set_rng_state = get, set_
        checkpoint.get_device_states = devices
