"""Every notebook runs from top to bottom, and is committed without what it printed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples" / "notebooks").glob("*.ipynb"))
FAST = "see_a_pack.ipynb"


def marked(file: Path) -> object:
    return pytest.param(file, id=file.stem, marks=() if file.name == FAST else pytest.mark.slow)


def test_notebooks_hold_no_outputs() -> None:
    import nbformat

    assert [file.stem for file in NOTEBOOKS] == ["fine_tune", "measure_your_data", "see_a_pack"]
    for file in NOTEBOOKS:
        book = nbformat.read(file, as_version=4)
        nbformat.validate(book)
        code = [cell for cell in book.cells if cell.cell_type == "code"]
        assert not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.parametrize("file", [marked(file) for file in NOTEBOOKS])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning", "ignore::ResourceWarning")
def test_notebook_runs(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(file.parents[2]), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    book = nbformat.read(file, as_version=4)
    NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    pictures = [
        out for cell in book.cells for out in cell.get("outputs", []) if "image/png" in out.get("data", {})
    ]
    assert pictures
