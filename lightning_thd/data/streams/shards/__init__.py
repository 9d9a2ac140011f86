"""Sources of a stream -> shards: numbered records that can be read from any row on."""

from lightning_thd.data.read.records import Bad
from lightning_thd.data.streams.shards.base import Mark, Shard, Shards
from lightning_thd.data.streams.shards.opening import is_stream, open_shards, refuse_split, traits

__all__ = ["Bad", "Mark", "Shard", "Shards", "is_stream", "open_shards", "refuse_split", "traits"]
