"""A version -> its section of CHANGELOG.md, which becomes the text of the release."""

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).parent.parent / "CHANGELOG.md"


def notes(changelog: str, version: str) -> str:
    """Return the section of a version, without its heading; raise if it is missing or has no date."""
    section = re.search(rf"^## \[{re.escape(version)}\] - (\S+)\n(.*?)(?=^## \[|\Z)", changelog, re.M | re.S)
    if section is None:
        raise SystemExit(f"CHANGELOG.md has no section '## [{version}] - <date>'.")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", section[1]):
        raise SystemExit(
            f"{version} has the date {section[1]!r} in CHANGELOG.md; wanted one such as 2026-12-01."
        )
    return section[2].strip() + "\n"


if __name__ == "__main__":
    print(notes(CHANGELOG.read_text(encoding="utf-8"), sys.argv[1].removeprefix("v")), end="")
