"""A call of a model with "thd" -> the pack of the call, which the model's layers find while it runs.

``Announcing`` is the adapter of such models. It finds the pack in the arguments of a call, or takes the batch
that a loss has announced. It runs in ``model.forward``, because PEFT calls that and not the model.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch

from lightning_thd._find import TEXT_CONFIGS, kind_holds_text_config
from lightning_thd._pages import see
from lightning_thd._static import RUN
from lightning_thd.boundaries import Boundaries
from lightning_thd.boundaries.core import ForThdOnly
from lightning_thd.models.adapted import Adapter
from lightning_thd.models.families.plain_masks import PLAIN_MASKS
from lightning_thd.models.families.pooled_heads import (
    class_pools,
    classify,
    pool_each_sequence,
    refuse_pooled_pack,
)
from lightning_thd.models.families.ropes import keep_frequencies
from lightning_thd.models.layers import carry_packs, prepare_layers
from lightning_thd.models.masks import UnreadMask
from lightning_thd.models.pack import (
    BOUNDARIES,
    PACK_KWARGS,
    Scope,
    find_pack,
    packed,
)
from lightning_thd.models.refusals import (
    LABELS,
    is_tower,
    keep_labels_inside,
    refuse_batch,
    refuse_call,
    refuse_changed_config,
    refuse_model_around,
    refuse_noted,
    refuse_unknown_layers,
)
from lightning_thd.models.switching import NAME, is_kind_of_transformers, spread_thd

if TYPE_CHECKING:
    from lightning_thd.batch import THDBatch

_OF_PACKS: Final = ("cu_seq_lens_q", BOUNDARIES)


class Announcing(Adapter):
    """The adapter of models with "thd": they announce the pack of each call to their layers."""

    @classmethod
    def _thd_describe(cls, original: Any) -> dict[str, Any]:
        names = _parameter_names(original)
        parameters = inspect.signature(original.forward).parameters
        return {
            "_thd_parameters": names,
            "_thd_takes_use_cache": "use_cache" in parameters,
            "_thd_takes_decoder": not names or any(name.startswith("decoder_") for name in names),
            "_thd_pools": class_pools(original),
            "_thd_classifies": "ForSequenceClassification" in original.__name__,
            "_thd_own_class": not original.__module__.startswith("transformers."),
            "_thd_checked": False,  # set on a model whose layers were looked at
        }

    @classmethod
    def _thd_forward(cls, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that announces its pack, runs the model, and pools its output by sequence."""

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            outer: Scope | None = getattr(RUN, "scope", None)
            if outer is not None and outer.module is self:  # a class calls the forward of its base class
                return run(self, *args, **kwargs)

            entered = enter(self, args, kwargs)
            if entered is None:
                return run(self, *args, **kwargs)

            args, kwargs = entered
            scope: Scope = RUN.scope
            output: Any = None
            try:
                if self._thd_classifies and scope.pack is not None:
                    output = classify(self, functools.partial(run, self), args, kwargs, scope.pack)
                else:
                    output = run(self, *args, **kwargs)
            finally:
                pooled = leave(self, output)

            return output if pooled is None else pooled

        return forward

    def __setstate__(self: Any, state: Any) -> None:
        """Restore a copy or a pickled model, whose layers may not be those that were looked at."""
        super().__setstate__(state)  # type: ignore[misc]
        self._thd_checked = False

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _thd_unknown_layers(self: Any, identity: int, outermost: bool) -> str | None:
        """Do as ``_unknown_layers``, once in each compilation of the model.

        ``identity`` is ``id(self)``: torch.compile then uses what it compiled for this model for no other.
        """
        reason: str | None = _unknown_layers(self, outermost)
        return reason

    def post_init(self: Any) -> None:
        """Finish the construction of the model, then prepare the layers that it now has."""
        super().post_init()  # type: ignore[misc]
        prepare_layers(self)
        spread_thd(self, follow=False)

    def set_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Switch the attention as transformers does, on all models around a language model with "thd" too."""
        super().set_attn_implementation(attn_implementation, *args, **kwargs)  # type: ignore[misc]
        attention = attn_implementation
        if isinstance(attention, dict):  # one for each sub-config, "" for the model itself
            attention = attention.get("")
        spread_thd(self, follow=attention is None)

    def warn_if_padding_and_no_attention_mask(self: Any, input_ids: Any, attention_mask: Any) -> None:
        """Leave out transformers' warning of padding ids without a mask, which would read the device."""
        if self.config._attn_implementation != NAME:
            super().warn_if_padding_and_no_attention_mask(input_ids, attention_mask)  # type: ignore[misc]

    def _set_gradient_checkpointing(self: Any, *args: Any, **kwargs: Any) -> None:
        """Set checkpoints as transformers does; they carry the pack to their recomputation."""
        super()._set_gradient_checkpointing(*args, **kwargs)  # type: ignore[misc]
        carry_packs(self)


# ---- A call of a model with "thd"


def enter(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Find the pack in a model's arguments, check it, and push it on the stack of running models."""
    config = model.config
    if config._attn_implementation != NAME:  # switched, or changed by another model with the same config
        _refuse_pack(model, kwargs.get("cu_seq_lens_q"))
        return None
    if isinstance(kwargs.get("attention_mask"), ForThdOnly | UnreadMask):
        kwargs = {**kwargs, "attention_mask": None}

    outer: Scope | None = getattr(RUN, "scope", None)
    if outer is None and getattr(model, "_thd_packs_rows", False) and kwargs.keys().isdisjoint(_OF_PACKS):
        return None  # the model's forward decides what becomes a pack: see run_as_pack
    if args:
        args, kwargs = _named(model, args, kwargs)

    if outer is None or not outer.families:  # the outermost model of the stack
        text = _text_config(config)
        families: tuple[type, ...] = (type(config), type(text))
        masks: tuple[str, ...] = ()
    else:
        text = None
        families = outer.families
        masks = outer.masks  # an outer model may pass its masks to an inner model
        if type(config) not in families and not _gets_all_slots(outer, kwargs):  # such as a vision tower
            RUN.scope = Scope(None, outer, module=model, families=families)
            return args, {name: value for name, value in kwargs.items() if name not in PACK_KWARGS}

    pack, kwargs = _checked_call(model, outer, args, kwargs, text)
    mask_ndim = model.__dict__.get(PLAIN_MASKS)
    shows_all = pack is not None and mask_ndim is not None
    if pack is not None and mask_ndim is not None:
        kwargs = {**kwargs, "attention_mask": pack.all_shown(mask_ndim)}

    RUN.scope = Scope(pack, outer, module=model, families=families, masks=masks, shows_all=shows_all)
    return args, kwargs


def _named(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of a call with names for the positional ones; refuse a batch as the first of them.

    If the class of a user takes a batch, the call runs a whole training step, whose arguments are kept.
    """
    if isinstance(args[0], torch.Tensor | None):
        named = _by_name(model._thd_parameters, args, kwargs)
        return (args, kwargs) if named is None else ((), named)
    if not model._thd_own_class and hasattr(args[0], "hf_kwargs"):
        refuse_batch(model)
    return args, kwargs


def _text_config(config: Any) -> Any:
    """Return the config of the language model inside a model: often the model's own."""
    # get_text_config takes long, and a config without inner configs is its own text config.
    kind: Any = type(config)
    may_hold_others = (
        torch.compiler.is_compiling()  # first, because the next function is cached, which tracing ignores
        or kind_holds_text_config(kind)
        or not TEXT_CONFIGS.isdisjoint(vars(config))
    )
    return config.get_text_config(decoder=True) if may_hold_others else config


def _gets_all_slots(outer: Scope, kwargs: dict[str, Any]) -> bool:
    """Return whether an inner model gets embeddings of all slots, as a part of the language model does."""
    embeds = kwargs.get("inputs_embeds")
    return embeds is not None and outer.pack is not None and embeds.shape[1] == outer.pack.slots


def _pack_of_call(
    outer: Scope | None, args: tuple[Any, ...], kwargs: dict[str, Any], *, outermost: bool
) -> Boundaries | None:
    """Return the pack of a call: from its arguments, or that of the model around this one."""
    got_none = kwargs.get(BOUNDARIES) is None and kwargs.get("cu_seq_lens_q") is None
    # Some models do not pass boundaries and offsets on to the models inside them.
    if got_none and not outermost and outer is not None and outer.pack is not None:
        return outer.pack
    return find_pack(outer, args, kwargs)


def _checked_call(
    model: Any, outer: Scope | None, args: tuple[Any, ...], kwargs: dict[str, Any], text: Any
) -> tuple[Boundaries | None, dict[str, Any]]:
    """Find the pack of a call, and refuse a call that would mix its sequences.

    ``text`` is the language model's config, or None if the model is inside another one of the stack. Returns
    the pack, or None for plain rows; and the arguments, on a pack without a cache and with inner labels.
    """
    pack = kwargs.get(BOUNDARIES)
    # A model inside another one usually gets the boundaries that the outer model has checked.
    if pack is None or outer is None or outer.pack is not pack:
        pack = _pack_of_call(outer, args, kwargs, outermost=text is not None)
    if pack is not None and "cu_seq_lens_q" in kwargs and kwargs.get(BOUNDARIES) is not pack:
        kwargs = {**kwargs, BOUNDARIES: pack}  # a layer that is recomputed gets them again

    compiling = torch.compiler.is_compiling()
    may_be_misread = pack is None or kwargs.get("labels") is not None
    if may_be_misread and text is not None and not compiling:
        refuse_noted(model, kwargs, pack)
    if pack is None:
        return None, kwargs

    refuse_call(model, kwargs)
    if compiling or not model._thd_checked:
        _refuse_wrong_layers(model, outermost=text is not None)

    if text is not None:
        if not compiling:
            keep_frequencies(model)
        if text is not model.config and text._attn_implementation != NAME:
            raise ValueError(_other_attention(model, text._attn_implementation))
        refuse_changed_config(model)
        if any(name in kwargs for name in LABELS):
            kwargs = keep_labels_inside(model, kwargs, pack)

    if model._thd_takes_use_cache and kwargs.get("use_cache") is not False:
        kwargs = {**kwargs, "use_cache": False}
    return pack, kwargs


def leave(model: Any, output: Any) -> Any:
    """Pop a model off the stack, and replace or refuse an output that is pooled over the whole pack."""
    scope: Any = getattr(RUN, "scope", None)
    if scope is None or scope.module is not model:  # enter raised or did nothing
        return None

    RUN.scope = scope.outer
    if scope.pack is None or output is None:
        return None

    outermost = scope.outer is None or scope.outer.module is None
    if model._thd_pools or getattr(model, "pooler", None) is not None:
        return pool_each_sequence(model, scope.pack, output, outermost=outermost)
    if outermost and model._thd_own_class:  # a class of the user, which ``_thd_pools`` may miss
        refuse_pooled_pack(model, scope.pack, output)
    return None


def run_as_pack(model: Any, forward: Callable[..., Any], batch: THDBatch, **kwargs: Any) -> Any:
    """Run a model's forward on a pack, inside a call of the model on other inputs, such as padded rows.

    ``forward`` is bound to the model, or replaces one that is.
    """

    def run(_: Any, *args: Any, **named: Any) -> Any:
        return forward(*args, **named)

    with packed(batch):
        return Announcing._thd_forward(run)(model, **{**batch.hf_kwargs(), **kwargs})


def _other_attention(model: Any, attention: str | None) -> str:
    """Return the error for a language model that runs another attention than the model around it."""
    return (
        f"{type(model).__name__} got a pack, and its language model runs attn_implementation={attention!r}, "
        "with which sequences of a pack would see each other. Call set_attn_implementation('thd') on "
        f"the whole model. {see('attention')}"
    )


def _refuse_pack(model: Any, offsets: Any) -> None:
    """Refuse several sequences if a model lost "thd", unless its attention kernels read the offsets."""
    attention = model.config._attn_implementation
    if offsets is not None and offsets.shape[0] > 2 and attention in ("eager", "sdpa", "flex_attention"):
        raise ValueError(
            f"{type(model).__name__} was given 'thd', got a pack and runs attn_implementation={attention!r}, "
            "with which sequences of a pack may see each other. It was switched, or another model was built "
            "from its config object. Call model.set_attn_implementation('thd'), and give each model a copy "
            f"of the config. {see('attention')}"
        )


def _refuse_wrong_layers(model: Any, *, outermost: bool) -> None:
    """Prepare new layers and refuse those that "thd" cannot correct; once, but in each compilation."""
    if torch.compiler.is_compiling():
        reason = model._thd_unknown_layers(id(model), outermost)
    else:
        reason = _unknown_layers(model, outermost)
        model._thd_checked = reason is None
    if reason is not None:
        raise ValueError(reason)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it looks at the objects of the process
def _unknown_layers(model: Any, outermost: bool) -> str | None:
    """Prepare the layers of a model; return why they cannot run on packs, or None."""
    try:
        prepare_layers(model)
        refuse_unknown_layers(model)
        if outermost:
            _refuse_models_around(model)
    except ValueError as error:
        return str(error)
    return None


def _refuse_models_around(model: Any) -> None:
    """Refuse a language model with "thd" inside a model that is not prepared; a switched part is one."""
    if is_tower(model):
        return
    for outer in stock_models_around(model):
        refuse_model_around(outer, model)


def stock_models_around(model: Any) -> list[Any]:
    """Return the models of transformers that hold a prepared model and are not prepared, the outermost first.

    They are looked for among all objects of the process, in some 0.05 s: a copy or a pickled model reaches no
    method of this package, and a model does not know what holds it.
    """
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if is_kind_of_transformers(kind)}
    stock = {kind for kind in kinds if not issubclass(kind, Announcing)}
    if not stock:
        return []

    around: list[tuple[int, Any]] = []
    for outer in objects:
        if type(outer) in stock:
            inside = list(outer.modules())
            if any(inner is model for inner in inside):
                around.append((len(inside), outer))

    around.sort(key=lambda entry: entry[0], reverse=True)  # most modules first
    return [outer for _, outer in around]


def _parameter_names(model_class: Any) -> tuple[str, ...]:
    """Return the names of a forward's positional parameters, without self."""
    names = []
    for parameter in list(inspect.signature(model_class.forward).parameters.values())[1:]:
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            break
        names.append(parameter.name)
    return tuple(names)


def _by_name(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return all arguments of a call by name, so that none is overlooked; None if they do not fit.

    ``("input_ids", "mask")``, ``(ids,)`` and ``{"mask": None}`` give ``{"input_ids": ids, "mask": None}``.
    """
    if len(args) > len(names) or any(name in kwargs for name in names[: len(args)]):
        return None  # an invalid call, or a forward with *args
    return {**dict(zip(names, args, strict=False)), **kwargs}
