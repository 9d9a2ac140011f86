"""Tables are aligned text."""

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
