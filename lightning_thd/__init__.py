"""Packed (THD, cu_seqlens) training for PyTorch Lightning, Accelerate and transformers."""

__version__ = "0.1.0"

__all__: list[str] = []
