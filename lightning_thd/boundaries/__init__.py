"""Where the sequences of a pack begin: one object that batches, models, kernels and ranks share."""

from lightning_thd.boundaries.core import Boundaries
from lightning_thd.boundaries.kernel_call import KernelCall

__all__ = ["Boundaries", "KernelCall"]
