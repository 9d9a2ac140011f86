"""Runs, data and plans -> tables, pictures and pages."""

from lightning_thd.report.page import page, picture, read_metrics, show, table

__all__ = ["page", "picture", "read_metrics", "show", "table"]
