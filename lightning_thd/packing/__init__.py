"""Lengths -> packs, packs -> ranks, (epoch, step) -> plan: pure functions of integers."""

from lightning_thd.packing.bins import Packing, pack_lengths

__all__ = ["Packing", "pack_lengths"]
