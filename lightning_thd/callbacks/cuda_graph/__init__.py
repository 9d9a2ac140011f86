"""CUDA graphs for packed batches: a callback, the step behind it, and a lint that needs no GPU."""

from lightning_thd.callbacks.cuda_graph.buckets import Bucket, make_buckets
from lightning_thd.callbacks.cuda_graph.callback import CUDAGraphCallback
from lightning_thd.callbacks.cuda_graph.costs import GraphCosts
from lightning_thd.callbacks.cuda_graph.errors import CaptureError
from lightning_thd.callbacks.cuda_graph.graphed_step import GraphedStep
from lightning_thd.callbacks.cuda_graph.lint import LintReport, lint_capture
from lightning_thd.callbacks.cuda_graph.stats import GraphStats

__all__ = [
    "Bucket",
    "CUDAGraphCallback",
    "CaptureError",
    "GraphCosts",
    "GraphStats",
    "GraphedStep",
    "LintReport",
    "lint_capture",
    "make_buckets",
]
