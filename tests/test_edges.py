"""The table of edges (tests/EDGES.md) names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("EDGES.md")
ROWS = [line for line in TABLE.read_text().splitlines() if re.match(r"\| (?!case )[^-]", line)]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_row_names_a_test() -> None:
    assert len(ROWS) > 30
    for row in ROWS:
        cells = row.strip("|").split(" | ")
        assert len(cells) >= 4, row
        assert NAMED.search(cells[3]), row


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED.findall(TABLE.read_text()))))
def test_a_named_test_exists(file: str, name: str) -> None:
    text = (TABLE.parent.parent / file).read_text()
    assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{file} has no {name}"
