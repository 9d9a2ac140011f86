"""A transformers config or its dict -> the sizes in it, whatever the family calls them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Sizes:
    """Reads sizes from a config under the first of several names that it has."""

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
        """Return an integer that the config must have.

        Raises:
            ValueError: naming the family and what it lacks.
        """
        value = self.get(*names, default=default)
        if not isinstance(value, int) or value < 0:
            raise ValueError(
                f"The config of model_type={self.model_type!r} has {names[0]}={value!r}. A size is wanted as "
                f"{' or '.join(names)}: set it, or FlopsModel.register({self.model_type!r}, builder)."
            )
        return value

    def optional(self, *names: str) -> int:
        """Return an integer, 0 when the config has none."""
        value = self.get(*names, default=0)
        return value if isinstance(value, int) else 0

    def sub(self, *names: str) -> Sizes | None:
        """Return a nested config, None when there is none."""
        value = self.get(*names)
        return None if value is None else Sizes(value)

    @property
    def hidden(self) -> int:
        """Return the hidden size."""
        return self.size("hidden_size", "n_embd", "d_model")

    @property
    def token_width(self) -> int:
        """Return the width of the embedding and of the head's input."""
        return self.size("word_embed_proj_dim", default=self.hidden)

    @property
    def num_layers(self) -> int:
        """Return the number of decoder layers."""
        named = self.get("layers_block_type")
        return self.size("num_hidden_layers", "n_layer", "n_layers", default=len(named) if named else None)

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
        names = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
        return self.size(*names, default=4 * self.hidden)
