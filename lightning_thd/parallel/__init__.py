"""Which rank holds which tokens and weights, and the collectives between ranks."""

from lightning_thd.parallel.shard import shard_batch, shard_step

__all__ = ["shard_batch", "shard_step"]
