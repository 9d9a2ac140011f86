"""The name ``"thd"`` -> entries in transformers' attention and mask tables, made when it is imported."""

from __future__ import annotations

from types import ModuleType

from lightning_thd.models.import_hook import after_import

NAME = "thd"
_done: set[str] = set()


def register_thd() -> None:
    """Make ``attn_implementation="thd"`` known to transformers, without importing transformers.

    Safe to call any number of times; ``import lightning_thd`` calls it.
    """
    for name, callback in (
        ("transformers.modeling_utils", _register_attention),
        ("transformers.masking_utils", _register_mask),
    ):
        if name not in _done:
            _done.add(name)
            after_import(name, callback)


def _register_attention(modeling_utils: ModuleType) -> None:
    from lightning_thd.models.attend import thd_attention

    modeling_utils.AttentionInterface.register(NAME, thd_attention)


def _register_mask(masking_utils: ModuleType) -> None:
    from lightning_thd.models.masks import thd_mask

    masking_utils.AttentionMaskInterface.register(NAME, thd_mask)
