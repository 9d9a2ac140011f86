"""``pytest -p tests.imagined.plugin``: the whole session has an imagined GPU.

``IMAGINED_CAPABILITY=8.0`` chooses another one.
"""

from __future__ import annotations

import os
from typing import Any

from tests.imagined.gpu import imagined_gpu

_CAPABILITY = tuple(int(part) for part in os.environ.get("IMAGINED_CAPABILITY", "9.0").split("."))
_GPU = imagined_gpu(capability=_CAPABILITY)
LOG = _GPU.__enter__()


def pytest_unconfigure(config: Any) -> None:
    _GPU.__exit__(None, None, None)
