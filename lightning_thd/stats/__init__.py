"""Lengths or offsets of a batch -> what it contains, in host integers that add up."""

from lightning_thd.stats.counts import Blocks, Chunk, IntArray, IntRows, Ints, Window, window_pairs
from lightning_thd.stats.seq_stats import SeqStats, combine

__all__ = ["Blocks", "Chunk", "IntArray", "IntRows", "Ints", "SeqStats", "Window", "combine", "window_pairs"]
