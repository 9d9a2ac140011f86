"""Padded rollouts -> one pack, and values of its slots -> rows again (``PackedRollouts``)."""

from lightning_thd.loss.rollouts.packed import PackedRollouts

__all__ = ["PackedRollouts"]
