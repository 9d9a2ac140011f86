"""Which rank holds which tokens and weights, and the collectives between ranks."""

from typing import TYPE_CHECKING

from lightning_thd._lazy import know_thd, lazy_face

if TYPE_CHECKING:
    from lightning_thd.parallel.shard import shard_batch, shard_step

__all__ = ["shard_batch", "shard_step"]

_PLACES = {
    "shard_batch": "lightning_thd.parallel.shard",
    "shard_step": "lightning_thd.parallel.shard",
}
if not TYPE_CHECKING:  # a type checker then still reports names that do not exist
    __getattr__, __dir__ = lazy_face(__name__, _PLACES, before=know_thd)
