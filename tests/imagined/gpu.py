"""The imagined GPU of device.py and README.md as a module.

The code is compiled under a path inside of torch, so that errors of captures take it for torch's own.
"""

from pathlib import Path

import torch

exec(
    compile(
        Path(__file__).with_name("device.py").read_text(),
        str(Path(torch.__file__).parent / "imagined" / "device.py"),
        "exec",
    )
)
