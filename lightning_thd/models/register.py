"""The name ``"thd"`` -> entries in transformers' tables of attentions and masks, on import.

All that is replaced outside this package, each doing what it did for models without "thd":

- ``PreTrainedModel.get_correct_attn_implementation``, ``set_attn_implementation`` and ``post_init``: a model
  given "thd" gets its hooks here, and so does every model around it.
- the forward of every ``PreTrainedModel`` class: looks for "thd" in the model's config (``front_door``).
- ``PreTrainedModel.__setstate__``: a hooked model that was copied or unpickled is known again.
- ``PreTrainedModel._set_gradient_checkpointing`` and torch's ``CheckpointWrapper``: recomputed layers find
  the pack they were first run on.
- ``masking_utils._preprocess_mask_arguments``: positions are not searched for packs under "thd".
- when a "thd" model is built, the forward of its state-space layers, position embeddings, length-dependent
  ropes, Gemma3n's embeddings and pooling heads (``adopt_*`` in this folder); outside a pack they do what
  they did.

Where transformers is too old, or has changed underneath, its import goes on and "thd" alone is refused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Final

from lightning_thd.models.import_hook import after_import

NAME = "thd"
# Before, Mamba2, Zamba2, FalconH1 and NemotronH hard-coded seq_idx=None in their fused calls: a silent leak.
OLDEST: Final = (5, 15)
_done: set[str] = set()


def register_thd() -> None:
    """Register ``attn_implementation="thd"`` with transformers once that is imported.

    Safe to call any number of times; ``import lightning_thd`` calls it.
    """
    for name, callback in (
        ("transformers.modeling_utils", _register_attention),
        ("transformers.masking_utils", _register_mask),
        ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", _watch_wrappers),
    ):
        if name not in _done:
            _done.add(name)
            after_import(name, callback)


def _installed() -> str:
    try:
        return version("transformers")
    except PackageNotFoundError:  # a source tree on the path
        return "of unknown version"


def _too_old(installed: str) -> bool:
    numbers = [part for part in installed.split(".")[:2] if part.isdigit()]
    return len(numbers) == 2 and tuple(map(int, numbers)) < OLDEST


def _refusal(what: str) -> Callable[..., Any]:
    """Return an attention or mask function that raises, saying why "thd" is not available."""
    message = (
        f"attn_implementation='thd' is not available with transformers {_installed()}: {what}. Install a "
        f"release from {'.'.join(map(str, OLDEST))} to 5.23, or a newer lightning_thd."
    )

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError(message)

    return refuse


def _register_attention(modeling_utils: ModuleType) -> None:
    """Register "thd" as an attention; problems refuse models when called, never the import."""
    table: Any = getattr(modeling_utils, "AttentionInterface", None)
    if table is None:
        return  # transformers refuses the name by itself
    if _too_old(_installed()):
        table.register(NAME, _refusal("it hands no boundaries to state-space layers"))
        return
    try:
        from lightning_thd.models.attend import thd_attention

        _watch_models(modeling_utils.PreTrainedModel)
        table.register(NAME, thd_attention)
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        table.register(NAME, _refusal(f"it has changed underneath ({error})"))


def _register_mask(masking_utils: ModuleType) -> None:
    """Register "thd" as a mask; problems refuse models when called, never the import."""
    from lightning_thd.models.inputs.masks import skip_position_scan, thd_mask

    table: Any = getattr(masking_utils, "AttentionMaskInterface", None)
    if table is None or _too_old(_installed()):
        return
    try:
        skip_position_scan(masking_utils)
        table.register(NAME, thd_mask)
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        table.register(NAME, _refusal(f"it has changed underneath ({error})"))


def _watch_wrappers(checkpoint_wrapper: ModuleType) -> None:
    """Patch torch's CheckpointWrapper, which FSDP strategies use, to carry the pack."""
    from lightning_thd.models.hooks import carry_scope
    from lightning_thd.models.mixers import has_mixers

    wrapper: Any = checkpoint_wrapper.CheckpointWrapper
    initialize: Callable[..., None] = wrapper.__init__

    @functools.wraps(initialize)
    def __init__(self: Any, mod: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, mod, *args, **kwargs)
        self.checkpoint_fn = carry_scope(self.checkpoint_fn, compilable=not has_mixers(mod))

    wrapper.__init__ = __init__


def _watch_models(base: Any) -> None:
    """Hook every model that gets "thd" attention, and every activation checkpointing switched on."""
    from lightning_thd.models.front_door import guard_known_classes, watch_construction, watch_copies

    checkpointing = _carrying_checkpoints(base)
    watch_construction(base)
    watch_copies(base)
    base._set_gradient_checkpointing = checkpointing
    guard_known_classes(base)


def _carrying_checkpoints(base: Any) -> Callable[..., None]:
    """Return a ``_set_gradient_checkpointing`` whose checkpoints carry the pack to their recomputation."""
    from lightning_thd.models.hooks import carry_scope
    from lightning_thd.models.mixers import has_mixers

    set_checkpointing: Callable[..., None] = base._set_gradient_checkpointing
    if "gradient_checkpointing_func" not in inspect.signature(set_checkpointing).parameters:
        raise TypeError("_set_gradient_checkpointing takes no gradient_checkpointing_func")

    @functools.wraps(set_checkpointing)
    def _set_gradient_checkpointing(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(set_checkpointing).bind(self, *args, **kwargs)
        bound.apply_defaults()
        bound.arguments["gradient_checkpointing_func"] = carry_scope(
            bound.arguments["gradient_checkpointing_func"], compilable=not has_mixers(self)
        )
        set_checkpointing(*bound.args, **bound.kwargs)

    return _set_gradient_checkpointing
