"""README.md and the address of the repository -> the page on the package index; setup.cfg holds all else.

The publish workflow sets ``LIGHTNING_THD_REPOSITORY`` to the address, and ``LIGHTNING_THD_REVISION`` to the
tag. Without them, links stay relative and the package names no address.
"""

import os
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
# ](docs/page.md#part), but not ](https://...), ](#part) or a mail address.
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<path>(?![a-z]+:|#)[^)\s]+)\)")

# src="docs/picture.png" or srcset=, in the tags of a picture that is light or dark as its reader is
PICTURE = re.compile(r'\b(?P<name>src|srcset)="(?P<path>(?![a-z]+:)[^"]+)"')


def with_addresses(markdown: str, repository: str, revision: str) -> str:
    """Make the relative links and pictures of a page absolute, at one revision of a repository."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({repository}/{kind}/{revision}/{link['path']})"

    def picture(tag: re.Match[str]) -> str:
        return f'{tag["name"]}="{repository}/raw/{revision}/{tag["path"]}"'

    return PICTURE.sub(picture, LINK.sub(absolute, markdown))


def addresses(repository: str, revision: str) -> dict[str, str]:
    """Return the addresses that the page on the index lists."""
    return {
        "Source": repository,
        "Documentation": f"{repository}/tree/{revision}/docs",
        "Changelog": f"{repository}/blob/{revision}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def page() -> dict[str, object]:
    """Return the arguments of ``setup`` that depend on the repository's address."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    repository = os.environ.get("LIGHTNING_THD_REPOSITORY", "").rstrip("/")
    if not repository:
        return {"long_description": readme}
    revision = os.environ.get("LIGHTNING_THD_REVISION") or "main"
    return {
        "long_description": with_addresses(readme, repository, revision),
        "project_urls": addresses(repository, revision),
    }


if __name__ == "__main__":
    setup(**page())
