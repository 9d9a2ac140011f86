"""A run's logged metrics -> a table and a picture."""

from lightning_thd.report.run import picture, read_metrics, show, table

__all__ = ["picture", "read_metrics", "show", "table"]
