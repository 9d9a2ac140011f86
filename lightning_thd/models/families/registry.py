"""A model -> the same model, with the adapters of its family."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from torch import nn

from lightning_thd.models.families import gemma3n, llama4, plain_masks, qwen_vl, recurrent, roberta, ropes

# Each looks at all layers of a model, by the names of their classes, and leaves models without its quirk
# alone.
_QUIRKS: Final = (qwen_vl, recurrent, roberta, llama4, ropes, plain_masks, gemma3n)
# Model type -> functions that users have registered.
_REGISTERED: Final[dict[str, list[Callable[[nn.Module], None]]]] = {}


def adapt_to_family(model: Any) -> None:
    """Adapt the layers of a model to packs; refuse layers whose quirk is known and whose code is not."""
    for quirk in _QUIRKS:
        quirk.adapt_layers(model)
    for adapt_layers in _REGISTERED.get(getattr(model.config, "model_type", ""), ()):
        adapt_layers(model)


def register_family(
    model_type: str,
    *,
    recurrent_layers: Iterable[str] = (),
    adapt: Callable[[nn.Module], None] | None = None,
) -> None:
    """Say how the models of a family run on packs, before such a model is built.

    Verify a family that you register with :func:`lightning_thd.models.check_packing`.

    Args:
        model_type: ``config.model_type`` of the family.
        recurrent_layers: class names of its causal layers that carry a state or a convolution along a row.
            In a pack they run on padded groups of sequences of similar length. Such a layer takes hidden
            states ``[B, T, ...]`` first, and returns outputs of the same shape, or a tuple with them first.
        adapt: a function that is called with each model of this type when the model is prepared. It may
            change the layers of that model, for example by hooks that restart their positions.

    Example:
        >>> register_family("my_model", recurrent_layers=["MyConvolution"])
    """
    if not isinstance(model_type, str) or not model_type:
        raise ValueError(f"model_type={model_type!r}; wanted the model_type of a config, such as 'llama'.")

    names = [recurrent_layers] if isinstance(recurrent_layers, str) else list(recurrent_layers)
    if adapt is not None and not callable(adapt):
        raise TypeError(f"adapt is a {type(adapt).__name__}; wanted a function of a model.")

    for name in names:
        recurrent.MIXERS.setdefault(name, None)

    if adapt is not None:
        functions = _REGISTERED.setdefault(model_type, [])
        if adapt not in functions:
            functions.append(adapt)
