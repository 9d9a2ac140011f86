"""The sdist and the wheel as a user gets them: whole, and importable where nothing else of ours is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
BUILD = "import setuptools.build_meta as b, sys; getattr(b, 'build_' + sys.argv[1])(sys.argv[2])"
IMPORTS = """
import lightning_thd, sys
names = [getattr(lightning_thd, name) for name in lightning_thd.__all__]
absent = [name for name in ("tests", "benchmarks", "examples") if name in sys.modules]
print(lightning_thd.__file__, lightning_thd.__version__, len(names), absent)
"""


# The README's first block, with fewer steps; the arguments are the Trainer's.
EXAMPLE = r"""
import pathlib, re, sys
import lightning as L

readme = pathlib.Path(sys.argv[1])
block = re.search(r"```python\n(.*?)```", readme.read_text(), re.S)[1]
trainer = L.Trainer
L.Trainer = lambda **given: trainer(**{**given, "max_steps": 2, "accelerator": "cpu", "logger": False})
names = {}
exec(block, names)
import lightning_thd
print(lightning_thd.__file__, names["trainer"].global_step)
"""


def run(*command: str, cwd: Path, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=clean | environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tracked(folder: str) -> set[str]:
    """Files under a folder that a user's clone holds."""
    names = run("git", "ls-files", folder, cwd=ROOT).splitlines()
    return {name for name in names if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the sdist from a copy of what git tracks, and the wheel from the sdist."""
    source = tmp_path_factory.mktemp("source")
    out = tmp_path_factory.mktemp("dist")
    for name in sorted(tracked(".")):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-c", BUILD, "sdist", str(out), cwd=source)
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(out, filter="data")
    (unpacked,) = (path for path in out.iterdir() if path.is_dir())
    run(sys.executable, "-c", BUILD, "wheel", str(out), cwd=unpacked)
    (wheel,) = out.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


@pytest.mark.slow
def test_the_sdist_holds_the_package_its_pages_and_examples(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("lightning_thd", "examples", "docs"):
        assert tracked(folder) - held == set()
    assert {"LICENSE", "CITATION.cff", "SECURITY.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md"} <= held
    assert not [name for name in held if name.endswith(".pyc") or name.startswith(("benchmarks", "tests"))]


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        needed = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==)", archive.read(metadata).decode(), re.M)
    assert held == tracked("lightning_thd")
    assert sorted(needed) == ["lightning", "numpy", "tensorboard", "torch", "torchmetrics"]
    assert built["wheel"].stat().st_size < 1_000_000


def described(path: Path, repository: str) -> str:
    """Return the metadata of a wheel that is built in the folder ``path``."""
    out = path / "out"
    where = {"LIGHTNING_THD_REPOSITORY": repository, "LIGHTNING_THD_REVISION": "v1.2.3"} if repository else {}
    made = "import setuptools.build_meta as b; b.prepare_metadata_for_build_wheel('out')"
    out.mkdir()
    run(sys.executable, "-c", made, cwd=path, **where)
    (metadata,) = out.glob("*.dist-info/METADATA")
    return metadata.read_text()


@pytest.mark.parametrize("repository", ["https://host.invalid/owner/name/", ""])
def test_links_of_the_page_are_absolute_where_the_address_is_known(repository: str, tmp_path: Path) -> None:
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "lightning_thd").mkdir()
    (tmp_path / "lightning_thd" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    metadata = described(tmp_path, repository)
    linked = re.findall(r"(!?)\[[^\]]*\]\(([^)#]+)[^)]*\)", metadata)

    assert len(linked) > 25
    for image, address in linked:
        if not repository:
            assert (ROOT / address).exists() or address.startswith("https://"), address
            continue
        start = f"https://host.invalid/owner/name/{'raw' if image else 'blob'}/v1.2.3/"
        assert address.startswith(("https://", start)), address
        if address.startswith("https://host.invalid"):
            assert (ROOT / address.removeprefix(start)).exists(), address

    start = "https://host.invalid/owner/name/raw/v1.2.3/" if repository else ""
    pictures = re.findall(r'src(?:set)?="([^"]+)"', metadata)
    assert len(pictures) >= 2  # a light one and a dark one
    for picture in pictures:
        assert picture.startswith(start), picture
        assert (ROOT / picture.removeprefix(start)).exists(), picture

    assert ("Project-URL: Issues, https://host.invalid/owner/name/issues" in metadata) == bool(repository)
    assert "Description-Content-Type: text/markdown" in metadata


@pytest.mark.slow
def test_the_readme_runs_outside_of_the_repository(tmp_path: Path) -> None:
    """The README's example, from an installed copy of the package, in a folder that holds nothing else."""
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target"]
    source = tmp_path / "source"

    for name in sorted(tracked("lightning_thd") | {"setup.py", "setup.cfg", "pyproject.toml", "README.md"}):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())

    target = tmp_path / "installed"
    away = tmp_path / "away"
    away.mkdir()
    run(sys.executable, *pip, str(target), str(source), cwd=away)
    said = run(
        sys.executable,
        "-c",
        EXAMPLE,
        str(ROOT / "README.md"),
        cwd=away,
        PYTHONPATH=str(target),
        OMP_NUM_THREADS="1",
    )
    file, steps = said.split()[-2:]

    assert file.startswith(str(target))
    assert steps == "2"


@pytest.mark.slow
def test_it_installs_into_an_empty_environment(built: dict[str, Path], tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    (packages,) = home.glob("lib/python*/site-packages")
    pip = ["-m", "pip", "--python", str(home / "bin" / "python"), "install", "--no-deps", "--no-index"]
    run(sys.executable, *pip, str(built["wheel"]), cwd=tmp_path)
    # what it depends on, and nothing of this checkout: .pth files there are not read
    shared = Path(torch.__file__).parents[1]
    output = run(str(home / "bin" / "python"), "-c", IMPORTS, cwd=tmp_path, PYTHONPATH=f"{packages}:{shared}")
    file, version, names, absent = output.split()

    assert file.startswith(str(packages))
    assert version in built["wheel"].name
    assert int(names) > 10
    assert absent == "[]"

    said = run(str(home / "bin" / "lightning-thd"), "--help", cwd=tmp_path, PYTHONPATH=f"{packages}:{shared}")
    assert "doctor" in said


# what an extra is for: a module it brings
BRINGS = {
    "hf": "transformers",
    "accelerate": "accelerate",
    "wandb": "wandb",
    "cli": "jsonargparse",
    "plots": "matplotlib",
    "remote": "fsspec",
    "fp8": "torchao",
    "ray": "ray",
    "docs": "mkdocs",
    "dev": "pytest",
}


@pytest.mark.slow
def test_extras_install_one_after_the_other(built: dict[str, Path], tmp_path: Path) -> None:
    # downloads what the extras name; torch comes first, by its exact version, as the README advises
    named = re.findall(r"^(\w+) ?=", (ROOT / "setup.cfg").read_text().split("extras_require]")[1], re.M)
    assert set(BRINGS) == set(named[: named.index("dev") + 1]) - {"te", "flash", "ssm"}  # those need a GPU
    home = tmp_path / "venv"
    venv.create(home, with_pip=True, symlinks=True)
    python = str(home / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    run(*pip, "torch", cwd=tmp_path)
    run(*pip, str(built["wheel"]), cwd=tmp_path)
    assert "absent" not in run(python, "-c", IMPORTS, cwd=tmp_path).split()
    for extra, module in BRINGS.items():
        run(*pip, f"{built['wheel']}[{extra}]", cwd=tmp_path)
        run(python, "-c", f"import lightning_thd, {module}", cwd=tmp_path)
        assert json.loads(run(str(home / "bin" / "lightning-thd"), "doctor", "--json", cwd=tmp_path))
