"""Every module path of release 0.1 still imports, with a warning that says where it is now."""

from __future__ import annotations

import importlib
import sys

import pytest

from lightning_thd._moved import MOVED


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_path_is_the_new_module_and_says_so(old: str) -> None:
    name, new = f"lightning_thd.{old}", f"lightning_thd.{MOVED[old]}"
    sys.modules.pop(name, None)
    with pytest.warns(DeprecationWarning, match=f"{name} is now {new}"):
        module = importlib.import_module(name)
    assert module is importlib.import_module(new)
    assert module.__name__ == new


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("batch", "THDBatch"),
        ("callbacks.cuda_graph", "GraphedStep"),
        ("callbacks.cuda_graph", "lint_capture"),
        ("cli", "main"),
        ("data.store", "TokenStore"),
        ("models.probe", "check_packing"),
        ("report", "show"),
        ("seqlens", "pad_cu_seqlens"),
        ("stats", "SeqStats"),
    ],
)
def test_modules_that_became_folders_keep_their_names(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(f"lightning_thd.{module}"), name)


def test_other_missing_modules_stay_missing() -> None:
    with pytest.raises(ModuleNotFoundError, match="lightning_thd.nothing"):
        importlib.import_module("lightning_thd.nothing")
