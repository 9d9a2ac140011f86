"""Attention on packed sequences."""

from lightning_thd.attention.frontdoor import varlen_attention

__all__ = ["varlen_attention"]
