"""The package's source and its dependencies -> what is loaded by pickle and why, and every licence.

``python -m tests.trust.security`` writes its table into ``benchmarks/TRUST.md``.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

from tests.trust.record import record

ROOT = Path(__file__).parents[2]
# Every place that turns bytes into objects, and why it is safe.
LOADS = {
    "data/streams/ranks.py pickle.loads": "a sample of this job's own reader, from rank to rank",
    "data/store/cache.py np.load": "allow_pickle=False",
    "data/store/tokens.py np.load": "allow_pickle=False",
    "integrations/hf_data.py torch.load": "weights_only=True",
    "strategies/checkpoints.py torch.load": "weights_only as Lightning's Trainer asks",
}
_LOADERS = {"load", "loads", "Unpickler", "unsafe_load", "full_load"}
_MODULES = {"pickle", "np", "numpy", "torch", "yaml", "joblib", "dill", "marshal"}


def loads(root: Path = ROOT / "lightning_thd") -> dict[str, list[int]]:
    """List the calls that turn bytes into objects: file and function -> lines."""
    places: dict[str, list[int]] = {}
    for file in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)) if (
                    module in _MODULES and name in _LOADERS
                ):
                    key = f"{file.relative_to(root)} {module}.{name}"
                    places.setdefault(key, []).append(node.lineno)
                case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                    places.setdefault(f"{file.relative_to(root)} {name}", []).append(node.lineno)
    return places


def dependencies() -> list[str]:
    """List the packages that setup.cfg names, base and extras, without ours."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = [config["options"]["install_requires"], *config["options.extras_require"].values()]
    names = {re.split(r"[\s<>=!~;\[]", line.strip())[0] for block in lines for line in block.splitlines()}
    return sorted(name for name in names if name and not name.startswith(("lightning-thd", "#")))


def licence(name: str) -> str | None:
    """Read a package's licence from what it installed; None where it is not there."""
    try:
        about = metadata(name)
    except PackageNotFoundError:
        return None
    classifiers = [
        c.rpartition(" :: ")[2] for c in about.get_all("Classifier") or [] if c.startswith("License")
    ]
    stated = (
        about.get("License-Expression")
        or ", ".join(classifiers)
        or (about.get("License") or "").split("\n")[0]
    )
    return f"{about['Version']}: {stated[:60] or 'not stated'}"


def audit(program: Path | None) -> str:
    """Scan what CI installs by pip-audit, which has packages of its own and so a place of its own."""
    if program is None:
        return "not scanned: pass --pip-audit, as `make security` does"
    pinned = ["-r", str(ROOT / "constraints.txt"), "--no-deps", "--disable-pip"]
    command = [str(program), *pinned, "--format=json", "--progress-spinner=off"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except ValueError:  # it printed an error in place of its report
        return f"not scanned: {done.stderr.strip().splitlines()[-1][:120]}"
    return audited(packages)


def audited(packages: list[dict[str, Any]]) -> str:
    """Say what pip-audit reported: a package that it has no data on is not scanned, whatever it prints."""
    scanned = [package for package in packages if "skip_reason" not in package]
    if not scanned:
        return f"not scanned: pip-audit reached no data on any of {len(packages)} packages"

    known = sorted({f"{package['name']} {bug['id']}" for package in scanned for bug in package["vulns"]})
    skipped = len(packages) - len(scanned)
    unknown = f", {skipped} unknown to its data" if skipped else ""
    return f"{', '.join(known) or 'none'} in {len(scanned)} packages{unknown}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pip-audit", type=Path, help="the program")
    options = parser.parse_args()
    unknown = sorted(set(loads()) - set(LOADS))
    rows = {f"`{place}`": LOADS.get(place, "NOT REVIEWED") for place in loads()}
    licences = {f"licence of {name}": licence(name) or "not installed here" for name in dependencies()}
    record(
        "security", rows | {"known vulnerabilities of what CI installs": audit(options.pip_audit)} | licences
    )
    sys.exit(bool(unknown))


if __name__ == "__main__":
    main()
