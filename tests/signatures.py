"""Parameters of GPU packages' functions, read from their sources, that strict doubles here have to have.

Most of these packages install only beside a GPU. ``signatures.json`` says which release and file was read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("signatures.json")
Parameters = list[list[Any]]  # name, whether it has a default


def recorded(name: str) -> Parameters:
    """Give what the file says about a function."""
    functions: dict[str, dict[str, Any]] = json.loads(FILE.read_text())["functions"]
    listed: Parameters = functions[name]["parameters"]
    return listed
