"""Attention kernels for whole packs: the forward and backward of each backend, and the tiles of the CPU's."""
