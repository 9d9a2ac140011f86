"""Parameters of GPU packages' functions, read from their sources, that strict doubles here have to have.

Most of these packages install only beside a GPU. ``signatures.json`` says which release and file was read.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("signatures.json")
Parameters = list[list[Any]]  # name, whether it has a default


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """List the parameters of a double in the same form."""
    found = inspect.signature(function).parameters.values()
    return [[p.name, p.default is not inspect.Parameter.empty] for p in found if p.name != "self"]


def recorded(name: str) -> Parameters:
    """Give what the file says about a function."""
    functions: dict[str, dict[str, Any]] = json.loads(FILE.read_text())["functions"]
    listed: Parameters = functions[name]["parameters"]
    return listed
