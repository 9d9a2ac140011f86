"""``-p tests.gpu.at_once``: every failure with its traceback as it happens, so that a time-out loses none."""

from __future__ import annotations

from typing import Any

import pytest

_terminal: list[Any] = []


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    _terminal.append(config.pluginmanager.get_plugin("terminalreporter"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _terminal[-1].write_line(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}")
        _terminal[-1].flush()
