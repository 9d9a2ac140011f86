"""Samples -> one packed batch (``THDBatch``), or the microbatches of a step (``THDStep``)."""

from lightning_thd.batch.keys import IGNORE_INDEX, refuse_keys
from lightning_thd.batch.thd_batch import THDBatch, THDStep

__all__ = ["IGNORE_INDEX", "THDBatch", "THDStep", "refuse_keys"]
