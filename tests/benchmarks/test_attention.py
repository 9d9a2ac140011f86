from __future__ import annotations

import pytest
import torch

from benchmarks import attention
from benchmarks.attention import Row
from benchmarks.clock import Times


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TOKENS", 256)
    monkeypatch.setattr(attention, "HEADS", 2)
    monkeypatch.setattr(attention, "SHAPES", ((8, "random", 8.0), (32, "equal", 30.0)))


@pytest.mark.parametrize("kind", ["random", "equal"])
@pytest.mark.parametrize("way", ["sdpa in a loop", "sdpa, dense mask", "sdpa, padded batch"])
def test_all_ways_compute_the_same(way: str, kind: str) -> None:
    lengths = attention.draw_lengths(8, kind)
    assert sum(lengths) == 256
    assert min(lengths) >= 1
    ours, both = (pair() for pair in attention.prepare(lengths, "ours"))
    theirs, their_grads = (pair() for pair in attention.prepare(lengths, way))
    if way == "sdpa, padded batch":

        def unpad(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([row[:, :n].transpose(0, 1) for row, n in zip(x, lengths, strict=True)])

        theirs, their_grads = unpad(theirs), [unpad(x) for x in their_grads]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for a, b in zip(both, their_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_table_compares_with_ours() -> None:
    rows = attention.main(["--rounds", "2", "--ways", "ours", "sdpa in a loop"])
    assert len(rows) == 2 * 2 * len(attention.SHAPES)
    assert {row.precision for row in rows} == {"fp32", "bf16"}
    once, thrice = Times([1e-3] * 3, [2e-3] * 3), Times([3e-3, 9e-3, 3e-3], [4e-3] * 3)
    mine = Row(documents=16, lengths="equal", way="ours", precision="fp32", forward=once, both=once)
    dense = Row(
        documents=16, lengths="equal", way="sdpa, dense mask", precision="fp32", forward=once, both=thrice
    )
    words = attention.line(dense, mine, 8.0).split()
    assert words == ["sdpa,", "dense", "mask", "1.0", "2.0", "3.0", "4.0", "3.00", ">=", "8"]
    forward_only = Row(documents=16, lengths="equal", way="flex", precision="fp32", forward=thrice, both=None)
    assert "3.00" in attention.line(forward_only, mine, 8.0)


def test_drawn_lengths_fill_the_pack() -> None:
    for kind in ("equal", "nearly equal", "nearly equal, as planned", "random"):
        lengths = attention.draw_lengths(32, kind)
        assert (sum(lengths), len(lengths)) == (256, 32)
        assert min(lengths) >= 1
