"""The commands' parsers -> a script that completes them in a shell."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from lightning_thd._imports import require

_SHELLS = ("bash", "zsh", "tcsh", "fish")


def make_parser() -> argparse.ArgumentParser:
    """Build the command's argument parser."""
    parser = argparse.ArgumentParser(
        "lightning-thd completion",
        description="Print a script that completes lightning-thd's commands and options.",
        epilog='example: eval "$(lightning-thd completion bash)"',
    )
    parser.add_argument("shell", choices=_SHELLS)
    return parser


def main(arguments: Sequence[str]) -> None:
    """Print the completion script of a shell."""
    given = make_parser().parse_args(list(arguments))
    try:
        shtab = require("shtab", feature="lightning-thd completion")
    except ModuleNotFoundError as err:
        sys.exit(f"lightning-thd: {err}")
    sys.stdout.write(shtab.complete(all_commands(), given.shell) + "\n")


def all_commands() -> argparse.ArgumentParser:
    """Build one parser of all commands; the training commands get no options, as LightningCLI makes them."""
    from lightning_thd.cli.main import TOOLS, TRAINING

    joined = argparse.ArgumentParser("lightning-thd")
    commands = joined.add_subparsers(dest="command")
    for name, (module, what) in TOOLS.items():
        one = importlib.import_module(module).make_parser()
        for action in one._actions:
            action.help = action.help or ""
        commands.add_parser(name, help=what, parents=[one], add_help=False, conflict_handler="resolve")
    for name, what in TRAINING.items():
        commands.add_parser(name, help=what)
    return joined
