"""A model -> whether the sequences of a pack see each other in it."""

from lightning_thd.models.probe.probe import check_packing
from lightning_thd.models.probe.report import PackingLeakError, PackingReport

__all__ = ["PackingLeakError", "PackingReport", "check_packing"]
