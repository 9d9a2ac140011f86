"""Kernels of the fused losses for GPUs: which heads they serve, and the kernels."""
