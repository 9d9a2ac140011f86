"""Hugging Face models on packs: ``attn_implementation="thd"``, state-space layers, the leak probe."""

from lightning_thd.models.families import register_family
from lightning_thd.models.pack import packed
from lightning_thd.models.preparing import prepare
from lightning_thd.models.probe import check_packing
from lightning_thd.models.probe_report import PackingLeakError, PackingReport
from lightning_thd.models.register import register_thd

__all__ = [
    "PackingLeakError",
    "PackingReport",
    "check_packing",
    "packed",
    "prepare",
    "register_family",
    "register_thd",
]

# Whoever takes a loss, a strategy, data or an integration from the package imports this module.
register_thd()
