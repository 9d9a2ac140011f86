"""The one table of releases that this package supports -> refusals, a warning, ``doctor``, pages and tests.

``tests/test_versions.py`` compares setup.cfg, the constraints, the docs and CI with this table.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from types import MappingProxyType
from typing import Final, NamedTuple

from lightning_thd.warnings import VersionWarning, warn


class Supported(NamedTuple):
    """The releases of one package: numbers that begin a version, such as ``2.14`` of ``2.14.1``."""

    oldest: str  # the lowest release that the tests run with, which setup.cfg asks for
    newest: str  # the newest release that the tests ran with
    capped: bool = False  # whether setup.cfg refuses newer ones, whose internals we enter


SUPPORTED: Final[Mapping[str, Supported]] = MappingProxyType(
    {
        "python": Supported("3.11", "3.13"),
        "torch": Supported("2.11", "2.14", capped=True),
        "lightning": Supported("2.6.6", "2.6", capped=True),
        "torchmetrics": Supported("1.5", "1.9"),
        "numpy": Supported("1.26", "2.4"),
        "tensorboard": Supported("2.17", "2.21"),
        "transformers": Supported("5.19", "5.24", capped=True),
        "accelerate": Supported("1.10", "1.15"),
        "trl": Supported("1.0", "1.16"),
        "peft": Supported("0.15", "0.21"),
        "datasets": Supported("4.7", "5.2"),
        "pyarrow": Supported("21", "26"),
        "torchao": Supported("0.17", "0.18"),
        "ray": Supported("2.40", "2.60"),
        "wandb": Supported("0.20", "0.31"),
        "jsonargparse": Supported("4.51", "4.53"),
        "matplotlib": Supported("3.8", "3.11"),
        "fsspec": Supported("2024.6", "2026.9"),
        "zstandard": Supported("0.22", "0.25"),
    }
)
# The release since which TRL's DPO and GRPO trainers ask the model for log-probabilities, which packs give.
TRL_WITH_LOGPROBS: Final = "1.15"
# Packages whose newer releases ``warn_of_newer`` names: our code depends on how they work inside.
WATCHED: Final = ("python", "torch", "lightning", "transformers", "accelerate", "trl")


class Newer(NamedTuple):
    """An installed package that is newer than the newest tested release."""

    name: str
    installed: str
    newest: str  # the newest tested


def installed_version(name: str) -> str | None:
    """Return the version of Python or of a distribution; None if it is not installed."""
    if name == "python":
        return platform.python_version()
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # or a source tree on the path
        return None


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``2.14.0a0+cu130`` becomes ``(2, 14, 0)``."""
    leading: list[int] = []
    for part in version.split("."):
        suffix = part.lstrip("0123456789")
        digits = part.removesuffix(suffix)
        if digits:
            leading.append(int(digits))
        if suffix:  # a pre-release or a build: what follows is no number of the release
            break
    return tuple(leading)


def is_older(version: str, release: str) -> bool:
    """Return whether a version comes before a release: ``5.18.2`` comes before ``5.19``."""
    limit = numbers(release)
    return numbers(version)[: len(limit)] < limit


def is_newer(version: str, release: str) -> bool:
    """Return whether a version comes after all of a release: ``2.15.0`` after ``2.14``, not ``2.14.1``."""
    limit = numbers(release)
    return numbers(version)[: len(limit)] > limit


def newer_than_tested(
    names: tuple[str, ...] = tuple(SUPPORTED),
    version_of: Callable[[str], str | None] = installed_version,
) -> list[Newer]:
    """Return the installed packages among ``names`` that are newer than the newest tested release."""
    newer = []
    for name in names:
        version = version_of(name)
        newest = SUPPORTED[name].newest
        if version is not None and is_newer(version, newest):
            newer.append(Newer(name, version, newest))
    return newer


def releases_of(name: str) -> str:
    """Return the supported releases of a package in words: ``5.19 to 5.24``."""
    oldest, newest, _ = SUPPORTED[name]
    last = numbers(newest)
    if numbers(oldest)[: len(last)] == last:  # such as 2.6.6, of which 2.6 is the newest release
        return oldest
    return f"{oldest} to {newest}"


@cache
def warn_of_newer() -> None:
    """Warn once in a process of packages that are newer than the newest tested release."""
    newer = newer_than_tested(WATCHED)
    if newer:
        listed = ", ".join(f"{name} {version} (tested up to {newest})" for name, version, newest in newer)
        warn(
            f"lightning_thd was not tested with {listed}. What depends on a name that is gone refuses by "
            "name; other changes may go unseen. Run check_packing(model) once, install a tested release, or "
            "a newer lightning_thd. `lightning-thd doctor` lists the tested releases.",
            VersionWarning,
        )
