"""Run a script on a CUDA device, then print where a step's code waits for it.

``python -m tests.gpu.run [--json FILE] script.py ARGUMENTS``

torch warns of every read and blocking copy when it is asked to; each is kept with the innermost line of
lightning_thd or of the script. Steps before the third fill caches and are left out, and so is what follows
the last step.
"""

from __future__ import annotations

import argparse
import collections
import json
import runpy
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import lightning_thd

FIRST_STEP = 2
_PACKAGE = str(Path(lightning_thd.__file__).parent.parent)


class Waits:
    """Counts optimizer steps, and the waits of the steps after the first ones."""

    def __init__(self, script: str) -> None:
        self.steps = 0
        self._script = str(Path(script).resolve())
        self._rows: list[tuple[int, str]] = []

    def step(self, *_: Any) -> None:
        """Count a step; begin to look after the first ones."""
        self.steps += 1
        if self.steps == FIRST_STEP:
            torch.cuda.set_sync_debug_mode("warn")

    def seen(self, message: Any, *_: Any, **__: Any) -> None:
        """Keep a wait with the innermost line of ours, or of the script, and the innermost one at all."""
        if "synchronizing CUDA operation" not in str(message):
            return
        frames = [
            frame
            for frame in traceback.extract_stack()
            if frame.filename not in (__file__, warnings.__file__)
        ]
        of_script = [x for x in frames if x.filename.startswith(_PACKAGE) or x.filename == self._script]
        lines = [f"{Path(x.filename).name}:{x.lineno} {x.name}" for x in (*of_script[-1:], *frames[-1:])]
        package = "ours" if of_script and "/lightning_thd/" in of_script[-1].filename else "others"
        self._rows.append((self.steps, f"{package}: {' < '.join(dict.fromkeys(lines))}"))

    def found(self) -> dict[str, Any]:
        """Return the steps, and the waits a step by place."""
        counted = collections.Counter(row for step, row in self._rows if step < self.steps)
        steps = max(self.steps - FIRST_STEP, 1)
        return {"steps": self.steps, "waits": {row: n / steps for row, n in counted.most_common()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", help="write what was found into this file")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    sys.argv = [args.script, *args.arguments]
    sys.path.insert(0, str(Path(args.script).resolve().parent))
    waits = Waits(args.script)
    register_optimizer_step_post_hook(waits.step)
    warnings.simplefilter("always")
    warnings.showwarning = waits.seen
    warnings.simplefilter = warnings.filterwarnings = lambda *_, **__: None  # type: ignore[assignment]

    try:
        runpy.run_path(args.script, run_name="__main__")
    finally:
        torch.cuda.set_sync_debug_mode("default")
        report = waits.found()
        if args.json:
            Path(args.json).write_text(json.dumps(report))
        sys.stdout.write(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
