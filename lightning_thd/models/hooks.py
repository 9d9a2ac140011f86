"""A transformers model with "thd" attention -> the same model, announcing its packs to its layers.

Hooks are module-level functions: a model that carries them can be copied, pickled, sharded and compiled.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import nn

from lightning_thd.models.inputs.adapters import refuse_row_adapters
from lightning_thd.models.inputs.arguments import (
    PACK_KWARGS,
    REAL,
    by_name,
    find_pack,
    parameter_names,
    refuse_class,
    refuse_mask_and_cache,
)
from lightning_thd.models.inputs.key_index import adopt_indexers
from lightning_thd.models.inputs.labels import keep_labels_inside
from lightning_thd.models.inputs.masks import learn_window
from lightning_thd.models.inputs.position_tables import adopt_position_tables
from lightning_thd.models.inputs.positions import refuse_plain_positions
from lightning_thd.models.inputs.ropes import adopt_ropes
from lightning_thd.models.inputs.zero_embeddings import adopt_zero_embeddings
from lightning_thd.models.mixers import adopt_mixers
from lightning_thd.models.pack import (
    Pack,
    Scope,
    current_caller,
    current_scope,
    packed,
    scoped,
    set_scope,
)
from lightning_thd.models.pooled_heads import adopt_pooled_head, one_row_a_sequence, returns_pooled
from lightning_thd.models.unknown_layers import unknown_layers

if TYPE_CHECKING:
    from lightning_thd.batch import THDBatch

NAME: Final = "thd"
# By identity, so that a copy is never taken for the model it was made of.
_MODELS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
# Classes of all models ever hooked: while there are none, no call of another model need be watched.
_HOOKED: set[str] = set()


def install(model: Any) -> None:
    """Hook ``model``, a PreTrainedModel under construction or finished, so that it announces its packs."""
    if getattr(model, "_thd_installed", False):
        return
    model._thd_installed = True
    model._thd_takes_use_cache = "use_cache" in inspect.signature(type(model).forward).parameters
    model._thd_parameters = parameter_names(type(model))
    adopt(model)
    model.register_forward_pre_hook(enter, with_kwargs=True)
    # Also when forward raises: an abandoned scope would claim the next batch.
    model.register_forward_hook(leave, always_call=True)


def adopt(model: Any) -> None:
    """Teach the classes of a hooked model's layers about packs, in this process, once each.

    A model that was pickled brings its hooks along; the classes of a new process know nothing yet.
    """
    model._thd_checked = False
    _MODELS[id(model)] = model
    _HOOKED.add(type(model).__name__)
    model._thd_returns_pooled = returns_pooled(type(model))
    model._thd_own_class = not type(model).__module__.startswith("transformers.")
    adopt_mixers(type(model))
    adopt_position_tables(type(model))
    adopt_ropes(type(model), model.config)
    adopt_zero_embeddings(type(model))
    adopt_indexers(type(model), model.config)
    adopt_pooled_head(type(model))
    learn_window(model.config)


def run_as_pack(model: Any, forward: Callable[..., Any], batch: THDBatch, **kwargs: Any) -> Any:
    """Run a model's forward on a pack from inside its call on other inputs, such as padded rows.

    Returns:
        What ``forward`` returns; what it pooled of the pack is a row a sequence.
    """
    with packed(batch):
        return call_announced(model, forward, (), {**batch.hf_kwargs(), **kwargs})


def call_announced(
    model: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a hooked model's forward as its hooks would, where its call passes them by."""
    entered = enter(model, args, kwargs)
    if entered is None:
        return forward(*args, **kwargs)
    output: Any = None
    try:
        output = forward(*entered[0], **entered[1])
    finally:
        pooled = leave(model, (), output)
    return output if pooled is None else pooled


def enter(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Find the pack in a model's arguments, check it, and push it on the stack of running models."""
    if model.config._attn_implementation != NAME:  # switched away by set_attn_implementation
        return None
    outer = current_scope()
    if outer is None and getattr(model, "_thd_packs_rows", False):
        return None  # its forward decides what becomes a pack: see run_as_pack
    # a batch in place of tensors: a loop runs its whole step inside the model's call, as a replayed one does
    tensors = bool(args) and isinstance(args[0], torch.Tensor | None)
    if tensors and (named := by_name(model._thd_parameters, args, kwargs)) is not None:
        args, kwargs = (), named
    if outer is not None and outer.families and not _speaks(model, outer, kwargs):
        set_scope(Scope(None, outer, module=model, families=outer.families))
        return args, {name: value for name, value in kwargs.items() if name not in PACK_KWARGS}
    pack = find_pack(outer, args, kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name != REAL}  # ours alone
    if pack is not None:
        refuse_class(model)
        refuse_row_adapters(model)
        refuse_mask_and_cache(model, kwargs)
        refuse_plain_positions(model, kwargs)
        _refuse_wrong_layers(model)
        if outer is None or outer.module is None:
            _refuse_half(model)
            _tell_caller(model, pack)
            kwargs = keep_labels_inside(model, kwargs, pack)
        if model._thd_takes_use_cache:
            kwargs = {**kwargs, "use_cache": False}
    families = outer.families if outer is not None and outer.families else _families(model)
    # A model inside the language model may be handed the masks its caller asked for.
    masks = outer.masks if outer is not None and outer.families else ()
    set_scope(Scope(pack, outer, module=model, families=families, masks=masks))
    return args, kwargs


def hooked_before() -> bool:
    """Return whether any model of this process was ever given "thd"."""
    return bool(_HOOKED)


def _tell_caller(model: Any, pack: Pack) -> None:
    """Tell the model around this one, which has no "thd", of the pack; refuse it where it makes a loss."""
    caller = current_caller()
    if caller is None:
        return
    if caller.labelled is not None:
        raise ValueError(
            f"{caller.labelled} got labels, and {type(model).__name__}, a model inside it, a pack: a loss "
            f"over the row would cross its sequences. Call set_attn_implementation('thd') on "
            f"{caller.labelled}, so that it knows of packs, or leave labels out and compute the loss from "
            "the logits."
        )
    caller.pack = pack


def _refuse_half(model: Any) -> None:
    """Refuse a model that has "thd" around a language model that has not."""
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    if attention != NAME:
        raise ValueError(other_attention(model, attention))


def other_attention(model: Any, attention: str | None) -> str:
    """Return why a model cannot run packs whose language model has another attention."""
    return (
        f"{type(model).__name__} got a pack, and its language model runs attn_implementation={attention!r}, "
        "through which sequences of a pack would see each other. Give all of it 'thd': call "
        "set_attn_implementation('thd') on the whole model."
    )


def _refuse_wrong_layers(model: Any) -> None:
    """Refuse layers that "thd" cannot make correct; checks each model once, or at every trace."""
    if torch.compiler.is_compiling():
        reason = _reason_of(id(model))
    elif not model._thd_checked:
        reason = unknown_layers(model)
        model._thd_checked = reason is None
    else:
        reason = None
    if reason is not None:
        raise ValueError(reason)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _reason_of(identity: int) -> str | None:
    """Return why a model that is being traced cannot run packs, or None; a trace hands on constants alone."""
    model = _MODELS.get(identity)
    if model is None:  # a class that copies or unpickles itself in a way of its own
        return "A copied model cannot be looked at while it is compiled: call it once uncompiled before."
    return unknown_layers(model)


def leave(model: Any, args: tuple[Any, ...], output: Any) -> Any:
    """Pop a model off the stack, and replace or refuse what it pooled of the whole pack."""
    scope = current_scope()
    if scope is None or scope.module is not model:  # enter raised or did nothing
        return None
    set_scope(scope.outer)
    if scope.pack is None or output is None:
        return None
    outermost = scope.outer is None or scope.outer.module is None
    return one_row_a_sequence(model, scope.pack, output, outermost=outermost)


def _families(model: nn.Module) -> tuple[type, ...]:
    config: Any = model.config
    return type(config), type(config.get_text_config(decoder=True))


def _speaks(model: nn.Module, outer: Scope, kwargs: dict[str, Any]) -> bool:
    """Return whether an inner model continues the language model rather than, say, encoding images."""
    if type(model.config) in outer.families:
        return True
    embeds = kwargs.get("inputs_embeds")
    return embeds is not None and outer.pack is not None and embeds.shape[1] == outer.pack.slots


def carry_scope(checkpoint: Callable[..., Any], *, compilable: bool) -> Callable[..., Any]:
    """Wrap an activation checkpoint function so that it recomputes under the scope of its first run.

    Backward recomputes when the model has long left, perhaps after other microbatches, and in another thread.

    Args:
        checkpoint: as transformers sets it on layers, ``checkpoint(function, *args)``.
        compilable: whether torch.compile can take the layers whole. It then replays them from its graph, in
            which the boundaries are inputs; layers that break the graph are recomputed by Python, and need
            the scope.
    """
    if getattr(checkpoint, "_thd_carries", False):
        return checkpoint

    def checkpoint_with_scope(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        scope = current_scope()
        if scope is None or torch.compiler.is_compiling():
            return checkpoint(function, *args, **kwargs)

        def run(*inputs: Any, **named: Any) -> Any:
            with scoped(scope):
                return function(*inputs, **named)

        return checkpoint(run, *args, **kwargs)

    carrying: Any = checkpoint_with_scope
    if not compilable:
        carrying = torch.compiler.disable(carrying, recursive=False)  # type: ignore[no-untyped-call]
    carrying._thd_carries = True
    return cast("Callable[..., Any]", carrying)
