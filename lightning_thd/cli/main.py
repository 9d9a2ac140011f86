"""The command ``lightning-thd``: LightningCLI's subcommands, and tools that need no Trainer."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_thd import __version__
from lightning_thd._imports import require
from lightning_thd.cli.arguments import Parser, in_options, nearest

# command -> (the module with its function, which is imported when the command runs; what the command does)
TOOLS = {
    "plan": ("data_plan", "estimate packs, balance and speed for a data set, or memory (--memory)"),
    "check": ("check", "check whether a model keeps the sequences of a pack apart"),
    "doctor": ("doctor", "list what is installed, which kernels run here, known-bad versions"),
    "report": ("main", "print a run's metrics as a table and draw report.png and report.html"),
    "peaks": ("peaks", "list the dense peaks of devices, from which MFU is computed"),
    "graph-plan": ("data_plan", "plan buckets for CUDA graphs and estimate the gain"),
}
TRAINING = {
    "fit": "train a module on a data module",
    "validate": "run the validation set",
    "test": "run the test set",
    "predict": "predict one result per sequence",
}
# Errors of these types are shown as one line, because they say what to change in the command or the config.
_REFUSALS = (ValueError, OSError, ImportError, MisconfigurationException)
# But an error that passed through code outside these packages and the standard library keeps its traceback.
_KNOWN = {"lightning_thd", "lightning", "jsonargparse", "transformers", "huggingface_hub"}
_ITERATE = {"torch", "tqdm"}  # They iterate our data, so this package's errors may pass through them.
_DEBUG = "JSONARGPARSE_DEBUG"  # environment variable; with "true", jsonargparse shows tracebacks


def _help() -> str:
    """Return the text of ``lightning-thd --help``."""
    tools = "\n".join(f"  {name:<10}  {what}" for name, (_, what) in TOOLS.items())
    training = "\n".join(f"  {name:<10}  {what}" for name, what in TRAINING.items())
    return (
        "usage: lightning-thd COMMAND [arguments]\n\n"
        "Training; every constructor argument is an option and a key of YAML (--config):\n"
        f"{training}\n\nTools:\n{tools}\n\n"
        "`lightning-thd COMMAND --help` explains a command; --version prints the release."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``lightning-thd``."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return
    if words == ["--version"]:
        print(f"lightning-thd {__version__}")
        return

    command = words[0]
    if command in TOOLS:
        _tool(command, words[1:])
    elif command in TRAINING:
        _train(words)
    else:
        commands = [*TRAINING, *TOOLS]
        # ``nearest`` ends a sentence. Here its words are a sentence of their own, or none.
        advice = nearest(command, commands).removeprefix("; ").capitalize().removeprefix(".")
        sentences = [f"no command {command!r}.", advice, f"Commands: {', '.join(commands)}."]
        sys.exit(f"lightning-thd: {' '.join(filter(None, sentences))}")


def _train(words: list[str]) -> None:
    """Run a subcommand of LightningCLI; show errors that say what to change as one line."""
    sys.argv[1:] = words  # LightningCLI reads sys.argv
    try:
        _lightning(words[0])
    except Exception as err:
        refusal = _refusal_in(err)
        if os.environ.get(_DEBUG) == "true" or refusal is None:
            raise
        _fail(words[0], refusal)


def _refusal_in(err: BaseException) -> BaseException | None:
    """Return the error to show as one line, ``err`` or its cause; None if the traceback is needed."""
    frames = traceback.walk_tb(err.__traceback__)
    packages = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in frames]
    if packages[-1] == "jsonargparse" and err.__cause__ is not None:  # it wraps a constructor's error
        return _refusal_in(err.__cause__)
    allowed = _KNOWN | sys.stdlib_module_names
    if packages[-1] == "lightning_thd":
        allowed |= _ITERATE
    return err if isinstance(err, _REFUSALS) and allowed.issuperset(packages) else None


def _fail(command: str, message: object) -> NoReturn:
    """Exit with status 2 and a message of one line."""
    text = " ".join(str(message).split())
    if command in TOOLS:  # training has YAML too, whose keys are the arguments
        text = in_options(text)
    sys.stderr.write(f"lightning-thd {command}: error: {text}\n")
    sys.exit(2)


def _tool(name: str, arguments: list[str]) -> None:
    """Run a command of ``TOOLS``."""
    module = importlib.import_module(f"lightning_thd.cli.{TOOLS[name][0]}")
    try:
        getattr(module, name.replace("-", "_"))(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` closed the pipe, so that Python's last flush would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except _REFUSALS as err:
        _fail(name, err)


def _lightning(command: str) -> None:
    """Run LightningCLI on the arguments of this process."""
    require("jsonargparse", feature=f"lightning-thd {command}")
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

    from lightning_thd.data import THDDataModule
    from lightning_thd.module import CausalLMModule

    parsers: list[LightningArgumentParser] = []

    def init_parser(self: LightningCLI, **kwargs: Any) -> LightningArgumentParser:
        parsers.append(LightningCLI.init_parser(self, **kwargs))
        _name_nearest(parsers)
        return parsers[-1]

    # The class keeps Lightning's name, because Lightning's messages show it.
    training: Any = type("LightningCLI", (LightningCLI,), {"init_parser": init_parser})
    training(CausalLMModule, THDDataModule, subclass_mode_model=True, save_config_kwargs={"overwrite": True})


_OPTION = re.compile(r"(?<![\w-])--?\w[\w.-]*")  # as a parser's help lists it


def _name_nearest(parsers: list[Any]) -> None:
    """Let the newest parser's error for an unknown option name the most similar option of all parsers."""
    error = parsers[-1].error

    def one_line(message: str, *args: Any, **kwargs: Any) -> Any:
        listed = [name for parser in parsers for name in _OPTION.findall(parser.format_help())]
        on_command_line = [
            text.partition("=")[0] for text in sys.argv[2:] if text.startswith(("--trainer.", "--data."))
        ]
        in_yaml = [f"--{name}" for name in re.findall(r"does not accept option '([\w.]+)'", message)]
        # Options with a second dot belong to a class, and no parser lists them.
        options = [option for option in (*on_command_line, *in_yaml) if option.count(".") == 1]
        unknown = [option for option in options if not any(name.startswith(option) for name in listed)]
        if unknown:
            message = f"there is no option {unknown[0]}{nearest(unknown[0], listed)}"
        if os.environ.get(_DEBUG) == "true":
            return error(message, *args, **kwargs)
        _fail(sys.argv[1], message)  # jsonargparse's error prints all options before the message.

    parsers[-1].error = one_line


def report(arguments: Sequence[str]) -> None:
    """Print a run's metrics as a table and draw its page."""
    from lightning_thd.report import read_metrics, show

    parser = Parser(
        "lightning-thd report",
        description="Print a run's metrics as a table, and draw report.png and report.html beside its logs.",
        epilog="example: lightning-thd report runs/quickstart",
    )
    parser.add_argument("folder", help="the folder of CSVLogger or TensorBoardLogger")
    themes = ("auto", "light", "dark")
    parser.add_argument("--theme", choices=themes, default="auto", help="colours (auto: the browser's)")
    parser.add_argument("--json", action="store_true", help="print every metric's steps and values")
    options = parser.parse_args(list(arguments))
    if options.json:
        sys.stdout.write(json.dumps(read_metrics(options.folder)) + "\n")
    else:
        show(options.folder, theme=options.theme)
