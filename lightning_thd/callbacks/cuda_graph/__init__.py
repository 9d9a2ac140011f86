"""CUDA graphs for packed batches: a callback, the step behind it, and a lint that needs no GPU."""

from lightning_thd.callbacks.cuda_graph.buckets import Bucket, make_buckets
from lightning_thd.callbacks.cuda_graph.errors import CaptureError
from lightning_thd.callbacks.cuda_graph.graphed_step import GraphedStep, GraphStats

__all__ = ["Bucket", "CaptureError", "GraphStats", "GraphedStep", "make_buckets"]
