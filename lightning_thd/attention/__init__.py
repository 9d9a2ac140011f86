"""Attention on packed sequences: ``varlen_attention``, its kernels, and the table of what each supports."""

from lightning_thd.attention.entry import varlen_attention
from lightning_thd.attention.support import SUPPORT, support_table

__all__ = ["SUPPORT", "support_table", "varlen_attention"]
