"""Comments, docstrings, messages and pages are plain English: banned patterns do not come back."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
CODE = [path for folder in ("lightning_thd", "examples") for path in (ROOT / folder).rglob("*.py")]
# A pattern and a sentence that it must find, so that no pattern can rot. Each is a turn of phrase at which
# readers of this project went back; words that are only a matter of taste are left to reviewers.
PATTERNS = {
    # A comment begins with its subject, not with whose it is.
    r"^#\s*[Oo]f\b": "# of a microbatch: the even share of the work",
    # The thing that is told has a name.
    r"\bwhat\b[^.;:]{0,60}\btells?\b": "What its content tells about it.",
    # Two meanings: "so that", and "as ... as".
    r"\bso (\w+ ){0,2}as\b(?! (possible|if))": "Give extra work so evenly as water finds its level.",
    # Who says it? A warning, a message or a log has a name.
    r"\b(is|are|was) said\b": "It is said once, when it happens.",
    # "Your strategy".
    r"\bof (yours|ours|theirs|one's own)\b": "A strategy of yours takes the mixin.",
    # An object has to follow.
    r"\bmay lack\b[.,;]": "The input may lack.",
}


BANNED = re.compile("|".join(PATTERNS), re.I)


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments and texts of a module, or the lines of a page, with their line numbers."""
    source = path.read_text()
    if path.suffix == ".md":
        prose = re.sub(r"```.*?```|`[^`\n]*`", lambda code: "\n" * code[0].count("\n"), source, flags=re.S)
        yield from enumerate(prose.split("\n"), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, " ".join(node.value.split())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_finds_what_it_bans(pattern: str) -> None:
    assert re.search(pattern, PATTERNS[pattern], re.I)


@pytest.mark.parametrize("path", [*PAGES, *CODE], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_prose_is_plain(path: Path) -> None:
    matches = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]!r} in {text.strip()[:100]!r}"
        for line, text in prose_of(path)
        if (match := BANNED.search(text))
    ]
    assert matches == []
