"""Every notebook runs from top to bottom, and is committed without what it printed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import run_python

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples" / "notebooks").glob("*.ipynb"))
FAST = "see_a_pack.ipynb"


def test_notebooks_hold_no_outputs() -> None:
    nbformat = pytest.importorskip("nbformat")
    assert [file.stem for file in NOTEBOOKS] == ["colab", "fine_tune", "measure_your_data", "see_a_pack"]
    for file in NOTEBOOKS:
        book = nbformat.read(file, as_version=4)
        nbformat.validate(book)
        code = [cell for cell in book.cells if cell.cell_type == "code"]
        assert not any(cell.outputs or cell.execution_count for cell in code)


def test_the_cells_of_one_run_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("IPython")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (file,) = (file for file in NOTEBOOKS if file.name == FAST)
    cells = [cell["source"] for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    lines = "".join("".join([*cell, "\n"]) for cell in cells).splitlines()
    shown = run_python("-c", "\n".join(line for line in lines if not line.startswith("%")), cwd=tmp_path)
    assert "Figure(" in shown
    assert "largest difference" in shown


def installed_wheel(folder: Path) -> Path:
    """Build a wheel of the checkout, and install it alone into a folder that the notebook imports from."""
    pip = [sys.executable, "-m", "pip", "--quiet"]
    root = Path(__file__).parent.parent
    copy = shutil.copytree(root / "lightning_thd", folder / "source" / "lightning_thd").parent
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(root / name, copy)
    made = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(copy)]
    subprocess.run(made, check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning", "ignore::ResourceWarning")
def test_notebook_runs(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    from nbclient import NotebookClient

    source = installed_wheel(tmp_path) if file.stem == "colab" else file.parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    book = nbformat.read(file, as_version=4)
    book.cells = [cell for cell in book.cells if "unverified" not in cell.metadata.get("tags", [])]
    NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    pictures = [
        out for cell in book.cells for out in cell.get("outputs", []) if "image/png" in out.get("data", {})
    ]
    assert pictures
