"""Combinations of releases -> the tests that ran with them, as rows of docs/reference/versions.md.

    python -m tests.releases requirements
    python -m tests.releases run newest --python .venv-newest/bin/python --deprecations runs/newest.txt
    python -m tests.releases run "TRL 1.7" --overlay .venv/trl-1.7.0 -- tests/integrations

``requirements`` prints what ``make test-newest`` installs: what setup.cfg names, without upper ends.
``run`` runs the tests with a Python, and keeps their counts in the page when ``--write`` is set. With
``--deprecations`` the deprecations that other packages raise are listed in a file instead of being errors.
"""

from __future__ import annotations

import argparse
import configparser
import json
import os
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "versions.md"
HEAD = (
    "| combination | Python | torch | lightning | transformers | TRL "
    "| tests | passed | failed | skipped | s | date |"
)
NAMES = ("python", "torch", "lightning", "transformers", "trl")
# Extras that need a compiler for CUDA, or only build the pages.
_LEFT_OUT = {"te", "flash", "ssm", "docs", "dev"}
_LISTED = ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")


def requirements() -> list[str]:
    """Return what the base and the extras of setup.cfg need for tests, without upper ends."""
    parsed = configparser.RawConfigParser()
    parsed.read(ROOT / "setup.cfg")
    extras = parsed["options.extras_require"]
    texts = [parsed["options"]["install_requires"], extras["dev"]]
    texts += [text for name, text in extras.items() if name not in _LEFT_OUT]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return [re.sub(r",<[\d.]+", "", line) for line in lines if line and not line.startswith("%")]


def run(arguments: argparse.Namespace, tests: list[str]) -> int:
    """Run the tests, print what other packages deprecate, and keep a row; return pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "report.json"
        paths = [str(ROOT), *(str(Path(overlay).resolve()) for overlay in arguments.overlay)]
        environment = {**os.environ, "PYTHONPATH": ":".join(paths), "THD_RELEASE_REPORT": str(kept)}
        command = [arguments.python, "-m", "pytest", "-q", "-p", "tests.release_report", *tests]
        if arguments.deprecations:
            command += [word for kind in _LISTED for word in ("-W", f"default::{kind}")]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        report = json.loads(kept.read_text())

    if arguments.deprecations:
        listed = Path(arguments.deprecations)
        listed.parent.mkdir(parents=True, exist_ok=True)
        listed.write_text("".join(f"{line}\n" for line in report["deprecations"]))
        print(f"{len(report['deprecations'])} deprecations of other packages are listed in {listed}.")

    if arguments.write:
        PAGE.write_text(with_row(PAGE.read_text(), row_of(arguments.name, tests, report)))
    return code


def row_of(name: str, tests: list[str], report: dict[str, object]) -> str:
    """Return a row of the page's table."""
    versions: dict[str, str | None] = report["versions"]  # type: ignore[assignment]
    today = datetime.now(UTC).date().isoformat()
    shown = [versions[package] or "-" for package in NAMES]
    paths = [word.removeprefix("tests/").removesuffix(".py") for word in tests if word.startswith("tests")]
    counts = [str(report[key]) for key in ("passed", "failed", "skipped", "seconds")]
    return f"| {' | '.join([name, *shown, ', '.join(paths) or 'all', *counts, today])} |"


def with_row(page: str, row: str) -> str:
    """Put a row below the table's head, or in the place of the row with the same combination and tests."""
    head, rule, *rows = page[page.index(HEAD) :].partition("\n\n")[0].splitlines()

    def key(line: str) -> tuple[str, str]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        return cells[0], cells[6]

    kept = [row if key(line) == key(row) else line for line in rows]
    if row not in kept:
        kept.append(row)
    return page.replace("\n".join([head, rule, *rows]), "\n".join([head, rule, *kept]))


def main(words: list[str]) -> int:
    """Print the requirements, or run the tests."""
    parser = argparse.ArgumentParser(prog="python -m tests.releases", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("requirements")
    runs = commands.add_parser("run")
    runs.add_argument("name", help="the combination, such as newest")
    runs.add_argument("--python", default=sys.executable)
    runs.add_argument("--overlay", action="append", default=[], help="a folder of packages before the others")
    runs.add_argument("--deprecations", help="list deprecations in this file; they are no errors then")
    runs.add_argument("--write", action="store_true", help="keep a row in docs/reference/versions.md")
    cut = words.index("--") if "--" in words else len(words)  # what follows belongs to pytest
    arguments = parser.parse_args(words[:cut])

    if arguments.command == "requirements":
        print(" ".join(requirements()))
        return 0

    return run(arguments, words[cut + 1 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
