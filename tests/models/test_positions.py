"""Boundaries read off position_ids, as a flattening collator without cu_seqlens gives them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_thd.models.pack import pack_from_positions


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_every_restart_is_a_boundary(lengths: list[int]) -> None:
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    pack = pack_from_positions(positions)
    if len(lengths) == 1:
        assert pack is None
        return
    assert pack is not None
    assert pack.lengths == tuple(lengths)
    assert pack.cu_seqlens_q.tolist() == torch.tensor([0, *lengths]).cumsum(0).tolist()
    assert (pack.max_length_q, pack.slots) == (max(lengths), sum(lengths))
    assert pack.seq_idx.tolist() == [[i for i, n in enumerate(lengths) for _ in range(n)]]


def test_plain_rows_are_no_pack() -> None:
    assert pack_from_positions(None) is None
    assert pack_from_positions(torch.arange(5).expand(3, -1)) is None
    assert pack_from_positions(torch.tensor([[4]])) is None
    assert pack_from_positions(torch.arange(5).expand(3, 2, -1)) is None  # M-RoPE


def test_packs_that_cannot_be_read_off_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 4\) restart inside a row"):
        pack_from_positions(torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]]))
    with pytest.raises(ValueError, match=r"M-RoPE position_ids of shape \(3, 1, 4\) go back"):
        pack_from_positions(torch.tensor([0, 1, 0, 1]).expand(3, 1, -1))
