"""Shards or iterators, read by every rank -> balanced packs on every rank, each sequence once."""

from lightning_thd.data.streams.loader import StreamLoader
from lightning_thd.data.streams.shards import is_stream
from lightning_thd.data.streams.stream import Stream, StreamMixture, StreamPolicies, stream_loader

__all__ = ["Stream", "StreamLoader", "StreamMixture", "StreamPolicies", "is_stream", "stream_loader"]
