"""Tables: aligned text in a log, rich's on a terminal, 80 columns wide."""

from __future__ import annotations

import os
import pty
import re

import pytest

from lightning_thd.report.terminal import Table, show_table
from tests.scripts import run_python

TABLE = Table(
    columns=("device", "bf16", "source"),
    rows=[("H200", "989.5", "a datasheet"), ("A", "-", "[none]")],
    text=(0, 2),
    title="Peaks",
    foot="TFLOP/s",
)


def test_text_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(TABLE)
    assert capsys.readouterr().out.splitlines() == [
        "Peaks",
        "device   bf16  source",
        "H200    989.5  a datasheet",
        "A           -  [none]",
        "TFLOP/s",
    ]


def test_text_is_wrapped_to_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    row = ("a b", "word " * 9, "7")
    show_table(Table(columns=("what", "why", "n"), rows=[row], text=(0, 1), foot="foot " * 9))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "what  why                              n",
        "a b   word word word word word word    7",
        "      word word word",
    ]
    assert max(map(len, lines)) == 40
    narrow = Table(columns=("what", "n"), rows=[("a b", "1" * 50)])
    assert narrow.within(40) == str(narrow)  # there is nothing to wrap
    assert Table(columns=("n",), rows=[("1" * 50,)], text=()).within(40).endswith("1" * 50)


def test_rows_without_heads() -> None:
    assert str(Table(columns=("", ""), rows=[("a", "1"), ("bc", "22")])) == "a    1\nbc  22"


def test_a_terminal_of_80_columns_gets_a_drawn_table() -> None:
    ours, theirs = pty.openpty()
    there = f"import os\nos.dup2(os.open({os.ttyname(theirs)!r}, os.O_WRONLY | os.O_NOCTTY), 1)\n"
    there += "os.environ.update(COLUMNS='80', TERM='xterm')\n"
    run_python("-c", there + "from lightning_thd.cli import main\nmain(['peaks', 'NVIDIA H200'])")
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip("\r") for line in shown.split("\n")]
    assert any(line.startswith(("\u250f", "\u2503")) for line in lines)
    assert 60 < max(map(len, lines)) <= 80
