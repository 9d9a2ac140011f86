"""The package's source and a coverage file -> the error messages that no test has met.

``make coverage`` runs the tests and then ``python -m tests.trust.messages``, which writes its table into
``benchmarks/TRUST.md``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.trust.record import record

PACKAGE = Path(__file__).parents[2] / "lightning_thd"
# What cannot be met where the tests run: hardware, or packages no test machine has.
HARDWARE = ("cuda", "gpu", "device capability", "nccl", "flash", "transformer_engine", "transformer engine")


@dataclass(frozen=True, slots=True)
class Message:
    """One ``raise`` with words of its own: where it stands and the beginning of what it says."""

    file: Path
    first: int
    last: int
    text: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(PACKAGE.parent)}:{self.first} {self.text}"

    @property
    def needs_hardware(self) -> bool:
        words = f"{self.file.name} {self.text}".lower()
        return any(word in words for word in HARDWARE)


def messages(root: Path = PACKAGE) -> Iterator[Message]:
    """List every ``raise X(...)`` of the package."""
    for file in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                words = [
                    part.value
                    for argument in node.exc.args
                    for part in ast.walk(argument)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                ]
                yield Message(file, node.lineno, node.end_lineno or node.lineno, "".join(words)[:90])


def unmet(lines_run: dict[str, set[int]], root: Path = PACKAGE) -> tuple[int, list[Message]]:
    """Count the messages and list those whose ``raise`` never ran.

    Args:
        lines_run: of every file, by its absolute path, the lines that ran.
        root: the package.
    """
    found = list(messages(root))
    missing = [
        message
        for message in found
        if lines_run.get(str(message.file), set()).isdisjoint(range(message.first, message.last + 1))
    ]
    return len(found), missing


def main() -> None:
    import coverage

    measured = coverage.Coverage(config_file="setup.cfg")
    measured.load()
    data = measured.get_data()
    run = {file: set(data.lines(file) or ()) for file in data.measured_files()}
    count, missing = unmet(run)
    statements = covered = 0
    for file in sorted(PACKAGE.rglob("*.py")):
        _, lines, _, absent, _ = measured.analysis2(str(file))
        statements, covered = statements + len(lines), covered + len(lines) - len(absent)
    here = [message for message in missing if not message.needs_hardware]
    sys.stdout.write("\n".join([*map(str, here), ""]))
    share = 100 * covered / statements
    record(
        "coverage",
        {
            "lines met by tests, on ranks and in subprocesses too (goal 92 %)": f"{share:.1f} %",
            "error messages": count,
            "met by a test": count - len(missing),
            "not met: need a GPU or its packages": len(missing) - len(here),
            "not met": len(here),
        },
    )


if __name__ == "__main__":
    main()
