"""Errors for models, adapters, layers and arguments that would make the result of a pack wrong."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from lightning_thd._pages import see
from lightning_thd.batch.noted import sequences_in
from lightning_thd.batch.samples import refuse_shifted
from lightning_thd.boundaries import Boundaries
from lightning_thd.models.families.recurrent import MIXERS, Recurrent
from lightning_thd.models.masks import UnreadMask
from lightning_thd.models.pack import CONSTRUCTION_NOTE, WINDOW_NOTE
from lightning_thd.seqlens import host_values

# ---- When the attention is chosen

# Files that keep a dictionary of attention classes without "thd", beside attention that asks for a
# function. transformers 5.19, 5.23 and 5.24; in a file that is not listed the dictionary raises a KeyError.
_KEEPS_CLASSES: Final = frozenset({"deepseek_ocr2", "git", "sam", "sam_hq", "unlimited_ocr"})
_TEXT_KEEPS_CLASSES: Final = frozenset({"git"})
# The name under which modeling files import transformers' table of attention functions.
_ATTENTION_TABLE: Final = "ALL_ATTENTION_FUNCTIONS"
_PADDED_ROWS: Final = (
    "Use padded rows with attn_implementation='eager', or a model that uses AttentionInterface."
)


def refuse_own_attention(model: Any) -> None:
    """Refuse a model class whose attention ignores ``attn_implementation``: Bloom, Falcon, GPT-J, MPT, ..."""
    if _family_of(model) in _TEXT_KEEPS_CLASSES and not is_tower(model):
        raise ValueError(
            f"{type(model).__name__} has its own attention, from a dictionary of classes that has no 'thd'. "
            f"{_PADDED_ROWS}"
        )

    names = [cls.__name__ for cls in _attention_classes(type(model))]
    has_tower = model.config.get_text_config() is not model.config
    images_only = has_tower and bool(names) and all("Vision" in name for name in names)
    mixers_only = bool(names) and all(name in MIXERS for name in names)
    if ignores_attention(type(model)) and not (images_only or mixers_only):
        refuse_ignored_attention(model)


def refuse_ignored_attention(model: Any) -> NoReturn:
    """Refuse a model because its attention ignores ``attn_implementation``."""
    raise ValueError(
        f"{type(model).__name__} has its own attention that ignores attn_implementation, and would leak "
        f"across sequences. {_PADDED_ROWS}"
    )


def keeps_own_attention(model: Any) -> bool:
    """Return whether a model is a vision tower whose attention has no "thd"."""
    if not is_tower(model):
        return False
    return ignores_attention(type(model)) or _family_of(model) in _KEEPS_CLASSES


def ignores_attention(model_class: type) -> bool:
    """Return whether the attention of a model class cannot be chosen.

    The file that defines such a class has attention layers and does not know transformers' table of attention
    functions. transformers refuses to switch the same classes: the two agree for all 2,451 model classes of
    transformers 5.23.
    """
    layers = [cls for cls in _attention_classes(model_class) if nn.Module in cls.__bases__]
    return bool(layers) and not hasattr(sys.modules[model_class.__module__], _ATTENTION_TABLE)


def _family_of(model: Any) -> str:
    """Return the name of the modeling file that defines a model's class, such as ``llama``."""
    return type(model).__module__.rpartition(".modeling_")[2]


def _attention_classes(model_class: type) -> list[type]:
    """Return the attention layers of the file that defines a model class."""
    file = sys.modules.get(model_class.__module__)
    values = [] if file is None else list(vars(file).values())
    return [
        value
        for value in values
        if isinstance(value, type)
        and issubclass(value, nn.Module)
        and "Attention" in value.__name__
        and value.__module__ == model_class.__module__
    ]


def is_tower(model: Any) -> bool:
    """Return whether a model takes pixels and no tokens."""
    names = list(inspect.signature(type(model).forward).parameters)
    return names[1:2] == ["pixel_values"] and not any(name.endswith("input_ids") for name in names)


def refuse_model_around(outer: Any, inner: Any) -> None:
    """Refuse a model without "thd" around a language model with "thd": its loss would mix sequences."""
    raise ValueError(
        f"{type(outer).__name__} was not prepared for packs, and holds a {type(inner).__name__} with 'thd'. "
        "Its own loss, or an output that it pools, would mix the sequences of a pack. Call "
        f"set_attn_implementation('thd') on the outer {type(outer).__name__}; or, if its config says 'thd', "
        f"lightning_thd.models.prepare(model). {see('attention')}"
    )


# ---- At a model's first pack

_POSITION_TABLE = re.compile(r"Position\w*Embedding")
# In 5.17 the logits of moshi are off by 1.1 in a pack, and the experts of longcat_flash get no gradients.
_EXACT_FROM: Final = {"moshi": (5, 18), "longcat_flash": (5, 18)}


class _Named(NamedTuple):
    """A module of the language model, and the innermost PreTrainedModel that calls it."""

    name: str
    module: nn.Module
    owner: Any


def refuse_unknown_layers(model: nn.Module) -> None:
    """Refuse early releases, layers that would mix sequences, and models without a layer that knows packs."""
    installed = str(getattr(sys.modules.get("transformers"), "__version__", ""))
    refuse_early_release(getattr(getattr(model, "config", None), "model_type", ""), installed)
    aware = False
    for named in _language_modules(model):
        if isinstance(named.module, Recurrent):
            aware = True
            continue
        is_layer = named.module is not named.owner
        aware = aware or (is_layer and _asks_for_attention(type(named.module).__module__))
        _refuse_layer(named)

    if not aware:
        raise ValueError(
            f"{type(model).__name__} has no layer that knows about packs: no attention that reads "
            "attn_implementation, and no recurrent layer that is known. Feed it padded rows."
        )


def refuse_early_release(model_type: str, installed: str) -> None:
    """Refuse a model family that an early release of transformers computes differently."""
    needed = _EXACT_FROM.get(model_type)
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    if needed is not None and len(numbers) == 2 and numbers < needed:
        raise ValueError(
            f"With transformers {installed}, {model_type} differs between a pack and single sequences; it is "
            f"exact from {'.'.join(map(str, needed))} on. Install that release, or feed it padded rows."
        )


def _refuse_layer(named: _Named) -> None:
    """Refuse a layer that is known to mix neighbouring tokens, or positions that cannot restart."""
    name, module, owner = named
    kind = type(module).__name__
    convolves = any(isinstance(x, nn.Conv1d) and x.kernel_size[0] > 1 for x in module.children())
    if convolves or any(hasattr(module, name) for name in ("A_log", "dt_bias")):
        raise ValueError(
            f"{name} ({kind}) mixes tokens by a convolution or a state, which may carry "
            "over into the next sequence of a pack. Feed this model padded rows; or, if the layer is "
            f"causal, call lightning_thd.models.register_family(model_type, recurrent_layers=[{kind!r}]) "
            "before the model is built, and verify it with lightning_thd.models.check_packing(model)."
        )

    weight = getattr(getattr(module, "base_layer", None), "weight", None)
    if getattr(module, "lora_magnitude_vector", None) and _is_cut_by_tensor_parallelism(weight):
        raise ValueError(f"{name} ({kind}) is a DoRA layer cut by tensor parallelism. Use plain LoRA.")
    if getattr(module, "trigram_input", False):
        raise ValueError(
            f"{name} ({kind}) joins each token with its two neighbours. Build the model "
            "with trigram_input=False, or feed it padded rows."
        )

    if not _POSITION_TABLE.search(kind) or "Rotary" in kind:
        return
    if "position_ids" not in inspect.signature(type(owner).forward).parameters:
        raise ValueError(
            f"{name} ({kind}) counts positions along the whole row, and {type(owner).__name__} "
            "takes no position_ids to restart them. Feed this model padded rows."
        )


def _is_cut_by_tensor_parallelism(weight: Any) -> bool:
    """Return whether ranks of a tensor-parallel axis hold different parts of a weight."""
    axes = getattr(getattr(weight, "device_mesh", None), "mesh_dim_names", None) or ()
    for axis, placement in zip(axes, getattr(weight, "placements", ()), strict=False):
        if ("tp" in axis or "tensor" in axis) and not placement.is_replicate():
            return True
    return False


def _asks_for_attention(name: str) -> bool:
    """Return whether a modeling file, given by its module name, uses transformers' attention table."""
    return ".modeling_" in name and hasattr(sys.modules.get(name), _ATTENTION_TABLE)


def _language_modules(model: Any) -> Iterator[_Named]:
    """Yield the language model's modules, but no towers with another config and nothing inside mixers."""
    families = (type(model.config), type(model.config.get_text_config(decoder=True)))
    stack = [_Named("", model, model)]
    while stack:
        named = stack.pop()
        yield named
        if isinstance(named.module, Recurrent):
            continue

        for name, child in named.module.named_children():
            is_model = hasattr(child, "config") and hasattr(child, "get_input_embeddings")
            if is_model and type(child.config) not in families:
                continue
            path = f"{named.name}.{name}" if named.name else name
            owner = child if is_model else named.owner
            stack.append(_Named(path, child, owner))


# ---- In every call


def note_construction(model: Any) -> None:
    """Note the windows of a model's layers, and the config values that masks read in every call."""
    if not any(True for _ in model.children()):  # the layers are not built yet
        return
    windows = [
        module.__dict__.setdefault(WINDOW_NOTE, module.sliding_window)
        for module in model.modules()
        if hasattr(module, "sliding_window")
    ]
    names = ["layer_types"]
    if any(windows):
        names += ["sliding_window", "local_attention"]
    model.__dict__.setdefault(CONSTRUCTION_NOTE, (names, copy.deepcopy(_read_late(model.config, names))))


def _read_late(config: Any, names: list[str]) -> list[Any]:
    """Return the values of a config and, as nested lists, of the configs inside it."""
    values: list[Any] = [getattr(config, name, None) for name in names]
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return values + [_read_late(part, names) for part in inner if hasattr(part, "sub_configs")]


def refuse_changed_config(model: Any) -> None:
    """Refuse a config that was changed after the layers were built from it."""
    names, at_construction = model.__dict__.get(CONSTRUCTION_NOTE, ([], None))
    if not names:
        return
    present = _read_late(model.config, names)
    if present != at_construction:
        raise ValueError(
            f"The config of {type(model).__name__} was changed after the model was built: {', '.join(names)} "
            f"were {at_construction} and are {present}, and layers keep the values they were built with. "
            "Build the model from the changed config, for example from_pretrained(..., sliding_window=...)."
        )


_CACHES: Final = ("past_key_values", "cache", "cache_params")
# Methods of PEFT 0.21 that are exact in tests/models/test_adapters.py, or that only change weights.
_TOKEN_BY_TOKEN: Final = frozenset(
    {"ADALORA", "ADAMSS", "BEFT", "BOFT", "BONE", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD", "GLORA"}
    | {"GRALORA", "HIRA", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT"}
    | {"PSOFT", "PVERA", "RANDLORA", "ROAD", "SHIRA", "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS"}
    | {"UNILORA", "VBLORA", "VERA", "WAVEFT"}
)


def refuse_batch(model: Any) -> NoReturn:
    """Refuse a batch in place of token ids: a model of transformers embeds its first argument."""
    from lightning_thd.batch.thd_batch import TO_A_MODEL  # which imports more than a model needs

    raise TypeError(f"{type(model).__name__} got a THDBatch in place of tensors. {TO_A_MODEL}.")


def refuse_call(model: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a call on a pack if the model's class, adapters or arguments would make it inexact."""
    kind = type(model).__name__
    # A class without decoder inputs runs only the encoder of an encoder-decoder config.
    if model._thd_takes_decoder and getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{kind} got a pack. An encoder-decoder has two sequences per sample: feed it padded rows."
        )

    if "MultipleChoice" in kind:
        raise ValueError(f"{kind} got a pack. It compares several sequences per sample: feed it padded rows.")

    mask = kwargs.get("attention_mask")
    # A multimodal model passes its masks to its text model, one per layer type; with "thd" none is a tensor.
    ours = isinstance(mask, dict) and all(x is None or isinstance(x, UnreadMask) for x in mask.values())
    if mask is not None and not ours:
        raise ValueError(
            f"{kind} got a pack and an attention_mask. Pass None, and pad by THDBatch.collate(..., pad_to=)."
        )

    if kwargs.get("use_cache") or any(kwargs.get(name) is not None for name in _CACHES):
        name = next((name for name in _CACHES if kwargs.get(name) is not None), "use_cache=True")
        raise ValueError(
            f"{kind} got a pack and {name}. Generation with a cache through 'thd' is not possible: generate "
            f"with model.set_attn_implementation('eager'). {see('generation')}"
        )

    if kwargs.get("pixel_values") is not None or kwargs.get("pixel_values_videos") is not None:
        _refuse_plain_positions(model, kwargs.get("position_ids"))

    adapters = getattr(model, "peft_config", None)
    for name, config in adapters.items() if isinstance(adapters, dict) else ():
        method = getattr(config, "peft_type", None)
        method = getattr(method, "value", method)
        is_unknown = method is not None and method not in _TOKEN_BY_TOKEN and not config.is_prompt_learning
        if is_unknown and _takes_part(model, name):
            raise ValueError(
                f"The adapter {name!r} ({method}) is not known to change each token independently. Use LoRA."
            )

        for option in ("alora_invocation_tokens", "velora_config"):
            if getattr(config, option, None) is not None and _takes_part(model, name):
                raise ValueError(
                    f"The adapter {name!r} has {option}: a token may depend on others. Use plain LoRA."
                )


def _takes_part(model: nn.Module, name: str) -> bool:
    """Return whether an adapter changes outputs: it is active, and not inside ``disable_adapter()``."""
    # Layers of PEFT say so by values; methods of these names belong to transformers' models.
    layers: list[Any] = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "disable_adapters", None), bool) and hasattr(module, "active_adapters")
    ]
    if not layers:  # a method without layers of this kind, such as adaption prompts
        return True
    return any(not layer.disable_adapters and name in layer.active_adapters for layer in layers)


def _refuse_plain_positions(model: nn.Module, position_ids: Tensor | None) -> None:
    has_rope_index = any(hasattr(x, "get_rope_index") for x in (model, getattr(model, "model", None)))
    if has_rope_index and position_ids is not None and position_ids.ndim != 3:
        raise ValueError(
            f"{type(model).__name__} got images in a pack and position_ids {tuple(position_ids.shape)}. A "
            "model with M-RoPE needs position_ids [3, 1, T]: compute the positions of every sample with "
            "model.model.get_rope_index(...)."
        )


def refuse_losing_adapters(wrapper: Any) -> None:
    """Refuse adapters of a ``PeftModel`` that put tokens before every row, or add a term to the loss."""
    active = getattr(wrapper, "active_adapters", None) or [getattr(wrapper, "active_adapter", "default")]
    configs = getattr(wrapper, "peft_config", None)
    # Inside disable_adapter(), a wrapper that would add virtual tokens has the forward of its base.
    adds_no_tokens = wrapper.forward == getattr(getattr(wrapper, "base_model", None), "forward", None)
    for name, config in configs.items() if isinstance(configs, dict) else ():
        if name not in active:
            continue

        kind = getattr(getattr(config, "peft_type", None), "value", type(config).__name__)
        if getattr(config, "is_prompt_learning", False) and not adds_no_tokens:
            raise ValueError(
                f"The adapter {name!r} ({kind}) puts virtual tokens before every row, and a pack is one "
                "row. Use LoRA, or feed this model padded rows."
            )

        if getattr(config, "orth_reg_weight", 0.0):
            raise ValueError(
                f"The adapter {name!r} ({kind}) adds a penalty to the loss (orth_reg_weight="
                f"{config.orth_reg_weight}), which a loss without logits would leave out. Set it to 0.0."
            )


# Loss types that shift labels, loss types that do not, and arguments that label a whole row.
_SHIFTED: Final = ("ForCausalLM", "ForConditionalGeneration")
_IN_PLACE: Final = ("ForMaskedLM", "ForTokenClassification", "ForSequenceClassification")
_ROW_LABELS: Final = ("start_positions", "end_positions", "next_sentence_label", "sentence_order_label")
LABELS: Final = ("labels", *_ROW_LABELS)


def refuse_noted(model: Any, kwargs: dict[str, Any], pack: Boundaries | None) -> None:
    """Refuse the ids of a running step's pack as a plain row, and its targets as labels.

    Only the first steps of a run are noted, so later steps cost nothing.
    """
    name = type(model).__name__
    sequences = 0 if pack is not None else sequences_in(kwargs.get("input_ids"), "input_ids")
    if sequences > 1:
        raise ValueError(
            f"{name} got the input_ids of a pack of {sequences} sequences, and not where they begin, so "
            "their tokens would see each other. Call model(**batch.hf_kwargs())."
        )

    labels = kwargs.get("labels")
    if labels is None or kwargs.get("shift_labels") is not None or not sequences_in(labels, "targets"):
        return
    if _loss_kind(model) in _SHIFTED:
        raise ValueError(_next_tokens(name))
    if _loss_kind(model) in _IN_PLACE:
        raise ValueError(
            f"{name} got batch.targets as labels, which are those of the next slots, and it learns the label "
            "of each token itself. Pass labels=batch.targets.roll(1)[None]."
        )


def keep_labels_inside(model: Any, kwargs: dict[str, Any], pack: Boundaries) -> dict[str, Any]:
    """Ignore the labels of sequences' first tokens if the loss shifts labels; refuse unknown losses."""
    of_a_row = next((name for name in _ROW_LABELS if kwargs.get(name) is not None), None)
    if of_a_row is not None:
        raise ValueError(
            f"{type(model).__name__} got a pack and {of_a_row}, which describes a whole row. Leave it out "
            "and compute the loss of every sequence from batch.unpack()."
        )

    labels = kwargs.get("labels")
    if labels is not None and "ForSequenceClassification" not in type(model).__name__:
        pack.require("own_loss", model)
    if labels is None or kwargs.get("shift_labels") is not None:
        return kwargs

    kind = _loss_kind(model)
    if kind in _IN_PLACE:
        return kwargs
    if kind not in _SHIFTED:
        raise ValueError(
            f"{type(model).__name__} got a pack and labels, and its loss is not known to stay inside the "
            f"sequences. Compute the loss from the logits. {see('labels')}"
        )

    pack.require("next_label", model)
    _refuse_shifted(model, kwargs.get("input_ids"), labels)
    starts = pack.offsets[:-1].long()
    first = torch.zeros(pack.slots + 1, dtype=torch.bool, device=starts.device)
    first = first.index_fill(0, starts, True)[:-1]  # an empty last sequence begins after the row
    return {**kwargs, "labels": labels.masked_fill(first, kwargs.get("ignore_index", -100))}


def _loss_kind(model: Any) -> str | None:
    """Return transformers' name of the loss that a model computes from labels, if it is known."""
    # Older classes, such as those of BERT and GPT-2, have "LMHead" in their names.
    if "LMHead" in type(model).__name__:
        return "ForCausalLM"
    kind: str | None = getattr(model, "loss_type", None)
    return kind


def _next_tokens(name: str) -> str:
    """Return the error for labels that are shifted already."""
    return (
        f"{name} got labels with a pack: the labels are the next tokens already, as "
        "batch.targets are, and the model shifts labels by itself. Pass shift_labels=labels too, "
        f"or use lightning_thd.causal_lm_loss(model, batch). {see('labels')}"
    )


def _refuse_shifted(model: Any, input_ids: Any, labels: Any) -> None:
    """Raise if labels are the next tokens, which the model would shift once more; reads no device."""
    ids = host_values(input_ids) if isinstance(input_ids, Tensor) else None
    targets = host_values(labels) if isinstance(labels, Tensor) else None
    if ids is None or targets is None or ids.shape != targets.shape:
        return  # the values are on a device, or traced

    try:
        # Labels of the model's own tokens are their ids or -100, so one that is the next token says enough.
        refuse_shifted([(ids.reshape(-1), targets.reshape(-1))], "labels=", least=1)
    except ValueError as err:
        raise ValueError(_next_tokens(type(model).__name__)) from err
