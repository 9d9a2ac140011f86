"""An engine of a stream -> its steps, each made in a thread while earlier ones run."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable

from lightning_thd.data.streams.engine import Engine, Made

_AHEAD = 2  # steps that are made while one runs
_STOP_S = 30.0  # seconds that a process which ends waits for the steps other ranks wait for


class Weakly:
    """Calls a method of an object unless it is gone, and does not keep the object alive."""

    def __init__(self, method: Callable[[], None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self) -> None:
        """Call the method while its object lives."""
        method = self._method()
        if method is not None:
            method()


class Ahead:
    """Makes a stream's steps in a thread: always the steps taken and two more, equally many on every rank."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._allowed, self._number = _AHEAD, 0  # steps that may be made, and that were
        self._open, self._stopped = True, False  # a pass is open; nobody will take another step
        self._made: queue.SimpleQueue[Made | Exception | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._at_exit = Weakly(self.stop)

    def take(self) -> Made | None:
        """Return the next step, and allow the thread to make one more."""
        if self._error is not None:
            raise self._error
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="thd-stream", daemon=True)
            self._thread.start()
            # An interpreter that ends while the thread is inside a collective aborts.
            atexit.register(self._at_exit)
        if self._waits:  # for the next pass, whose workers start in this thread
            self._engine.open_pass()
            with self._changed:
                self._open = True
                self._changed.notify()
        made = self._wait()
        if isinstance(made, Exception):
            self._error = made
            raise made
        self._waits = made is None or made.last
        with self._changed:
            self._allowed += 1
            self._changed.notify()
        return made

    _waits = False

    def _wait(self) -> Made | Exception | None:
        while True:
            try:
                return self._made.get()
            except RuntimeError as err:  # torch interrupts this thread when a worker dies
                # The thread that reads will say which shards the worker had, on every rank.
                if "DataLoader worker" not in str(err):
                    raise

    def let_go(self) -> None:
        """End the thread once it has made the allowed steps, without waiting for it."""
        atexit.unregister(self._at_exit)
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def stop(self) -> None:
        """Wait until the thread has made the allowed steps, which other ranks take part in, and end it."""
        self.let_go()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or (self._open and self._number < self._allowed))
                if not self._open or self._number >= self._allowed:
                    return
            try:
                made = self._engine.make()
            except Exception as err:
                self._made.put(err)
                return
            with self._changed:
                self._number += 1
                self._open = made is not None and not made.last
            self._made.put(made)
