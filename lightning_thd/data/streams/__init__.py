"""Shards or iterators, each read by one rank -> balanced packs on every rank, with each sequence once."""

from lightning_thd.data.streams.stream import Stream

__all__ = ["Stream"]
