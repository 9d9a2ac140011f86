"""Attention on packed sequences: one call, the fastest kernel that means exactly that, and a table."""

from lightning_thd.attention.frontdoor import varlen_attention
from lightning_thd.attention.support import SUPPORT, support_table

__all__ = ["SUPPORT", "support_table", "varlen_attention"]
