"""Attention kernels for whole packs: the forward and backward pass of each backend."""
