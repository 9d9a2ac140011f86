"""Models built on the meta device -> the weights that a rank keeps, drawn by name or read from a folder."""

from lightning_thd.models.weights.drawn import draw_weights
from lightning_thd.models.weights.read import postponed_reading, read_weights, require_unchanged

__all__ = ["draw_weights", "postponed_reading", "read_weights", "require_unchanged"]
