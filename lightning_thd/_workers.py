"""Worker processes of loaders: they end when the process that reads from them was killed."""

from __future__ import annotations

import os
from multiprocessing import util


def end_with_parent(worker: int) -> None:
    """Let a worker end, its queue unread, if its parent was killed; a ``worker_init_fn``.

    A process waits at its end until all it sent was read. torch's workers notice a killed parent, and would
    then wait for ever, with all their memory.
    """
    # A queue's own finalizer, which waits, has the priority -5. Those of users, above 0, ran before.
    util.Finalize(None, _end_if_alone, args=(os.getppid(),), exitpriority=-1)


def _end_if_alone(parent: int) -> None:
    if os.getppid() != parent:
        os._exit(1)
