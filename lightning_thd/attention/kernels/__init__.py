"""Kernels for whole packs: raw forward and backward of each backend, and what runs them on a CPU."""
