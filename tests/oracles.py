"""Results of slow oracles, kept in files, so that a machine with a GPU need not compute them while it waits.

``KEPT_ORACLES=FOLDER`` keeps them there; without it nothing is read or written. A file belongs to an oracle's
name and inputs, and to the code of this repository and the release of transformers. After a change of any of
these, the oracle is computed again.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch import Tensor

FOLDER = "KEPT_ORACLES"
_ROOT = Path(__file__).parents[1]
T = TypeVar("T")


def kept(name: str, inputs: Mapping[str, Tensor], compute: Callable[[], T]) -> T:
    """Return what ``compute`` returned for these inputs before, or compute it and keep it.

    Args:
        name: says what is computed; settings that change the result belong into it.
        inputs: the tensors that it is computed from.
        compute: returns tensors and numbers in lists, tuples and dicts.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return compute()

    words = re.sub(r"\W+", "-", name).strip("-")[:60]
    path = Path(folder, f"{words}-{_digest(name, inputs)}.pt")
    if path.is_file():
        saved: Any = torch.load(path, weights_only=True)
        return saved  # type: ignore[no-any-return]

    value = compute()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{uuid4().hex}")
    torch.save(value, unfinished)
    os.replace(unfinished, path)
    return value


def _digest(name: str, inputs: Mapping[str, Tensor]) -> str:
    """Return a hash of a name, the content of tensors, and the code that computes with them."""
    content = hashlib.sha256(f"{name} {code()} {metadata.version('transformers')}".encode())
    for key, tensor in inputs.items():
        values = tensor.detach().cpu().contiguous()
        content.update(f"{key} {values.dtype} {list(values.shape)}".encode())
        content.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()[:16]


@cache
def code() -> str:
    """Return a hash of the package and the tests, in a few hundredths of a second."""
    content = hashlib.sha256()
    for folder in ("lightning_thd", "tests"):
        for file in sorted(_ROOT.joinpath(folder).rglob("*.py")):
            content.update(str(file.relative_to(_ROOT)).encode())
            content.update(file.read_bytes())
    return content.hexdigest()
