"""The worker processes of loaders: their end if the process that reads was killed, and their seeds."""

from __future__ import annotations

import os
from multiprocessing import util

import torch


def begin_worker(worker: int) -> None:
    """Let a worker exit although its queue is unread, if its parent was killed (a ``worker_init_fn``).

    A worker of torch notices that its parent was killed, but would wait forever until its queue is read.
    """
    # Finalizers run in descending priority: users' (above 0), this one, then the queue's, which waits (-5).
    parent = os.getppid()
    util.Finalize(None, lambda: os.getppid() == parent or os._exit(1), exitpriority=-1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each; a fork loses a tokenizer's threads


def own_generator(number: int = 0) -> torch.Generator:
    """Return a generator from which a DataLoader draws the seed of its workers; ``number`` is of an epoch."""
    # With the global generator, first weights and dropout would depend on workers, validation and resuming.
    return torch.Generator().manual_seed((torch.initial_seed() + number) % 2**63)
