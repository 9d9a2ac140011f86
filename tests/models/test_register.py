"""The name "thd" is known to transformers however and whenever transformers is imported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("transformers")

from lightning_thd.models import register, register_thd
from lightning_thd.models.register import after_import

register_thd()


def test_after_import_runs_once_for_a_later_import(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "thd_late_module.py").write_text("value = 3\n")  # type: ignore[operator]
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    after_import("thd_late_module", lambda module: seen.append(module.value))
    assert seen == []
    import thd_late_module  # noqa: F401

    assert seen == [3]
    after_import("thd_late_module", lambda module: seen.append(-module.value))
    assert seen == [3, -3]


@pytest.mark.parametrize(
    ("installed", "error", "message"),
    [
        ("5.18.4", None, "5.18.4: it is too old"),
        ("5.99.0", TypeError("no config"), r"5.99.0: its internals have changed \(no config\)"),
    ],
)
def test_another_transformers_refuses_thd_alone(
    monkeypatch: pytest.MonkeyPatch, installed: str, error: Exception | None, message: str
) -> None:
    table: dict[str, Any] = {}
    monkeypatch.setattr(register, "_installed", lambda: installed)
    install = Mock(side_effect=error)
    module: Any = SimpleNamespace(table=SimpleNamespace(register=table.__setitem__))
    register._register("table", install, module)
    assert install.called == (error is not None)
    with pytest.raises(ValueError, match=f"{message}. Install a release from 5.19 to 5.24"):
        table["thd"]()
