"""Hooks of a training step, in their order -> how its time divides among the parts of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# In the order of a step. "other" is what is left: logging, callbacks, and loaders that time no wait.
PARTS = ("data_wait", "forward_backward", "optimizer", "checkpoint", "other")


class StepMarks:
    """Adds up the host's time between the hooks of training steps, without a device synchronisation.

    On a GPU the host runs ahead: what it waits for shows where it waits, at the latest in "other", where
    metrics are read. Exchanges between ranks run inside forward, backward and the optimizer, and count
    there. Time spent in validation is left out.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._since: float | None = None
        self._apart = 0.0  # of the time since the last mark, what other parts have had
        self._steps = 0
        self._waited: tuple[Any, float] | None = None

    def mark(self, part: str) -> None:
        """Add the host time since the last mark to a named part of the step."""
        now = self._clock()
        if self._since is not None:
            self._seconds[part] += now - self._since - self._apart
        self._since, self._apart = now, 0.0

    def waited(self, loader: Any) -> None:
        """Count a loader's wait for data since the last call, if it has a ``waited_s``."""
        total = getattr(loader, "waited_s", None)
        if total is None:
            return
        if self._since is not None and self._waited is not None and self._waited[0] is loader:
            took = total - self._waited[1]
            self._seconds["data_wait"] += took
            self._apart += took
        self._waited = (loader, total)

    def end_step(self) -> None:
        """Increment the number of steps."""
        self._steps += 1

    @contextmanager
    def apart(self, part: str | None) -> Iterator[None]:
        """Count the time inside this context for ``part`` (or for none) instead of the part around it."""
        began = self._clock()
        try:
            yield
        finally:
            took = self._clock() - began
            if part is not None and self._since is not None:
                self._seconds[part] += took
            self._apart += took

    def pause(self) -> None:
        """Leave the time until the next mark uncounted."""
        self._since = None

    def close(self) -> dict[str, float]:
        """Return the seconds of each part of a mean step since the last call, or {} without steps."""
        if not self._steps:
            return {}
        found = {f"train/step_time/{part}": seconds / self._steps for part, seconds in self._seconds.items()}
        self._seconds, self._steps = dict.fromkeys(PARTS, 0.0), 0
        return found
