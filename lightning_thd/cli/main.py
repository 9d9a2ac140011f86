"""The command ``lightning-thd``: LightningCLI's subcommands, and tools that need no Trainer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from lightning_thd._imports import require

_HELP = """usage: lightning-thd COMMAND [arguments]

Training, every constructor argument settable from the command line or from YAML (--config):
  fit         train a module on a data module
  validate    run the validation set
  test        run the test set
  predict     predict, a result for every sequence

Tools:
  report      print the table of a run and draw its picture
  flops       FLOPs of a model on given sequence lengths, part by part
  peaks       dense peaks of devices, which MFU is held against
  graph-plan  buckets for CUDA graphs, chosen from the data, and what they should bring
  pack        pack a data set once and write ready packs
  doctor      what is installed, which kernels run here, and versions known to be wrong

`lightning-thd COMMAND --help` tells more."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``lightning-thd``.

    Args:
        arguments: those after the program's name; the command line's when absent.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(_HELP)
    elif given[0] in _TOOLS:
        _TOOLS[given[0]](given[1:])
    elif given[0] in ("fit", "validate", "test", "predict"):
        sys.argv[1:] = given  # where LightningCLI looks
        _lightning(given[0])
    else:
        known = ["fit", "validate", "test", "predict", *_TOOLS]
        sys.exit(f"lightning-thd: no command {given[0]!r}. Commands: {', '.join(known)}.")


def _lightning(command: str) -> None:
    require("jsonargparse", feature=f"lightning-thd {command}")
    from lightning.pytorch.cli import LightningCLI

    from lightning_thd.data import THDDataModule
    from lightning_thd.module import CausalLMModule

    LightningCLI(
        CausalLMModule,
        THDDataModule,
        subclass_mode_model=True,
        save_config_kwargs={"overwrite": True},
    )


def _report(arguments: list[str]) -> None:
    import argparse

    from lightning_thd.report import show

    parser = argparse.ArgumentParser("lightning-thd report", description=_report.__doc__)
    parser.add_argument("folder", help="where CSVLogger wrote")
    show(parser.parse_args(arguments).folder)


def _flops(arguments: list[str]) -> None:
    from lightning_thd.cli.flops import main as flops

    flops(arguments)


def _peaks(arguments: list[str]) -> None:
    from lightning_thd.cli.peaks import main as peaks

    peaks(arguments)


def _pack(arguments: list[str]) -> None:
    from lightning_thd.data.pack import main as pack

    pack(arguments)


def _graph_plan(arguments: list[str]) -> None:
    from lightning_thd.cli.graph_plan import main as graph_plan

    graph_plan(arguments)


def _doctor(arguments: list[str]) -> None:
    from lightning_thd.cli.doctor import main as doctor

    doctor(arguments)


_TOOLS: dict[str, Callable[[list[str]], None]] = {
    "report": _report,
    "flops": _flops,
    "peaks": _peaks,
    "pack": _pack,
    "graph-plan": _graph_plan,
    "doctor": _doctor,
}
