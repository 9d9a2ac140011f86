"""Families that use a mask only to build their masks -> no read of the device for that.

Without a padding mask transformers looks for restarts in ``position_ids`` whenever it builds a mask, and
waits for the device to answer. With "thd" nobody needs that answer. So base models of these families get a
padding mask that shows all slots, and ``thd_mask`` leaves it out. Models with recurrent layers would read a
padding mask too. They get a finished mask, ``[1, 1, 1, T]``, which transformers hands on to attention, where
``thd_attention`` leaves it out. T slots in a pack.

Checked with transformers 5.19, 5.23 and 5.24. In other releases, and in other families, the read stays.
"""

from __future__ import annotations

from typing import Any, Final

from lightning_thd.models.families.releases import is_checked

MODEL_TYPES: Final = frozenset(
    {"cohere2", "deepseek_v3", "exaone4", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox"}
    | {
        "granite",
        "helium",
        "llama",
        "mistral",
        "mixtral",
        "nemotron",
        "olmo2",
        "olmoe",
        "phi3",
        "qwen2",
        "qwen2_moe",
    }
    | {"qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"}
)
HYBRID_TYPES: Final = frozenset(
    {
        "bamba",
        "falcon_h1",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm3",
        "minimax",
        "nemotron_h",
    }
    | {"olmo_hybrid", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "zamba2"}
)
PLAIN_MASKS: Final = "_thd_plain_masks"  # the attribute of such a base model: the dimensions of its mask


def adapt_layers(model: Any) -> None:
    """Note whether a model is the base model of such a family."""
    if model.base_model is not model or not is_checked():
        return
    model_type = getattr(model.config, "model_type", "")
    if model_type in MODEL_TYPES:
        model.__dict__[PLAIN_MASKS] = 2
    elif model_type in HYBRID_TYPES:
        model.__dict__[PLAIN_MASKS] = 4
