"""Worker processes of loaders end if the process that reads from them was killed."""

from __future__ import annotations

import os
from multiprocessing import util


def end_with_parent(worker: int) -> None:
    """Let a worker exit although its queue is unread, if its parent was killed (a ``worker_init_fn``).

    A process that exits waits until its queues have been read. A worker of torch notices that its parent was
    killed, but would then wait forever and keep its memory.
    """
    # Finalizers run in descending priority: users' (above 0), this one, then the queue's, which waits (-5).
    util.Finalize(None, _end_if_orphaned, args=(os.getppid(),), exitpriority=-1)


def _end_if_orphaned(parent: int) -> None:
    if os.getppid() != parent:
        os._exit(1)
