"""The adapters of PEFT in a model -> an error where one would see a pack as one sequence, or lose its loss.

LoRA and its like change what a layer does to every token by itself, and need nothing. Named by their configs'
attributes, so that PEFT is not imported.
"""

from __future__ import annotations

from typing import Any


def refuse_row_adapters(model: Any) -> None:
    """Refuse adapters that begin at a token they look for in the row, once a row: activated LoRA.

    Args:
        model: of transformers; the configs of its adapters are in ``peft_config``.

    Raises:
        ValueError: naming the adapter.
    """
    for name, config in _configs(model):
        if getattr(config, "alora_invocation_tokens", None) is not None:
            raise ValueError(
                f"The adapter {name!r} is an activated LoRA: it begins at the last of its invocation tokens "
                "in a row, and in a pack that is one place for all sequences. Use plain LoRA, or feed this "
                "model padded rows."
            )


def refuse_losing_adapters(wrapper: Any) -> None:
    """Refuse adapters that put tokens before every row, or add to the loss that the model computes.

    Args:
        wrapper: a ``PeftModel``.

    Raises:
        ValueError: naming the adapter.
    """
    active = getattr(wrapper, "active_adapters", None) or [getattr(wrapper, "active_adapter", "default")]
    for name, config in _configs(wrapper):
        if name not in active:
            continue
        kind = getattr(getattr(config, "peft_type", None), "value", type(config).__name__)
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"The adapter {name!r} ({kind}) puts virtual tokens before every row, and a pack is one row: "
                "only its first sequence would get them. Use LoRA, or feed this model padded rows."
            )
        if getattr(config, "orth_reg_weight", 0.0):
            raise ValueError(
                f"The adapter {name!r} ({kind}) adds a penalty to the loss that the model computes "
                f"(orth_reg_weight={config.orth_reg_weight}), which a loss without logits would leave out. "
                "Set orth_reg_weight=0.0, or use plain LoRA."
            )


def _configs(model: Any) -> list[tuple[str, Any]]:
    found = getattr(model, "peft_config", None)
    return list(found.items()) if isinstance(found, dict) else []
