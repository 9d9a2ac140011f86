"""Samples -> one packed batch (``THDBatch``), or the microbatches of a step (``THDStep``)."""

from typing import TYPE_CHECKING

from lightning_thd._lazy import know_thd, lazy_face

if TYPE_CHECKING:
    from lightning_thd.batch.keys import IGNORE_INDEX, refuse_keys
    from lightning_thd.batch.thd_batch import THDBatch, THDStep

__all__ = ["IGNORE_INDEX", "THDBatch", "THDStep", "refuse_keys"]

_PLACES = {
    "IGNORE_INDEX": "lightning_thd.batch.keys",
    "THDBatch": "lightning_thd.batch.thd_batch",
    "THDStep": "lightning_thd.batch.thd_batch",
    "refuse_keys": "lightning_thd.batch.keys",
}
if not TYPE_CHECKING:  # a type checker then still reports names that do not exist
    __getattr__, __dir__ = lazy_face(__name__, _PLACES, before=know_thd)
