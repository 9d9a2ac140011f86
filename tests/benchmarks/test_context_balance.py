"""The table of balance is of whole packs, and says what it should."""

from __future__ import annotations

import pytest

from benchmarks import context_balance
from lightning_thd.alignment import Alignment


@pytest.mark.parametrize("algorithm", ["bfd", "next_fit"])
@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous"])
def test_packs_are_full_and_padded(layout: str, algorithm: str) -> None:
    align = Alignment.for_(cp=4, layout=layout)
    packs = context_balance.draw_packs("chat", 8_192, algorithm, align)
    assert len(packs) == context_balance.PACKS
    for lengths in packs:
        align.check(sum(lengths), padded_lengths=lengths)
        assert 4_096 < sum(lengths) <= 8_192


def test_dual_chunk_is_even_where_contiguous_is_not() -> None:
    at = ("documents", 32_768, 4, "next_fit")
    dual = context_balance.measure(*at, "dual_chunk")
    contiguous = context_balance.measure(*at, "contiguous")
    assert 1.0 <= dual.work <= dual.worst <= context_balance.GOAL
    assert contiguous.worst > context_balance.GOAL > dual.pairs
    assert contiguous.pairs > contiguous.work  # the linear part is even in both
