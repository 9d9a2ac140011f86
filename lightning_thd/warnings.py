"""The categories of this package's warnings, for filters: ``warnings.simplefilter("error", THDWarning)``."""

from __future__ import annotations

from lightning.pytorch.utilities.rank_zero import rank_zero_warn


class THDWarning(UserWarning):
    """Something that ``lightning_thd`` does otherwise than the user may expect."""


class SlowWarning(THDWarning):
    """The results are right, but take more time or memory than they need."""


class DataWarning(THDWarning):
    """Records, files or caches that are left out, read twice or built again."""


class MeasureWarning(THDWarning):
    """A number that the monitor leaves out or cannot count."""


class VersionWarning(THDWarning):
    """A package is newer than every release that the tests ran with."""


def warn(message: str, category: type[THDWarning]) -> None:
    """Warn on rank zero, at the line that calls this function."""
    rank_zero_warn(message, category=category, stacklevel=5)
