"""Attention on packed sequences: ``varlen_attention``, and the table of its kernels and their features."""

from typing import TYPE_CHECKING

from lightning_thd._lazy import know_thd, lazy_face

if TYPE_CHECKING:
    from lightning_thd.attention.entry import varlen_attention
    from lightning_thd.attention.support import SUPPORT, support_table

__all__ = ["SUPPORT", "support_table", "varlen_attention"]

_PLACES = {
    "SUPPORT": "lightning_thd.attention.support",
    "support_table": "lightning_thd.attention.support",
    "varlen_attention": "lightning_thd.attention.entry",
}
if not TYPE_CHECKING:  # a type checker then still reports names that do not exist
    __getattr__, __dir__ = lazy_face(__name__, _PLACES, before=know_thd)
