"""Messages about token stores and what was counted that no other test of the room meets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_thd import THDDataModule
from lightning_thd.data import TokenStore
from lightning_thd.data.store import Rows, count_targets, tokens, write_store
from lightning_thd.data.store.cache import save_arrays
from tests.data.chats import PLAIN, make_tokenizer

TOKENS, OFFSETS = np.array([5, 6, 7], np.uint16), np.array([0, 1, 3])
WITH = Rows(TOKENS, np.array([1, 2]), np.array([-100, 6, 7]))
WITHOUT = Rows(TOKENS, np.array([1, 2]))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: TokenStore(TOKENS, OFFSETS, loss_tokens=np.array([1])),
            ValueError,
            "TokenStore got 2 sequences but 1 loss_tokens. Give one a sequence, or leave them out",
        ),
        (lambda: TokenStore(TOKENS, np.array([0, 2, 1, 3])), ValueError, "TokenStore got offsets that fall"),
        (
            lambda: count_targets(np.array([1, 2, 3]), np.array([1, 1])),
            ValueError,
            r"3 labels of shape \(3,\) and 2 lengths that add up to 2. Give labels \[N\] and lengths that",
        ),
    ],
)
def test_a_store_of_arrays(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([WITHOUT, WITH], "Records before have no 'labels' and these have 'labels'. Give all"),
        ([WITH, WITHOUT], "Records before have 'labels' and these have no 'labels'. Give all"),
        ([Rows(TOKENS, np.array([1, 1]))], r"\[3\] tokens and labels, but lengths that add up to 2. Give"),
        ([Rows(TOKENS, np.array([4, -1]))], r"\[3\] tokens and labels, but lengths that add up to 3. Give"),
        ([WITHOUT._replace(labels=np.array([1, 2, 2**40]))], "1099511627776 does not fit int32, in which"),
    ],
)
def test_pieces_that_do_not_belong_together(tmp_path: Path, parts: list[Rows], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_store(tmp_path / "store", parts)
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
