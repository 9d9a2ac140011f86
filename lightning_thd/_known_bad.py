"""Installed packages and the GPU -> the combinations that are known to fail or to compute wrong numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from lightning_thd._versions import installed_version


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownBad:
    """One combination of installed versions and device that is known to fail, and how to avoid it."""

    feature: str  # the import name of the package that fails, or "graphs"
    versions: Mapping[str, str] = field(default_factory=dict)  # ranges by distribution; all must match
    without: str = ""  # a distribution that fixes the problem if it is installed
    capability: int | None = None  # the CUDA compute capability (major) with the problem; None is any
    problem: str
    instead: str


TABLE: tuple[KnownBad, ...] = (
    KnownBad(
        feature="fla",
        versions={"fla-core": ">=0", "triton": ">=3.4,<3.7.1"},
        without="tilelang",
        capability=9,
        problem="fla refuses its gated backward, which computes wrong numbers here (fla's issue 640)",
        instead="install triton>=3.7.1 or tilelang",
    ),
    KnownBad(
        feature="graphs",
        versions={"torch": ">=2.12,<2.14"},
        problem="a capture that fails at its end keeps the memory of its pool reserved (pytorch pull 190348)",
        instead="train without CUDAGraphCallback if it says that graphs are off and memory is short",
    ),
)


def known_problems(
    feature: str | None = None,
    *,
    capability: int | None = None,
    version_of: Callable[[str], str | None] = installed_version,
) -> list[KnownBad]:
    """Return the entries of ``TABLE`` that apply to this machine, for one feature or for all."""
    entries = [entry for entry in TABLE if feature in (None, entry.feature)]
    return [entry for entry in entries if _applies(entry, capability, version_of)]


def _applies(entry: KnownBad, capability: int | None, version_of: Callable[[str], str | None]) -> bool:
    """Return whether a machine has an entry's device and packages, and lacks what fixes the problem."""
    if entry.capability not in (None, capability):
        return False
    if entry.without and version_of(entry.without) is not None:
        return False
    return all(_within(version_of(name), versions) for name, versions in entry.versions.items())


def _within(version: str | None, versions: str) -> bool:
    """Return whether a version is in a range; pre-releases and local builds count as the release."""
    return version is not None and Version(Version(version).base_version) in SpecifierSet(versions)
