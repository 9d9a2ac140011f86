"""Optimizer steps of packs through a pipeline of stages, under Lightning."""

from lightning_thd.strategies.pipeline.mixin import PipelineMixin

__all__ = ["PipelineMixin"]
