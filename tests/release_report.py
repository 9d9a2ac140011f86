"""A pytest plugin: counts, versions and deprecations of a run -> the JSON file ``$THD_RELEASE_REPORT``."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from importlib import metadata
from pathlib import Path
from typing import Any

_BEGAN = time.monotonic()
_DEPRECATIONS: set[str] = set()


def pytest_warning_recorded(warning_message: Any) -> None:
    """Keep a deprecation: the file that raised it, below site-packages, and the first line of its message."""
    if issubclass(warning_message.category, DeprecationWarning | PendingDeprecationWarning | FutureWarning):
        raised_in = str(warning_message.filename).rpartition("site-packages/")[2]
        message = re.sub(r"\s+", " ", str(warning_message.message))[:200]
        _DEPRECATIONS.add(f"{raised_in}: {warning_message.category.__name__}: {message}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write the report; on a run with several workers, their parent process writes it."""
    kept = os.environ.get("THD_RELEASE_REPORT")
    if not kept or hasattr(terminalreporter.config, "workerinput"):
        return
    stats = terminalreporter.stats
    names = ("torch", "lightning", "transformers", "trl")
    report = {
        "passed": len(stats.get("passed", ())),
        "failed": len(stats.get("failed", ())) + len(stats.get("error", ())),
        "skipped": len(stats.get("skipped", ())),
        "seconds": round(time.monotonic() - _BEGAN),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in names}},
        "deprecations": sorted(_DEPRECATIONS),
    }
    Path(kept).write_text(json.dumps(report))
