"""CUDA graphs for packed batches: ``GraphedStep``, its shapes and costs, and a lint that needs no GPU."""

from lightning_thd.cuda_graph.buckets import Bucket, make_buckets
from lightning_thd.cuda_graph.errors import CaptureError
from lightning_thd.cuda_graph.graph_choice import GraphCosts
from lightning_thd.cuda_graph.graphed_step import GraphedStep, GraphStats
from lightning_thd.cuda_graph.lint import LintReport, lint_capture

__all__ = [
    "Bucket",
    "CaptureError",
    "GraphCosts",
    "GraphStats",
    "GraphedStep",
    "LintReport",
    "lint_capture",
    "make_buckets",
]
