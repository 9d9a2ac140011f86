"""Public functions of report, for ``tests.fuzz``."""

from __future__ import annotations

import contextlib
import io
import random
import tempfile
from pathlib import Path
from typing import Any

from lightning_thd.report import page, picture, read_metrics, show, table
from tests.fuzz import Entry

_KEPT = tempfile.TemporaryDirectory()  # goes with the process
HERE = Path(_KEPT.name)
SERIES = {"train/loss": [(0, 5.5), (1, 3.0), (2, float("nan"))], "train/packing/fill": [(0, 1.0)]}
(HERE / "run").mkdir()
(HERE / "run" / "metrics.csv").write_text("step,train/loss\n0,5.5\n1,3.0\n")


def _written(rng: random.Random) -> dict[str, Any]:
    return {"series": dict(SERIES), "file": HERE / "x.png", "theme": rng.choice(["light", "dark"])}


def _show_quietly(**given: Any) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        show(**given)


TABLE = {
    "report.picture": Entry(picture, _written),
    "report.page": Entry(page, lambda rng: {**_written(rng), "file": HERE / "x.html"}),
    "report.table": Entry(table, lambda _: {"series": dict(SERIES)}),
    "report.read_metrics": Entry(read_metrics, lambda _: {"folder": HERE / "run"}),
    "report.show": Entry(_show_quietly, lambda _: {"folder": HERE / "run", "theme": "light"}),
}
