"""The documentation does what it says: the code of every page runs, pages and pictures it names exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.test_readme import _names

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "```python" in page.read_text()]


def blocks(page: Path, *, ranks: bool) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    return [block for block in found if bool(re.search(r"devices=[2-9]", block)) == ranks]


def run_page(code: list[str], folder: str) -> int:
    """Run the blocks of a page one after the other, each with what a reader has by then."""
    import os

    os.chdir(folder)
    names = _names()
    for block in code:
        names.pop("trainer", None)
        exec(compile(block, "docs", "exec"), names)  # it is ours
        trainer = names.get("trainer")
        if trainer is not None and trainer.global_step == 0:
            trainer.fit(names["module"], names["THDDataModule"](names["dataset"][:60], capacity=64))
    return len(code)


def write_data(folder: Path) -> None:
    (folder / "texts.jsonl").write_text('{"text": "one document"}\n{"text": "and another"}\n')
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello there"}]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": talk}) + "\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    write_data(tmp_path)
    single, several = blocks(page, ranks=False), blocks(page, ranks=True)
    if single:
        assert run_ranks(run_page, 1, single, str(tmp_path), timeout_s=400.0) == [len(single)]
    for block in several:
        found = re.search(r"devices=(\d)", block)
        assert found is not None
        run_ranks(run_page, int(found[1]), [block], str(tmp_path), timeout_s=400.0)


def test_pages_name_what_exists() -> None:
    root, text = DOCS.parent, "\n".join(page.read_text() for page in DOCS.rglob("*.md"))
    paths = set(re.findall(r"`((?:examples|benchmarks|tests|lightning_thd)/[\w./-]+)`", text))
    assert paths
    assert [path for path in sorted(paths) if not (root / path).exists()] == []
    for page in DOCS.rglob("*.md"):
        for link in re.findall(r"\]\(([\w./-]+\.(?:md|png))\)", page.read_text()):
            assert (page.parent / link).resolve().exists(), (page, link)


def test_every_page_is_in_the_menu() -> None:
    menu = (DOCS.parent / "mkdocs.yml").read_text()
    missing = [page for page in DOCS.rglob("*.md") if page.relative_to(DOCS).as_posix() not in menu]
    assert missing == []


def _odd_entries(source: str) -> list[str]:
    """Lines at the depth of a section's entries that do not read "name: what it is"."""
    odd: list[str] = []
    depth: int | None = None
    for line in source.split("\n"):
        indent = len(line) - len(line.lstrip())
        if re.fullmatch(r"\s*(Args|Raises|Attributes):", line):
            depth = indent + 4
        elif depth is not None and (not line.strip() or indent < depth):
            depth = None
        elif indent == depth and not re.match(r"\s*[*\w.\[\], ]+(\s*\(.*\))?:( |$)", line):
            odd.append(line.strip())
    return odd


def test_sections_of_docstrings_are_read_by_the_documentations_parser() -> None:
    wrong = '"""\n    Raises:\n        ValueError: for this and\n        for that.\n'
    assert _odd_entries(wrong) == ["for that."]
    modules = sorted((DOCS.parent / "lightning_thd").rglob("*.py"))
    assert {m.name: odd for m in modules if (odd := _odd_entries(m.read_text()))} == {}
