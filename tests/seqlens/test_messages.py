"""Messages about where offsets lie that no other test of the room meets."""

from __future__ import annotations

import pytest
import torch

from lightning_thd.seqlens import check_cu_seqlens, pad_cu_seqlens, segment_ids_from_cu_seqlens

OFFSETS = torch.tensor([0, 3, 5], dtype=torch.int32)


def test_offsets_on_two_devices() -> None:
    with pytest.raises(
        ValueError, match="cu_seqlens is on cpu and cu_seqlens_padded on meta; wanted one device"
    ):
        segment_ids_from_cu_seqlens(OFFSETS, 5, cu_seqlens_padded=OFFSETS.to("meta"))


def test_offsets_without_values() -> None:
    with pytest.raises(
        ValueError, match="on the meta device, which holds no values. Check it where it was made"
    ):
        check_cu_seqlens(OFFSETS.to("meta"), 5)
    with pytest.raises(
        ValueError, match="on the meta device, which holds no values. Pass lengths=, which are"
    ):
        pad_cu_seqlens(OFFSETS.to("meta"), 4, 8)
