"""``lightning-thd report``: a run's folder -> its table, and a page with its curves."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from lightning_thd.report import read_metrics, show


def make_parser() -> argparse.ArgumentParser:
    """Build the command's argument parser."""
    parser = argparse.ArgumentParser(
        "lightning-thd report",
        description="Print the table of a run, and draw report.png and report.html beside its logs.",
        epilog="example: lightning-thd report runs/quickstart",
    )
    parser.add_argument("folder", help="where CSVLogger wrote")
    parser.add_argument("--theme", choices=("light", "dark"), default="light", help="colours of the page")
    parser.add_argument("--json", action="store_true", help="print every metric's steps and values")
    return parser


def main(arguments: Sequence[str]) -> None:
    """Print the table of a run and draw its page."""
    parser = make_parser()
    given = parser.parse_args(list(arguments))
    try:
        if given.json:
            sys.stdout.write(json.dumps(read_metrics(given.folder)) + "\n")
        else:
            show(given.folder, theme=given.theme)
    except ValueError as err:
        parser.error(str(err))
