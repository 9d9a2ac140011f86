"""The command ``lightning-thd``: LightningCLI's subcommands, and tools that need no Trainer."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from lightning_thd import __version__
from lightning_thd._imports import require

# command -> its module, imported when it runs, and what it does
TOOLS = {
    "plan": ("lightning_thd.cli.plan", "packs, balance and speed to expect of a data set"),
    "check": ("lightning_thd.cli.check", "whether a model keeps the sequences of a pack apart"),
    "doctor": (
        "lightning_thd.cli.doctor",
        "what is installed, which kernels run here, known-bad versions",
    ),
    "report": ("lightning_thd.cli.report", "print the table of a run and draw its page"),
    "flops": ("lightning_thd.cli.flops", "FLOPs of a model on given sequence lengths, part by part"),
    "peaks": ("lightning_thd.cli.peaks", "dense peaks of devices, which MFU is held against"),
    "graph-plan": ("lightning_thd.cli.graph_plan", "buckets for CUDA graphs, and what they should bring"),
    "completion": ("lightning_thd.cli.completion", "print what completes these commands in a shell"),
}
TRAINING = {
    "fit": "train a module on a data module",
    "validate": "run the validation set",
    "test": "run the test set",
    "predict": "predict, a result for every sequence",
}


def _help() -> str:
    tools = "\n".join(f"  {name:<10}  {what}" for name, (_, what) in TOOLS.items())
    training = "\n".join(f"  {name:<10}  {what}" for name, what in TRAINING.items())
    return (
        "usage: lightning-thd COMMAND [arguments]\n\n"
        "Training; every constructor argument is an option, or from YAML (--config):\n"
        f"{training}\n\nTools:\n{tools}\n\n"
        "`lightning-thd COMMAND --help` tells more; --version, which release this is."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``lightning-thd``.

    Args:
        arguments: those after the program's name; the command line's when absent.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(_help())
    elif given == ["--version"]:
        print(f"lightning-thd {__version__}")
    elif given[0] in TOOLS:
        _tool(given[0], given[1:])
    elif given[0] in TRAINING:
        sys.argv[1:] = given  # where LightningCLI looks
        _lightning(given[0])
    else:
        known = [*TRAINING, *TOOLS]
        sys.exit(f"lightning-thd: no command {given[0]!r}. Commands: {', '.join(known)}.")


def _tool(name: str, arguments: list[str]) -> None:
    try:
        importlib.import_module(TOOLS[name][0]).main(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough; Python would fail again when it flushes at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _lightning(command: str) -> None:
    try:
        require("jsonargparse", feature=f"lightning-thd {command}")
    except ModuleNotFoundError as err:
        sys.exit(f"lightning-thd: {err}")
    from lightning.pytorch.cli import LightningCLI

    from lightning_thd.data import THDDataModule
    from lightning_thd.module import CausalLMModule

    try:
        LightningCLI(
            CausalLMModule,
            THDDataModule,
            subclass_mode_model=True,
            save_config_kwargs={"overwrite": True},
        )
    except ValueError as err:
        if "empty parameter list" not in str(err):
            raise
        sys.exit(
            f"lightning-thd {command}: --optimizer is made before configure_model() has built the model, and "
            "would train nothing. CausalLMModule brings AdamW: --model.lr, --model.weight_decay, "
            "--model.betas. For another optimizer override configure_optimizers in a module of your own."
        )
