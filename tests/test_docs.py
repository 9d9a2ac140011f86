"""The documentation does what it says: the code of every page runs, pages and pictures it names exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.test_readme import _limit_steps

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "```python" in page.read_text()]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)


START = blocks(DOCS / "index.md")
# What the other pages go on from: Start's first block, and the one that names a module, a batch and files.
NAMES = [block for block in START if "trainer" not in block]


def devices(block: str) -> int:
    found = re.search(r"devices=(\d)", block)
    return int(found[1]) if found else 1


def run_page(code: list[str], folder: str) -> int:
    """Run the blocks of a page one after the other, each with what a reader of Start has by then."""
    import os

    from tests.data.chats import PLAIN, make_tokenizer

    os.chdir(folder)
    _limit_steps()
    names: dict[str, Any] = {"tokenizer": make_tokenizer(PLAIN)}
    for block in [*NAMES, *code]:
        names.pop("trainer", None)
        fewer = block.replace("Sequences(512)", "Sequences(32)")
        exec(compile(fewer, "docs", "exec"), names)  # it is ours
        trainer = names.get("trainer")
        if getattr(trainer, "global_step", None) == 0:
            trainer.fit(names["module"], names["THDDataModule"](names["dataset"][:60], capacity=512))
    return len(code)


def write_chats(folder: Path) -> None:
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello there"}]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": talk}) + "\n")


# These pages start several ranks or loggers, or compile; their features have unmarked tests of their own.
SLOW = {"hosts.md", "loggers.md", "clusters.md", "parallelism.md", "pipelines.md", "speed.md", "yaml.md"}
MARKED = [pytest.param(page, marks=pytest.mark.slow) if page.name in SLOW else page for page in PAGES]


@pytest.mark.parametrize("page", MARKED, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    write_chats(tmp_path)
    code = blocks(page)[1:] if page.name == "index.md" else blocks(page)
    for count in sorted(set(map(devices, code))):
        of_count = [block for block in code if devices(block) == count]
        ran = run_ranks(run_page, count, of_count, str(tmp_path), timeout_s=400.0)
        assert ran == [len(of_count)] * count


def test_code_fits_the_width_of_a_page() -> None:
    for page in DOCS.rglob("*.md"):
        for block in re.findall(r"^```.*?^```", page.read_text(), re.S | re.M):
            assert [line for line in block.split("\n") if len(line) > 88] == [], page


def test_pictures_come_in_both_themes() -> None:
    for page in DOCS.rglob("*.md"):
        pictures = re.findall(r"\]\(([\w./-]+\.png)#only-(light|dark)\)", page.read_text())
        assert len(pictures) == len(re.findall(r"!\[", page.read_text())), page
        assert all(
            (page.parent / name).exists() and name.endswith(f"-{theme}.png") for name, theme in pictures
        )
        assert 2 * sum(theme == "light" for _, theme in pictures) == len(pictures), page


def test_pages_name_what_exists() -> None:
    root, text = DOCS.parent, "\n".join(page.read_text() for page in DOCS.rglob("*.md"))
    paths = set(re.findall(r"`((?:examples|benchmarks|tests|lightning_thd)/[\w./-]+)`", text))
    assert paths
    assert [path for path in sorted(paths) if not (root / path).exists()] == []
    for page in DOCS.rglob("*.md"):
        for link in re.findall(r"\]\(([\w./-]+\.md)\)", page.read_text()):
            assert (page.parent / link).resolve().exists(), (page, link)


def test_every_example_is_in_the_gallery() -> None:
    gallery, root = (DOCS / "examples.md").read_text(), DOCS.parent
    files = [*(root / "examples").glob("*.py"), *(root / "examples" / "notebooks").glob("*.ipynb")]
    missing = [name for file in files if (name := file.relative_to(root).as_posix()) not in gallery]
    assert missing == []


def test_the_gallery_includes_the_code_that_it_names() -> None:
    gallery = (DOCS / "examples.md").read_text()
    folded = re.findall(r'^\?\?\? example "([^"]+)"\n    ```\w+\n(.*?)    ```$', gallery, re.M | re.S)
    assert len(folded) == gallery.count("???") > 0
    assert [file for file, code in folded if code != f'    --8<-- "{file}"\n'] == []


def test_benchmarks_open_with_ten_rows_and_fold_the_rest() -> None:
    import runpy

    hooks = runpy.run_path(str(DOCS / "hooks.py"))
    shown = hooks["folded"](hooks["RESULTS"].read_text())
    opening, _, rest = shown.partition("## All results")
    assert opening.count("\n| ") == 2 + len(hooks["HEADLINES"]) == 12
    _, _, rows, _ = hooks["_table"](hooks["RESULTS"].read_text())
    assert [row for row in rows if f"    {row}" not in rest] == []


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
