"""Worker processes of loaders end if the process that reads from them was killed."""

from __future__ import annotations

import os
from multiprocessing import util


def end_with_parent(worker: int) -> None:
    """End a worker with an unread queue if its parent was killed; this is a ``worker_init_fn``.

    A process waits at its end until another has read all that it sent. torch's workers notice a killed
    parent, but would then wait for ever and keep all their memory.
    """
    # A queue's own finalizer, which waits, has the priority -5. Users' finalizers, above 0, run earlier.
    util.Finalize(None, _end_if_alone, args=(os.getppid(),), exitpriority=-1)


def _end_if_alone(parent: int) -> None:
    if os.getppid() != parent:
        os._exit(1)
