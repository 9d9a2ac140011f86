"""A dataset and worker processes -> its items; a worker that dies is noticed within seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset

_LOOK_S = 5.0  # seconds between two looks at whether the workers live, as torch's own without a time-out


def from_workers(
    dataset: Dataset[Any], *, workers: int, timeout_s: float, sampler: Iterable[int] | None = None
) -> Iterator[Any]:
    """Read items in worker processes, which start in the calling thread and at once.

    A DataLoader with a time-out looks at its workers when that is over and not before.

    Args:
        dataset: gives the items; each is handed out as it is.
        workers: number of processes, at least 1.
        timeout_s: seconds without an item after which living workers are given up.
        sampler: which items, of a dataset that is indexed.

    Raises:
        RuntimeError: from the iterator, when a worker died or none gave an item in time.
    """
    look = min(_LOOK_S, timeout_s)
    loader = DataLoader(dataset, batch_size=None, sampler=sampler, num_workers=workers, timeout=look)
    return _patiently(iter(loader), timeout_s)


def _patiently(items: Iterator[Any], timeout_s: float) -> Iterator[Any]:
    while True:
        asked = time.monotonic()
        while True:
            try:
                item = next(items)
                break
            except StopIteration:
                return
            except RuntimeError as err:
                if not str(err).startswith("DataLoader timed out"):
                    raise
                if time.monotonic() - asked >= timeout_s:
                    raise RuntimeError(f"it gave nothing for timeout_s={timeout_s:g} seconds.") from err
        yield item
