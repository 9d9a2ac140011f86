"""Settings of a plan and a position -> a checkpoint's state, and back, refusing other data or settings."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from lightning_thd._checks import instance


class Resumable(ABC):
    """A planner that goes on from a checkpoint's state, as all its plans follow from its settings."""

    settings: dict[str, Any]

    @abstractmethod
    def num_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch."""

    def fingerprint(self) -> str:
        """Return a hash of the lengths and of all settings of a plan except dp."""
        return fingerprint(self.settings)

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the state a checkpoint needs to continue with ``step(epoch, step)``."""
        return make_state(self.settings, epoch=epoch, step=step, num_steps=self.num_steps(epoch))

    def resume(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Return the epoch and next step of a state, or refuse one of other data: see :func:`read_state`."""
        return read_state(self.settings, state)


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Hash settings that JSON can write, independent of their order: 32 hexadecimal digits."""
    text = json.dumps(settings, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def make_state(settings: Mapping[str, Any], *, epoch: int, step: int, num_steps: int) -> dict[str, Any]:
    """Return the state (epoch, next step, settings) to resume training from, the same on every rank."""
    whole = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in (epoch, step))
    if not whole or epoch < 0 or not 0 <= step <= num_steps:
        raise ValueError(
            f"epoch={epoch}, step={step} is no position in epochs of {num_steps} steps; both count from 0. "
            "Pass the epoch and the number of steps consumed in it."
        )
    return {
        "epoch": int(epoch),
        "step": int(step),
        "seed": settings["seed"],
        "fingerprint": fingerprint(settings),
        "settings": dict(settings),
    }


def read_state(settings: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[int, int]:
    """Check that a state was made with these settings and return its epoch and next step.

    Raises:
        ValueError: when it is no state, or the data or a setting changed since; each change is named.
    """
    instance(state, "state", Mapping, advice="Pass what PackPlanner.state() returned.")
    missing = {"epoch", "step", "fingerprint"} - set(state)
    if missing:
        raise ValueError(
            f"The state has no {', '.join(sorted(missing))}; it holds "
            f"{', '.join(sorted(state)) or 'nothing'}. Pass what PackPlanner.state() returned."
        )
    if state["fingerprint"] != fingerprint(settings):
        raise ValueError(
            f"The state was saved with other data or settings ({_changes(settings, state)}), so its steps "
            "would hold other sequences. Restore the old ones, or start without the state."
        )
    return int(state["epoch"]), int(state["step"])


def _changes(settings: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    saved = state.get("settings", {})
    names = [name for name, value in settings.items() if saved.get(name) != value]
    found = [f"{name} was {saved.get(name)!r}, is {settings[name]!r}" for name in names]
    return "; ".join(found) or f"fingerprint was {state['fingerprint']}, is {fingerprint(settings)}"
