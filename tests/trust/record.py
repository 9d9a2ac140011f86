"""A long run's findings -> a section of ``benchmarks/TRUST.md`` with date, machine, versions and command."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

FILE = Path(__file__).parents[2] / "benchmarks" / "TRUST.md"
HEAD = "# Trust\n\nLong runs, each by one command of the Makefile. Nothing here is typed by hand.\n"


def record(name: str, rows: Mapping[str, object], file: Path = FILE) -> str:
    """Replace the section of a run by what it found, and print it."""
    command = re.sub(r" --\S+ /\S+", "", " ".join(sys.orig_argv[1:]))  # places on this machine say nothing
    about = (
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} CPU cores, Python {platform.python_version()}, "
        f"torch {version('torch')}, lightning {version('lightning')}; `{command}`"
    )
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    section = f"## {name}\n\n{about}\n\n| what | found |\n|---|---|\n{table}\n"
    text = file.read_text() if file.exists() else HEAD
    kept = re.sub(rf"\n## {re.escape(name)}\n.*?(?=\n## |\Z)", "", text, flags=re.S).rstrip("\n")
    file.write_text(f"{kept}\n\n{section}")
    sys.stdout.write(section)
    return section
