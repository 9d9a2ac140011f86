"""Run a script on an imagined GPU, then print what the host read and uploaded in a step.

``python -m tests.imagined.run [-c 7.5] [--json FILE] script.py ARGUMENTS``
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import runpy
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from tests.imagined.gpu import imagined_gpu
from tests.imagined.nccl import imagined_nccl

NAMES = {
    "7.0": "Tesla V100-SXM2-32GB",
    "7.5": "Tesla T4",
    "8.0": "NVIDIA A100-SXM4-80GB",
    "9.0": "NVIDIA H100 80GB HBM3",
    "10.0": "NVIDIA B200",
}
FIRST_STEP = 2  # steps before it fill caches


def traffic(log: Any) -> dict[str, Any]:
    """Return reads, uploads and bytes of a step after the first ones, each with its caller."""
    steps = max(log.step - FIRST_STEP, 1)

    def of_a_step(rows: list[Any], at: list[int]) -> list[Any]:
        return [row for row, step in zip(rows, at, strict=True) if FIRST_STEP <= step < log.step]

    reads = of_a_step(log.reads, log.read_steps)
    uploads = of_a_step(log.uploads, log.upload_steps)
    kinds = [
        f"{name} {'pinned' if pinned else 'pageable'} {'non_blocking' if free else 'blocking'} {caller}"
        for name, _, pinned, free, caller in uploads
    ]
    named = [" ".join(map(str, read)) for read in reads]
    return {
        "steps": log.step,
        "reads": {row: n / steps for row, n in collections.Counter(named).most_common()},
        "uploads": {row: n / steps for row, n in collections.Counter(kinds).most_common()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-c", "--capability", default="9.0", choices=list(NAMES))
    parser.add_argument("--json", help="write reads and uploads into this file")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    sys.argv = [args.script, *args.arguments]
    sys.path.insert(0, str(Path(args.script).resolve().parent))
    import lightning_thd.flops.peaks as peaks

    peaks._GPU_SHAPES = peaks._CPU_SHAPES  # the shapes for a GPU would multiply for minutes
    failed = False
    capability = tuple(int(part) for part in args.capability.split("."))
    with imagined_gpu(capability=capability, name=NAMES[args.capability]) as log, imagined_nccl():
        try:
            runpy.run_path(args.script, run_name="__main__")
        except SystemExit as end:
            failed = end.code not in (0, None)
        except BaseException:
            traceback.print_exc()
            failed = True
    report = traffic(log)
    if args.json:
        Path(args.json).write_text(json.dumps(report))
    print(f"\nimagined {NAMES[args.capability]}: {'FAILED' if failed else 'ran'}, {log.step} steps")
    print(json.dumps({what: report[what] for what in ("reads", "uploads")}, indent=2))
    sys.exit(failed)


if __name__ == "__main__":
    main()
