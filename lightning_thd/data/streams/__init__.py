"""Shards or iterators, read by every rank -> balanced packs on every rank, each sequence once."""

from lightning_thd.data.streams.loader import StreamLoader
from lightning_thd.data.streams.making import StreamPolicies, stream_loader
from lightning_thd.data.streams.shards import is_stream
from lightning_thd.data.streams.stream import Stream, StreamMixture

__all__ = ["Stream", "StreamLoader", "StreamMixture", "StreamPolicies", "is_stream", "stream_loader"]
