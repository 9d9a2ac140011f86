"""Shards or iterators, read by every rank -> balanced packs on every rank, each sequence once."""

from lightning_thd.data.streams.shards import is_stream
from lightning_thd.data.streams.stream import Stream, StreamMixture

__all__ = ["Stream", "StreamMixture", "is_stream"]
