"""The table of supported releases: every other place that names a release agrees with it."""

from __future__ import annotations

import configparser
import re
import runpy
import warnings
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from lightning_thd import __version__, _versions
from lightning_thd._versions import (
    SUPPORTED,
    TRL_WITH_LOGPROBS,
    WATCHED,
    Newer,
    installed_version,
    is_newer,
    is_older,
    newer_than_tested,
    numbers,
    releases_of,
)
from lightning_thd.warnings import THDWarning, VersionWarning
from tests import releases

ROOT = Path(__file__).parent.parent
# Built against torch and CUDA by whoever installs them: `make test-kernels` and GPU.md name their releases.
UNTESTED_HERE = {"transformer-engine", "flash-attn", "mamba-ssm", "causal-conv1d"}
# What runs the tests and builds the pages.
TOOLS = {
    *("ipykernel", "nbclient", "hypothesis", "import-linter", "mypy", "psutil", "pytest", "pytest-cov"),
    *("pytest-xdist", "ruff", "setuptools", "mike", "mkdocs", "mkdocs-material", "mkdocstrings"),
}


def setup_cfg() -> configparser.RawConfigParser:
    parsed = configparser.RawConfigParser()
    parsed.read(ROOT / "setup.cfg")
    return parsed


def requirements() -> list[Requirement]:
    """Every requirement of setup.cfg, in the base and in the extras."""
    parsed = setup_cfg()
    lines = [parsed["options"]["install_requires"], *parsed["options.extras_require"].values()]
    return [Requirement(x) for x in "\n".join(lines).splitlines() if x and not x.startswith("%")]


def pins(name: str) -> dict[str, str]:
    rows = re.findall(r"^([\w-]+)==(\S+)$", (ROOT / name).read_text(), re.M)
    return dict(rows)


def test_pages_name_the_releases_of_each_trainer_of_trl() -> None:
    """The table of TRL's trainers and the page of versions agree with the table of releases."""
    table = (ROOT / "docs" / "guides" / "hosts.md").read_text()
    [row] = re.findall(r"^\| releases of TRL \| (.*) \|$", table, re.M)
    of_pairs = f"{TRL_WITH_LOGPROBS} to {SUPPORTED['trl'].newest}; without Triton 1.16"
    assert row.split(" | ") == [releases_of("trl"), of_pairs] * 2
    assert f"DPO and GRPO {TRL_WITH_LOGPROBS}, " in (ROOT / "docs" / "reference" / "versions.md").read_text()


def test_setup_cfg_asks_for_the_oldest_tested_releases_and_caps_those_that_say_so() -> None:
    specifiers = {x.name: x.specifier for x in requirements() if x.name not in UNTESTED_HERE | TOOLS}
    assert specifiers.keys() | {"python"} == SUPPORTED.keys()
    for name, specifier in specifiers.items():
        oldest, newest, capped = SUPPORTED[name]
        expected = {f">={oldest}"}
        if capped:
            major, minor = numbers(newest)[:2]
            expected.add(f"<{major}.{minor + 1}")
        assert {str(x) for x in specifier} == expected, name
    assert setup_cfg()["options"]["python_requires"] == f">={SUPPORTED['python'].oldest}"


def test_classifiers_name_every_python() -> None:
    first, last = (numbers(x)[1] for x in SUPPORTED["python"][:2])
    expected = [f"3.{minor}" for minor in range(first, last + 1)]
    classifiers = setup_cfg()["metadata"]["classifiers"]
    assert re.findall(r"Python :: (3\.\d+)", classifiers) == expected


def test_the_oldest_constraints_are_the_lower_bounds() -> None:
    oldest = pins("constraints-oldest.txt")
    assert oldest.keys() | {"python"} == SUPPORTED.keys()
    for name, version in oldest.items():
        bound = SUPPORTED[name].oldest
        assert version == bound or re.fullmatch(re.escape(bound) + r"(\.0)+", version), name


def test_the_pins_of_ci_lie_within_the_table() -> None:
    pinned = pins("constraints.txt")
    assert pinned.keys() >= SUPPORTED.keys() - {"python"}
    for name in SUPPORTED.keys() - {"python"}:
        assert not is_older(pinned[name], SUPPORTED[name].oldest), name
        assert not is_newer(pinned[name], SUPPORTED[name].newest), name


def test_what_runs_these_tests_is_supported() -> None:
    for name in SUPPORTED:
        version = installed_version(name)
        assert version is None or not is_older(version, SUPPORTED[name].oldest), name


@pytest.mark.parametrize(
    ("version", "release", "older", "newer"),
    [
        ("5.18.4", "5.19", True, False),
        ("5.19.0", "5.19", False, False),
        ("2.14.1+cu130", "2.14", False, False),
        ("2.15.0a0+git", "2.14", False, True),
        ("2.6.5", "2.6.6", True, False),
        ("3.0", "2.60", False, True),
        ("5.25.0.dev0", "5.24", False, True),
        ("26.0.1", "26", False, False),
        ("unknown", "5.19", True, False),
    ],
)
def test_versions_compare_by_their_numbers(version: str, release: str, older: bool, newer: bool) -> None:
    assert (is_older(version, release), is_newer(version, release)) == (older, newer)
    if numbers(version):
        short = Version(".".join(map(str, numbers(version)[: len(numbers(release))])))
        assert (short < Version(release), short > Version(release)) == (older, newer)


def test_a_range_in_words() -> None:
    assert releases_of("transformers") == "{} to {}".format(*SUPPORTED["transformers"][:2])
    assert releases_of("lightning") == "2.6.6"


def test_newer_releases_are_named_once_with_the_newest_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "99.1.0", "trl": "1.0.0", "transformers": None}
    assert newer_than_tested(WATCHED, installed.get) == [Newer("torch", "99.1.0", SUPPORTED["torch"].newest)]
    monkeypatch.setattr(_versions, "newer_than_tested", lambda names: [Newer("torch", "99.1.0", "2.14")])
    _versions.warn_of_newer.cache_clear()
    try:
        with pytest.warns(VersionWarning, match=r"not tested with torch 99.1.0 \(tested up to 2.14\)"):
            _versions.warn_of_newer()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _versions.warn_of_newer()
    finally:
        _versions.warn_of_newer.cache_clear()


def test_every_warning_of_the_package_has_a_category_of_its_own() -> None:
    assert issubclass(VersionWarning, THDWarning)
    elsewhere = [
        f"{path.name}:{number}"
        for path in (ROOT / "lightning_thd").rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if path.name != "warnings.py"
        and (
            "rank_zero_warn" in line
            or ("warnings.warn(" in line and "Warning, " not in line)
            or "rank_zero_deprecation(" in line
        )
    ]
    assert elsewhere == []


def test_the_page_of_versions_has_the_rows_of_the_table() -> None:
    page = (ROOT / "docs" / "reference" / "versions.md").read_text()
    for name, (oldest, newest, capped) in SUPPORTED.items():
        assert f"| {name} | {oldest} | {newest} | {'refused by pip' if capped else 'may run'} |\n" in page
    assert page.count("refused by pip |") + page.count("may run |") == len(SUPPORTED)


def test_a_row_of_a_run_replaces_the_row_of_the_same_combination_and_tests() -> None:
    report: dict[str, object] = {
        "versions": {
            "python": "3.11.9",
            "torch": "2.14.1",
            "lightning": "2.6.6",
            "transformers": "5.24.0",
            "trl": None,
        },
        "passed": 7,
        "failed": 1,
        "skipped": 2,
        "seconds": 30,
    }
    empty = f"# Page\n\n{releases.HEAD}\n|---|\n\nThe end.\n"
    row = releases.row_of("newest", ["tests/models"], report)

    assert row.startswith("| newest | 3.11.9 | 2.14.1 | 2.6.6 | 5.24.0 | - | models | 7 | 1 | 2 | 30 | 20")
    page = releases.with_row(empty, row)
    assert page == empty.replace("|---|\n", f"|---|\n{row}\n")

    page = releases.with_row(page, releases.row_of("newest", [], report))
    page = releases.with_row(page, releases.row_of("newest", ["tests/models"], report | {"passed": 8}))
    assert [line.split(" | ")[6:8] for line in page.splitlines()[4:6]] == [
        ["models", "8"],
        ["all", "7"],
    ]


def test_the_newest_environment_asks_for_everything_without_upper_ends() -> None:
    newest = [Requirement(line) for line in releases.requirements()]
    assert {x.name for x in newest} >= SUPPORTED.keys() - {"python"}
    assert not any("<" in str(x.specifier) for x in newest)
    assert {x.name for x in newest}.isdisjoint(UNTESTED_HERE)


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_step_of_ci_is_a_make_target(path: Path) -> None:
    text = path.read_text()
    made = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    steps = re.findall(r"- run: (\S+) (\S+)", text)
    assert steps
    for command, target in steps:
        assert (command == "make" and target in made) or f"{command} {target}" == "gh release", target
    pythons = re.findall(r'"(3\.\d+)"', text)
    first, last = (numbers(x)[1] for x in SUPPORTED["python"][:2])
    assert {numbers(x)[1] for x in pythons} <= set(range(first, last + 1))
    if path.name == "ci.yml":
        assert re.findall(r"python: \[(.*)\]", text) == [
            ", ".join(f'"3.{x}"' for x in range(first, last + 1))
        ]


def test_the_text_of_a_release_is_its_section_of_the_changelog() -> None:
    made = runpy.run_path(str(ROOT / ".ci" / "release_notes.py"))["notes"]
    text = "# Changelog\n\n## [0.2.0] - unreleased\n\n- new\n"
    text += "\n## [0.1.0] - 2026-12-01\n\nThe first.\n\n- a line\n"
    assert made(text, "0.1.0") == "The first.\n\n- a line\n"
    with pytest.raises(SystemExit, match="has the date 'unreleased'"):
        made(text, "0.2.0")
    with pytest.raises(SystemExit, match=r"no section '## \[0.3.0\]"):
        made(text, "0.3.0")
    dated = (ROOT / "CHANGELOG.md").read_text().replace("] - unreleased", "] - 2026-12-01")
    assert len(made(dated, __version__).splitlines()) > 20


def test_the_citation_names_this_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("page", ["README.md", "docs/guides/install.md", "CONTRIBUTING.md"])
def test_releases_that_pages_name_are_those_of_the_table(page: str) -> None:
    text = (ROOT / page).read_text()
    for name, (oldest, newest, _) in SUPPORTED.items():
        for relation, release in re.findall(rf"(?i)\b{name}`? (>=|<=) ?(\d[\d.]*\d)", text):
            assert release == (oldest if relation == ">=" else newest), f"{page}: {name} {relation} {release}"
