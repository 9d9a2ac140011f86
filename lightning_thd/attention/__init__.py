"""Attention on packed sequences: ``varlen_attention``, and the table of its kernels and their features."""

from lightning_thd.attention.entry import varlen_attention
from lightning_thd.attention.support import SUPPORT, support_table

__all__ = ["SUPPORT", "support_table", "varlen_attention"]
