"""A transformers config or the content of a config.json -> its sizes, under the names of any family."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lightning_thd._imports import available


class Sizes:
    """Reads sizes from a config, trying the names that different families give to a size."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.model_type = str(self._raw("model_type") or type(config).__name__)

    def _raw(self, name: str) -> Any:
        if isinstance(self.config, Mapping):
            return self.config.get(name)
        return getattr(self.config, name, None)

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first value that is not None under ``names``, else ``default``."""
        for name in names:
            value = self._raw(name)
            if value is not None:
                return value
        return default

    def size(self, *names: str, default: int | None = None) -> int:
        """Return an integer that the config must have, unless there is a default."""
        value = self.get(*names, default=default)
        if not isinstance(value, int) or value < 0:
            raise ValueError(
                f"The config of model_type={self.model_type!r} has {names[0]}={value!r}. A size is wanted as "
                f"{' or '.join(names)}: set it, or call FlopsModel.register({self.model_type!r}, builder)."
            )
        return value

    def optional(self, *names: str) -> int:
        """Return an integer, 0 when the config has none."""
        return self.size(*names, default=0)

    def sub(self, *names: str) -> Sizes | None:
        """Return a nested config, None when there is none."""
        value = self.get(*names)
        return None if value is None else Sizes(value)

    @property
    def hidden(self) -> int:
        """Return the hidden size."""
        return self.size("hidden_size", "n_embd", "d_model", "dim")

    @property
    def token_width(self) -> int:
        """Return the width of the embedding and of the head's input."""
        return self.size("word_embed_proj_dim", default=self.hidden)

    @property
    def num_layers(self) -> int:
        """Return the number of decoder layers."""
        kinds = self.get("layers_block_type")  # a hybrid family may give only this
        count = len(kinds) if kinds else None
        return self.size("num_hidden_layers", "n_layer", "n_layers", default=count)

    @property
    def heads(self) -> int:
        """Return the number of query heads."""
        return self.size("num_attention_heads", "n_head", "n_heads")

    @property
    def kv_heads(self) -> int:
        """Return the number of key and value heads."""
        return self.size("num_key_value_heads", default=self.heads)

    @property
    def head_dim(self) -> int:
        """Return the size of a head."""
        return self.size("head_dim", default=self.hidden // self.heads)

    @property
    def inner(self) -> int:
        """Return the intermediate size of the dense MLP."""
        names = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "hidden_dim")
        return self.size(*names, default=4 * self.hidden)


_KINDS = ("layer_types", "layers_block_type")
# Families whose config class computes the kind of every layer if the file does not list the kinds.
_MIXED_LAYERS = (
    "gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text vaultgemma olmo3 olmo_hybrid cohere2 "
    "cohere2_moe exaone4 exaone_moe cwm granite_swa granitemoe_swa gpt_oss llama4_text dots1 mellum "
    "ministral qwen3_next qwen3_5_text qwen3_5_moe_text kimi_linear bamba granitemoehybrid jamba lfm2 "
    "lfm2_moe deepseek_v4 nemotron_h zamba2 modernbert"
)
_SPARSE_NAMES = ("mlp_layer_types", "first_k_dense_replace")
_MIXED_MLPS = "hy_v3 glm4_moe_lite axk1 glm_moe_dsa deepseek_v32 deepseek_v4 kimi_linear exaone_moe"


def completed(config: Any, known: Collection[str]) -> Any:
    """Return a config that lists each layer's kind; transformers' class completes one that does not."""
    if not isinstance(config, Mapping):
        return config
    family = config.get("model_type")
    missing = _missing(config)
    if family in known and not missing:
        return config

    complete = _transformers_config(config)
    if complete is None and family in known:
        raise ValueError(
            f"The config of model_type={family!r} has no {missing}, which gives the kind of each layer, and "
            "transformers does not import here or does not know the family. Add the key, or pip install "
            "'lightning_thd[hf]'."
        )
    if complete is None:
        return config
    return complete  # also has the defaults that multimodal config.json files omit


def _missing(config: Mapping[str, Any]) -> str:
    """Return the missing key that should list the kinds of a config's layers, or '' if none is missing."""
    family = config.get("model_type")
    # With both keys, Qwen's layers have a window from number max_window_layers on.
    some_windowed = config.get("use_sliding_window") and config.get("max_window_layers") is not None
    mixes_layers = family in _MIXED_LAYERS.split() or some_windowed
    if mixes_layers and not any(config.get(name) for name in _KINDS):
        return "layer_types"
    mixes_mlps = family in _MIXED_MLPS.split()
    if mixes_mlps and all(config.get(name) is None for name in _SPARSE_NAMES):
        return "mlp_layer_types"
    return ""


def _transformers_config(config: Mapping[str, Any]) -> Any:
    """Return the config as transformers' class reads it; None without transformers or such a class."""
    if not available("transformers"):
        return None
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = config.get("model_type")
    if family not in CONFIG_MAPPING:
        return None
    try:
        return CONFIG_MAPPING[family].from_dict(_read_floats(dict(config)))
    except Exception as err:  # validation raises several kinds of errors
        raise ValueError(
            f"transformers cannot read the config of model_type={family!r}: {err}. Pass the content of a "
            "config.json, or a config of its class."
        ) from err


def _read_floats(value: Any) -> Any:
    """Return JSON's content with transformers' form of infinity, ``{"__float__": "Infinity"}``, as floats."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _read_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_read_floats(item) for item in value]
    return value
