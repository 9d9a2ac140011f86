"""Hugging Face models on packs: ``attn_implementation="thd"``, state-space layers, the leak probe."""

from lightning_thd.models.pack import packed
from lightning_thd.models.register import register_thd

__all__ = ["packed", "register_thd"]
