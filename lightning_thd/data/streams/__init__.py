"""Shards or iterators, each read by one rank -> balanced packs on every rank, with each sequence once."""

from lightning_thd.data.streams.shards import is_stream
from lightning_thd.data.streams.stream import Stream, Streams

__all__ = ["Stream", "Streams", "is_stream"]
