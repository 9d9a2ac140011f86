"""Messages about token stores and what was counted that no other test of the room meets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_thd import THDDataModule
from lightning_thd.data import TokenStore
from lightning_thd.data.store import tokens
from lightning_thd.data.store.cache import save_arrays
from lightning_thd.data.store.tokens import Rows, cached_store
from tests.data.chats import PLAIN, make_tokenizer

TOKENS, OFFSETS = np.array([5, 6, 7], np.uint16), np.array([0, 1, 3])
WITH = Rows(TOKENS, np.array([1, 2]), np.array([-100, 6, 7]))
WITHOUT = Rows(TOKENS, np.array([1, 2]))
LABELLED = WITHOUT._replace(label=np.array([0, 1]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TokenStore(TOKENS, OFFSETS, loss_tokens=np.array([1])), "loss_tokens of shape .* wanted 2"),
        (
            lambda: TokenStore(TOKENS, OFFSETS, label=np.array([1])),
            r"label of shape \(1,\); wanted 2 numbers",
        ),
        (
            lambda: TokenStore(TOKENS, OFFSETS, np.zeros(2, int)),
            "3 tokens in 2 sequences but labels of shape",
        ),
        (lambda: TokenStore(TOKENS, np.array([0, 2, 1, 3])), "Offsets run from 0 to 3, and never fall"),
        (lambda: TokenStore(TOKENS, np.array([0, 2])), "Offsets run from 0 to 3"),
        (lambda: TokenStore.from_rows([[-1]]), "Token ids start at 0, got -1"),
        (lambda: TokenStore.from_rows([[2**31]]), "Ids run to 2147483647"),
    ],
)
def test_a_store_of_arrays(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
    with pytest.raises(IndexError, match="Sequence 5 of a TokenStore with 1"):
        TokenStore.from_rows([[1]])[5]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([WITHOUT, WITH], "Records before have no 'labels' and these have 'labels'. Give all"),
        ([WITH, WITHOUT], "Records before have 'labels' and these have no 'labels'. Give all"),
        ([LABELLED, WITHOUT], "Records before have 'label' and these have no 'label'. Give all"),
    ],
)
def test_pieces_that_do_not_belong_together(tmp_path: Path, parts: list[Rows], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cached_store(None, lambda first: parts, cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_other_arrays(tmp_path: Path) -> None:
    save_arrays(tmp_path / "a", {"tokens": TOKENS, "offsets": np.array([0, 9])}, version=tokens._VERSION)
    with pytest.raises(ValueError, match=r"The folder .*a is no token store \(.*\). Delete it"):
        TokenStore.open(tmp_path / "a")


def test_only_bad_records(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(2 * '{"messages": [{"role": "user", "content": "Hi"}]}\n')
    data = THDDataModule(
        file, capacity=8, on_error="skip", cache_dir=tmp_path / "cache", tokenizer=make_tokenizer(PLAIN)
    )
    with pytest.raises(ValueError, match="All 2 records are bad; the first: .*a.jsonl, line 1: .* Mend the"):
        data.setup("fit")


def test_more_bad_rows_than_allowed() -> None:
    rows: list[dict[str, Any]] = [{"input_ids": [-1]}, {"input_ids": [1.5]}, {"input_ids": [3]}]
    data = THDDataModule(rows, capacity=8, on_error="skip", max_errors=1)
    with pytest.raises(ValueError, match="2 rows are bad, more than max_errors=1; the first: Row 0.*raise"):
        data.setup("fit")
    data = THDDataModule(rows[:2], capacity=8, on_error="skip")
    with pytest.raises(ValueError, match="All 2 rows are bad; the first: Row 0.* Mend the data"):
        data.setup("fit")
