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
    util.Finalize(None, _exit_if_orphaned, args=(os.getppid(),), exitpriority=-1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a tokenizer's threads do not survive a fork


def _exit_if_orphaned(parent: int) -> None:
    """Exit at once if the process ``parent`` is gone, whose place as the parent another process then has."""
    if os.getppid() != parent:
        os._exit(1)


def own_generator(number: int = 0) -> torch.Generator:
    """Return a generator for the seeds of a DataLoader's workers; ``number`` is the epoch's."""
    # A seed drawn from the global generator would change the weights and the dropout drawn after it.
    return torch.Generator(torch.get_default_device()).manual_seed((torch.initial_seed() + number) % 2**63)
