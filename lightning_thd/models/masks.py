"""A mask that a model asks for under "thd" -> None, a placeholder, or an error.

"thd" needs no mask: it knows the boundaries of the pack. A placeholder stands for a mask that only the
attention may get. It holds the mask's window or chunk, and raises an error where other code reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn

from lightning_thd._static import RUN, shapes_are_static
from lightning_thd.boundaries import Boundaries
from lightning_thd.models.pack import BIDIRECTIONAL, CAUSAL, Scope

# Families whose layers pass the mask to the attention unchanged, so that a placeholder can carry its limit.
HANDS_MASKS_ON = ("llama4_text", "phimoe")
# Queries whose pairs with all keys are looked at together: at most 2^20 pairs for a sequence of 1,024 tokens.
_ROWS_AT_ONCE: Final = 1024


class UnreadMask:
    """A mask for the attention only: whatever else reads it gets an error.

    transformers asks for a mask that may not be left out if positions restart in a row, which "thd" handles,
    and if a model reads its mask: to choose keys by an index, or to add to it. The two calls look alike. So a
    model gets this placeholder. The attention takes its limit, and code that reads it fails by name.

    Attributes:
        window: the last keys that a query sees, its own included; None for all.
        chunk: the length of chunks across which no query sees a key; None for none.
    """

    __slots__ = ("_family", "chunk", "window")

    def __init__(self, family: str, *, window: int | None = None, chunk: int | None = None) -> None:
        self._family = family
        self.window = window
        self.chunk = chunk

    def _refuse(self, *_: object) -> NoReturn:
        raise ValueError(
            f"{self._family}: this model reads its mask: it chooses the keys of every token by an index, or "
            "adds to its mask. Use padded rows with attn_implementation='eager'. If its layers could do "
            "without the mask, adapt them by lightning_thd.models.register_family(..., adapt=...) and verify "
            "the model with lightning_thd.models.check_packing."
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python and torch look for methods that need not be there
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        """Refuse a function of torch that gets the mask, such as ``scores + mask``."""
        values = [*args, *(kwargs or {}).values()]
        nested = [x for value in values if isinstance(value, list | tuple) for x in value]
        next(x for x in (*values, *nested) if isinstance(x, cls))._refuse()

    __hash__ = object.__hash__
    __bool__ = __len__ = __iter__ = __getitem__ = __eq__ = __ne__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __invert__ = __lt__ = __gt__ = _refuse


def thd_mask(
    *,
    q_length: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    config: Any = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    use_vmap: bool = False,
    device: torch.device | None = None,
    **_: Any,
) -> UnreadMask | None:
    """Return None or a placeholder for the attention; transformers defines the arguments."""
    scope: Scope | None = getattr(RUN, "scope", None)
    both_ways = _sees_both_ways(config)
    kind = BIDIRECTIONAL if both_ways or allow_is_bidirectional_skip is not None else CAUSAL
    if scope is not None and kind not in scope.masks:
        scope.masks = (*scope.masks, kind)
    if scope is not None and scope.shows_all:
        attention_mask = None  # ours, see ``families/plain_masks.py``
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(
            f"attn_implementation='thd' got an attention_mask {tuple(attention_mask.shape)} hiding tokens. "
            "Pack the rows instead: THDBatch.from_padded(input_ids, attention_mask). To generate from "
            "left-padded rows, use rows of equal length, or model.set_attn_implementation('eager')."
        )

    # If transformers does not allow to skip the mask, the mask may be more than causal or bidirectional.
    plain = allow_is_causal_skip if allow_is_bidirectional_skip is None else allow_is_bidirectional_skip
    if not plain and not both_ways:
        window = _window_of_mask(mask_function, kind, q_length, config, device, own_functions=use_vmap)
        local_size = local_size or window

    longest = longest_sequence(q_length)
    if local_size is not None and longest > local_size and not _knows_window(scope, config):
        if getattr(config, "model_type", "") in HANDS_MASKS_ON or not _has_local_layers(config):
            limit = "chunk" if hasattr(config, "attention_chunk_size") else "window"
            return UnreadMask(type(config).__name__, **{limit: local_size})
        raise ValueError(
            f"{type(config).__name__}: this model hides keys by a window or chunk of {local_size}, which "
            f"only its mask carries, so 'thd' cannot apply it to sequences of {longest}. Use sequences of at "
            f"most {local_size}, or attn_implementation='eager' on padded rows."
        )

    return None if plain else UnreadMask(type(config).__name__)


def _sees_both_ways(config: Any) -> bool:
    """Return whether a model adds later tokens to a causal mask, as EmbeddingGemma does to Gemma 3's.

    Its layers have ``is_causal=False`` and hold their window, so the kernel needs no mask.
    """
    of_gemma = getattr(config, "model_type", "") == "gemma3_text"
    return of_gemma and getattr(config, "use_bidirectional_attention", False) is True


@torch.compiler.disable  # type: ignore[untyped-decorator]
def shows_all(mask: Tensor, pack: Boundaries | None) -> bool:
    """Return whether a mask ``[B, 1, 1, T]`` hides no token; reads the device, but once per pack and mask."""
    if mask.ndim != 4 or mask.shape[1:3] != (1, 1):
        return False
    if pack is not None and pack.shown_mask is mask:
        return True

    # A mask that is added to the scores hides nothing if it is 0.
    shown = bool(mask.all()) if mask.dtype == torch.bool else not bool(mask.any())
    if shown and pack is not None:
        pack.note_shown(mask)  # all layers get the same mask
    return shown


# ---- Masks with a pattern


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _window_of_mask(
    mask_function: Callable[..., Any] | None,
    kind: str,
    slots: int,
    config: Any,
    device: torch.device | None,
    *,
    own_functions: bool,
) -> int | None:
    """Look at a mask that may not be skipped; refuse a special pattern, and return the window that it has.

    ``mask_function(row, head, query, key)`` is transformers' form of a mask: whether the query sees the key,
    for indices that broadcast. Parts of transformers hide keys by the boundaries of the pack and by limits
    that are told apart from the mask. All that they add is blocks of neighbouring tokens, such as those of an
    image, that see each other both ways. So pairs at distances 1, 2, 4, ... are looked at. Functions of the
    model itself (``own_functions``) may do anything: all pairs inside sequences are looked at.
    """
    if mask_function is None or slots < 2 or (device is not None and device.type == "meta"):
        return None
    if own_functions:
        return _window_of_own_mask(mask_function, kind, slots, config, device)
    if kind == BIDIRECTIONAL or shapes_are_static():  # a recorded step has no images, and cannot read
        return None

    queries = torch.arange(slots, device=device)
    distances = [2**power for power in range((slots - 1).bit_length())]
    earlier = torch.cat([queries[:-distance] for distance in distances])
    later = torch.cat([queries[distance:] for distance in distances])
    if bool(_sees(mask_function, earlier, later).any()):
        _refuse_pattern(config)
    return None


def _window_of_own_mask(
    mask_function: Callable[..., Any],
    kind: str,
    slots: int,
    config: Any,
    device: torch.device | None,
) -> int | None:
    """Compare all pairs inside sequences with the plain mask, and with the plain mask in a window."""
    scope: Scope | None = getattr(RUN, "scope", None)
    lengths = (slots,) if scope is None or scope.pack is None else scope.pack.lengths
    window: int | None = getattr(config, "sliding_window", None)
    is_plain = True
    is_windowed = window is not None
    start = 0

    for length in lengths:
        keys = torch.arange(start, start + length, device=device)
        for queries in keys.split(_ROWS_AT_ONCE):  # type: ignore[no-untyped-call]
            ages = queries[:, None] - keys
            plain = ages >= 0 if kind == CAUSAL else torch.ones_like(ages, dtype=torch.bool)
            sees = _sees(mask_function, queries[:, None], keys)
            is_plain = is_plain and torch.equal(sees, plain)
            if is_windowed and window is not None:
                is_windowed = torch.equal(sees, plain & (ages < window))
        start += length

    if not (is_plain or is_windowed):
        _refuse_pattern(config)
    return None if is_plain else window


def _sees(mask_function: Callable[..., Any], queries: Tensor, keys: Tensor) -> Tensor:
    """Return whether queries see keys, for indices that broadcast."""
    row = torch.zeros((), dtype=torch.long, device=queries.device)
    sees = torch.as_tensor(mask_function(row, row, queries, keys), device=queries.device)
    return sees.bool().expand((queries - keys).shape)


def _refuse_pattern(config: Any) -> NoReturn:
    raise ValueError(
        f"{type(config).__name__}: this model needs a mask with a special pattern. Leave token_type_ids and "
        "images out, or use padded rows with attn_implementation='eager'."
    )


# ---- Windows

_HOLDS_WINDOW: Final = "_thd_holds_window"  # the attribute of a model whose layers know their window
# Families whose layers hold no window but pass ``config.sliding_window`` to the attention in every call.
# Checked with transformers 5.19, 5.23 and 5.24; ``lost_window`` refuses a layer of these that passes none.
_PASSES_WINDOW: Final = frozenset(
    {"minimax", "ministral3", "mistral", "mixtral", "olmoe", "phi3", "phi4_multimodal", "starcoder2"}
    | {"voxtral_realtime_text"}
)


def learn_masks(model: nn.Module) -> None:
    """Note whether the layers of a model know their window, so that not only a mask does."""
    layers = (module for module in model.modules() if module is not model)
    model.__dict__[_HOLDS_WINDOW] = any(hasattr(layer, "sliding_window") for layer in layers)


def _knows_window(scope: Scope | None, config: Any) -> bool:
    """Return whether the layers of the running model apply their window without a mask."""
    if getattr(config, "model_type", "") in _PASSES_WINDOW:
        return True
    return scope is not None and bool(getattr(scope.module, _HOLDS_WINDOW, False))


def _has_local_layers(config: Any) -> bool:
    """Return whether some layers of a model may have a window or chunk, so that they take its local mask.

    Qwen2-MoE's models build that mask for every pack, also if all their layers attend to all tokens.
    """
    kinds = getattr(config, "layer_types", None)
    return kinds is None or any(kind in ("sliding_attention", "chunked_attention") for kind in kinds)


def lost_window(module: nn.Module) -> bool:
    """Return whether a layer passed no window to the attention, and its family should pass one."""
    config = getattr(module, "config", None)
    return getattr(config, "model_type", "") in _PASSES_WINDOW and not hasattr(module, "sliding_window")


def longest_sequence(q_length: int) -> int:
    """Return the length of the longest sequence of the running pack, or ``q_length`` without one."""
    scope: Scope | None = getattr(RUN, "scope", None)
    if scope is None or scope.pack is None:
        return q_length
    return scope.pack.longest
