"""Worker processes of loaders: they exit if their parent was killed, and draw seeds of their own."""

from __future__ import annotations

import os
from multiprocessing import util

import torch


def begin_worker(worker: int) -> None:
    """Let a worker exit if its parent was killed (a ``worker_init_fn``).

    torch's worker notices that, but before it exits, it waits forever for a reader of its queue.
    """
    # Finalizers run in descending priority: users' (above 0), this one (-1), the queue's, which waits (-5).
    parent = os.getppid()
    util.Finalize(None, lambda: os.getppid() == parent or os._exit(1), exitpriority=-1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a tokenizer's threads do not survive a fork


def own_generator(number: int = 0) -> torch.Generator:
    """Return a generator for the seeds of a DataLoader's workers; ``number`` is the epoch's."""
    # A seed drawn from the global generator would change the weights and the dropout drawn after it.
    return torch.Generator(torch.get_default_device()).manual_seed((torch.initial_seed() + number) % 2**63)
