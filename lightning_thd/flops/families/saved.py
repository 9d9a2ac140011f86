"""The content of a config.json -> the config transformers makes of it, where the file alone does not say all.

Files of many families leave out which layer is of which kind (window, state space, experts): their classes
derive it from a period, a pattern or a list of indices. Read as it stands, every layer would be one kind.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lightning_thd._imports import available

_KINDS = ("layer_types", "layers_block_type")
_MIXED = (
    "gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text vaultgemma olmo3 olmo_hybrid cohere2 "
    "cohere2_moe exaone4 exaone_moe cwm granite_swa granitemoe_swa gpt_oss llama4_text dots1 mellum "
    "ministral qwen3_next qwen3_5_text qwen3_5_moe_text kimi_linear bamba granitemoehybrid jamba lfm2 "
    "lfm2_moe deepseek_v4 nemotron_h zamba2"
)
_SPARSE = ("mlp_layer_types", "first_k_dense_replace")
_MIXED_MLPS = "hy_v3 glm4_moe_lite axk1 glm_moe_dsa deepseek_v32 deepseek_v4 kimi_linear exaone_moe"


def completed(config: Any, known: Collection[str]) -> Any:
    """Return a config that says what kind every layer is.

    Args:
        config: a ``PretrainedConfig``, which does, or the content of a ``config.json``, which may not.
        known: model types whose text model is read off the top level.

    Returns:
        The config itself, or the one that transformers' class makes of it. ``{"model_type": "gemma2",
        "num_hidden_layers": 2, ...}`` gains ``layer_types`` of one window and one whole sequence.

    Raises:
        ValueError: where the kinds are left out and transformers cannot add them.
    """
    if not isinstance(config, Mapping):
        return config
    family = config.get("model_type")
    if family not in known:  # text, images or sound under one config: sub-configs leave out their defaults
        made = _made(config)
        return config if made is None else made
    missing = _missing(config)
    if not missing:
        return config
    made = _made(config)
    if made is None:
        raise ValueError(
            f"The config of model_type={family!r} has no {missing}, which says what kind each layer is, and "
            "transformers does not import here or does not know the family. Add it, or pip install "
            "'lightning_thd[hf]'."
        )
    return made


def _missing(config: Mapping[str, Any]) -> str:
    """Return the name under which a config should say the kinds of its layers and does not, else ''."""
    family = config.get("model_type")
    windowed = config.get("use_sliding_window") and config.get("max_window_layers") is not None
    if (family in _MIXED.split() or windowed) and not any(config.get(name) for name in _KINDS):
        return "layer_types"
    if family in _MIXED_MLPS.split() and all(config.get(name) is None for name in _SPARSE):
        return "mlp_layer_types"
    return ""


def _made(config: Mapping[str, Any]) -> Any:
    """Return the config of transformers' class, None where there is none."""
    if not available("transformers"):
        return None
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = config.get("model_type")
    if family not in CONFIG_MAPPING:
        return None
    try:
        return CONFIG_MAPPING[family].from_dict(_read_floats(dict(config)))
    except Exception as err:  # validation raises several kinds
        raise ValueError(
            f"transformers cannot read the config of model_type={family!r}: {err}. Pass the content of a "
            "config.json, or a config of its class."
        ) from err


def _read_floats(value: Any) -> Any:
    """Return JSON's content with transformers' form of infinity, ``{"__float__": "Infinity"}``, as floats."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _read_floats(held) for key, held in value.items()}
    return [_read_floats(held) for held in value] if isinstance(value, list) else value
