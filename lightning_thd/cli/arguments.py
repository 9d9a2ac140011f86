"""Command-line text -> checked numbers and writable paths, or an error of one line."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning_thd._checks import refuse_missing
from lightning_thd._imports import available, require

_HUB_S = 10.0  # seconds to wait for a hub to answer
PICTURES = (".png", ".svg", ".pdf", ".jpg", ".webp")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line; for an unknown option, the line names a similar option, if any."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._options: list[str] = []  # before --help is added
        super().__init__(*args, **kwargs)

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add an argument, and remember the names of an option."""
        action = super().add_argument(*args, **kwargs)
        self._options += action.option_strings
        return action

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Refuse unknown options, then parse the arguments."""
        args = sys.argv[1:] if args is None else list(args)

        # argparse names unknown options last, and would complain of a missing argument first.
        for text in args:
            name = text.partition("=")[0]
            if not text.startswith("--") or text == "--":
                continue
            if not any(option.startswith(name) for option in self._options):  # argparse takes abbreviations
                self.error(f"there is no option {name}{nearest(name, self._options)}")

        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def nearest(word: str, names: Iterable[str]) -> str:
    """Return "; did you mean X?" for the name that is most similar to a word, or "." if none is similar."""
    similar = difflib.get_close_matches(word, list(names), n=1, cutoff=0.6)
    return f"; did you mean {similar[0]}?" if similar else "."


def refuse_unreachable(name: str) -> None:
    """Raise ValueError for a missing path, or a name that is not cached while the hub does not answer."""
    advice = "Pass a config.json, a folder with one, or a model's name."
    refuse_missing(name, advice)
    if Path(name).exists() or not available("huggingface_hub"):
        return
    import huggingface_hub as hub

    if isinstance(hub.try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        hub.HfApi().model_info(name, timeout=_HUB_S)
    except hub.errors.HfHubHTTPError:  # the hub answers; transformers explains this error later
        return
    except Exception as err:  # releases of huggingface_hub use different HTTP clients
        raise ValueError(
            f"{name} is neither a folder nor a cached model, and the hub does not answer ({err}). {advice}"
        ) from err


def whole(least: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers of at least ``least``: ``whole(1)("8")`` is 8."""

    def whole_number(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number}; wanted at least {least}")
        return number

    return whole_number


def share(text: str) -> float:
    """Parse a number above 0 and at most 1."""
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text}; wanted a share, above 0 and at most 1")
    return number


def picture(text: str) -> Path:
    """Return the path of a picture to write, checked before the picture is computed."""
    path = Path(text)
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a picture; wanted one of {', '.join(PICTURES)}")
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: no file can be written there; is its folder there?")
    return path


# Arguments of THDDataModule that messages name, and that `plan` and `graph-plan` have as options.
_OPTIONS = ("capacity", "oversize", "share_prefixes", "text_key", "tokenizer", "processor", "max_patches")


def in_options(message: str) -> str:
    """Name options where a message names arguments: ``oversize='split'`` becomes ``--oversize split``."""

    def option(argument: re.Match[str]) -> str:
        name = argument[1].replace("_", "-")
        value = (argument[2] or "").strip("'\"")
        return f"--{name} {value}".rstrip()

    return re.sub(rf"(?<![\w.-])({'|'.join(_OPTIONS)})=('[^']*'|\"[^\"]*\"|-?\w+)?", option, message)


def load_config(path: str) -> Any:
    """Load a config from a ``config.json``, a folder with one, or a name that transformers resolves."""
    refuse_unreachable(path)
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    if not file.exists():
        auto = require("transformers", feature=f"--model {path}, which is not a file here,").AutoConfig
        return auto.from_pretrained(path)
    try:
        return json.loads(file.read_text())
    except ValueError as err:
        raise ValueError(f"{file} is not JSON ({err}). Pass a config.json, or a folder with one.") from err
