"""The documentation does what it says: the code of every page runs, pages and pictures it names exist."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import lightning_thd
from tests.ranks import environment_of, run_ranks
from tests.test_readme import _limit_steps

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "```python" in page.read_text()]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)


def setup_of(page: Path) -> list[str]:
    """Return the folded block of a page that makes its names, if it has one."""
    return re.findall(
        r"<summary>Setup for this page</summary>\n\n```python\n(.*?)```", page.read_text(), re.S
    )


def devices(block: str) -> int:
    return max(map(int, re.findall(r"devices=(\d)", block)), default=1)  # comments may name fewer


def run_page(code: list[str], folder: str, alone: bool) -> int:
    """Run the blocks of a page one after the other, with no names but their own.

    With ``alone``, the process leaves its group of one rank and torchrun's environment, as a reader has none.
    """
    import os

    from tests.strategies.jobs import missing_dispatch

    if alone:
        torch.distributed.destroy_process_group()
        for name in environment_of(0, 1):
            os.environ.pop(name, None)
    os.chdir(folder)
    _limit_steps()
    names: dict[str, Any] = {}
    for block in code:
        names.pop("trainer", None)
        fewer = block.replace("Sequences(512)", "Sequences(32)")
        program = compile(fewer, "docs", "exec")
        if "expert_parallel_size=" in block and missing_dispatch() is not None:
            with pytest.raises(ValueError, match="Install 5.23 or later"):  # as the page says
                exec(program, names)
            continue

        exec(program, names)  # it is ours
        trainer = names.get("trainer")
        if getattr(trainer, "global_step", None) == 0:
            trainer.fit(names["module"], names["THDDataModule"](names["dataset"][:60], capacity=512))
    if alone:  # the end of a rank needs a group
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return len(code)


# These pages start several ranks or loggers, or compile; their features have unmarked tests of their own.
SLOW = {"hosts.md", "loggers.md", "clusters.md", "parallelism.md", "pipelines.md", "speed.md", "yaml.md"}
# A Trainer of transformers wraps models in DDP if there is a group, and DDP cannot send weights of torchao.
ALONE = {"lora.md"}
MARKED = [pytest.param(page, marks=pytest.mark.slow) if page.name in SLOW else page for page in PAGES]


@pytest.mark.parametrize("page", MARKED, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_the_code_of_a_page_runs_by_itself(page: Path, tmp_path: Path) -> None:
    setup = setup_of(page)
    code = [block for block in blocks(page) if block not in setup_of(page)]
    for count in sorted(set(map(devices, code))):
        of_count = [*setup, *(block for block in code if devices(block) == count)]
        ran = run_ranks(run_page, count, of_count, str(tmp_path), page.name in ALONE, timeout_s=400.0)
        assert ran == [len(of_count)] * count


def test_pages_name_what_exists() -> None:
    root = DOCS.parent
    text = "\n".join(page.read_text() for page in DOCS.rglob("*.md"))
    paths = set(re.findall(r"`((?:examples|benchmarks|tests|lightning_thd)/[\w./-]+)`", text))
    paths |= set(re.findall(r"(?<![\w./-])(?:examples|benchmarks|tests)/[\w/]+\.py\b", text))  # of code too
    assert paths
    assert [path for path in sorted(paths) if not (root / path).exists()] == []
    for page in DOCS.rglob("*.md"):
        for link in re.findall(r"\]\(([\w./-]+\.md)\)", page.read_text()):
            assert (page.parent / link).resolve().exists(), (page, link)


def test_pages_select_tests_that_exist() -> None:
    text = "\n".join(page.read_text() for page in DOCS.rglob("*.md"))
    selected = re.findall(r"pytest .*?(tests/[\w/]+\.py) -k (\w+)", text)
    assert len(selected) >= 3
    names = " ".join(page.stem for page in PAGES)  # of tests that are made for each page
    for file, word in selected:
        assert word in (DOCS.parent / file).read_text() + names, (file, word)


def test_every_page_is_in_the_menu_and_every_example_in_the_gallery() -> None:
    root = DOCS.parent
    gallery = (DOCS / "examples.md").read_text()
    menu = (root / "mkdocs.yml").read_text()
    assert [page for page in DOCS.rglob("*.md") if page.relative_to(DOCS).as_posix() not in menu] == []
    files = [*(root / "examples").glob("*.py"), *(root / "examples" / "notebooks").glob("*.ipynb")]
    assert [name for file in files if (name := file.relative_to(root).as_posix()) not in gallery] == []


def documented() -> dict[str, Any]:
    """Every public function, class and method of the package that describes its arguments."""
    signatures: dict[str, Any] = {}
    for info in pkgutil.walk_packages(lightning_thd.__path__, "lightning_thd."):
        if info.name.endswith(("__main__", "loss.kernels.rows")):  # the second needs triton
            continue
        for value in vars(importlib.import_module(info.name)).values():
            if getattr(value, "__module__", None) != info.name or not callable(value):
                continue
            inner = vars(value).values() if inspect.isclass(value) else ()
            functions = [getattr(one, "__func__", one) for one in inner]
            for one in [value, *filter(inspect.isfunction, functions)]:
                if re.search(r"^\s*Args:\n", one.__doc__ or "", re.M):
                    signatures[f"{info.name}.{one.__qualname__}"] = one
    return signatures


def test_every_public_name_is_on_a_page_of_the_reference() -> None:
    pages = "\n".join(page.read_text() for page in (DOCS / "reference" / "api").glob("*.md"))
    pages += (DOCS / "reference" / "api.md").read_text()
    words = set(re.findall(r"\w+", pages))
    missing = []
    packages = [
        info.name for info in pkgutil.walk_packages(lightning_thd.__path__, "lightning_thd.") if info.ispkg
    ]
    packages.remove("lightning_thd.cli")  # a command

    for name in ["lightning_thd", *packages]:
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            # Some pages show a whole module, such as report.page.
            defined = str(getattr(getattr(module, public), "__module__", ""))
            whole = f"::: {defined}\n" in f"{pages}\n"
            if public not in words and not whole:
                missing.append(f"{name}.{public}")

    assert missing == [], f"make them public in docs/reference/api, or hide them: {missing}"


def test_documented_arguments_are_those_of_the_signature() -> None:
    objects = documented()
    assert len(objects) > 50
    for name, value in objects.items():
        section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", inspect.getdoc(value) or "", re.M)
        assert section
        listed = re.findall(r"^    \*{0,2}(\w+)(?: \(.*?\))?:", section[1], re.M)
        parameters = [one for one in inspect.signature(value).parameters if one not in ("self", "cls")]
        if value is lightning_thd.THDModelParallelStrategy:  # it refers to THDDDPStrategy for these
            parameters = [x for x in parameters if not x.startswith("context_") and "_context_" not in x]
            parameters.remove("broadcast_data")
        assert sorted(listed) == sorted(parameters), name


def load_hooks() -> ModuleType:
    """Import the hooks of the site, which are no part of a package."""
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    return hooks


def test_the_site_shows_the_files_that_pages_only_link() -> None:
    hooks = load_hooks()
    for file, name in hooks.SHOWN.items():
        page = SimpleNamespace(file=SimpleNamespace(src_uri=name))
        shown = hooks.on_page_markdown((DOCS / name).read_text(), page=page)
        title = (DOCS.parent / file).read_text().partition("\n")[0]
        if name != "benchmarks.md":  # a page of its own, with the table below
            assert shown.startswith(title), f"{name} does not show {file}"


def test_links_out_of_the_pages_lead_to_pages_of_the_site() -> None:
    hooks = load_hooks()
    text = "[a](../benchmarks/GPU.md#speed), [b](../setup.cfg), [c](guides/lora.md), [d](https://x/y.md)"
    assert hooks.within_site(text, "docs/index.md", "index.md") == (
        "[a](gpu.md#speed), b, [c](guides/lora.md), [d](https://x/y.md)"
    )
    text = "[a](../../benchmarks/GPU.md), [b](../concepts/mfu.md#x)"
    assert hooks.within_site(text, "docs/guides/lora.md", "guides/lora.md") == (
        "[a](../gpu.md), [b](../concepts/mfu.md#x)"
    )
    assert hooks.within_site("[t](benchmarks/TRUST.md)", "SECURITY.md", "security.md") == "[t](trust.md)"


def test_options_and_hyphenated_names_of_inline_code_stay_on_one_line() -> None:
    hooks = load_hooks()
    block = '<pre id="a"><span></span><code>make test-imagined</code></pre>'

    html = hooks.on_page_content(f"<p><code>plan --memory x</code>, a-b</p>{block}")

    assert html == f'<p><code>plan <span class="whole">--memory</span> x</code>, a-b</p>{block}'
    assert re.search(r"code \.whole \{\n +white-space: nowrap", (DOCS / "site.css").read_text())
