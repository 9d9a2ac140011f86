"""A model -> a check that no sequence of a pack sees another in it."""

from lightning_thd.models.probe.probe import check_packing
from lightning_thd.models.probe.report import PackingLeakError, PackingReport

__all__ = ["PackingLeakError", "PackingReport", "check_packing"]
