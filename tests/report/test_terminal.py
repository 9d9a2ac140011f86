"""Tables are aligned text, wrapped to the width of the terminal."""

from __future__ import annotations

import pytest

from lightning_thd.report.terminal import Table, show_table

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
