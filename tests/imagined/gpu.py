"""The imagined GPU of device.py and README.md as a module.

The code is compiled under a path inside of torch, so that errors of captures take it for torch's own. A torch
that knows real GPUs would end the process at a second set of hooks, so tests are skipped there.
"""

import unittest
from pathlib import Path

import torch

from tests.imagined.support import why_not

if (_REASON := why_not()) is not None:
    raise unittest.SkipTest(_REASON)

exec(
    compile(
        Path(__file__).with_name("device.py").read_text(),
        str(Path(torch.__file__).parent / "imagined" / "device.py"),
        "exec",
    )
)
