"""Samples -> one packed batch (``THDBatch``), or the microbatches of a step (``THDStep``)."""

from lightning_thd.batch.collate import IGNORE_INDEX, check_modalities
from lightning_thd.batch.thd_batch import THDBatch, THDStep

__all__ = ["IGNORE_INDEX", "THDBatch", "THDStep", "check_modalities"]
