"""Sources of a stream -> shards: numbered records that can be read from any row on."""

from lightning_thd.data.streams.shards.base import Bad, Mark, Shard, Shards
from lightning_thd.data.streams.shards.opening import is_stream, open_shards
from lightning_thd.data.streams.shards.own_split import refuse_split, traits

__all__ = ["Bad", "Mark", "Shard", "Shards", "is_stream", "open_shards", "refuse_split", "traits"]
