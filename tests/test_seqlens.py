from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_thd.seqlens import (
    INT32_MAX,
    check_cu_seqlens,
    cu_seqlens_from_lengths,
    cu_seqlens_from_position_ids,
    lengths_from_cu_seqlens,
    pad_cu_seqlens,
    position_ids_from_cu_seqlens,
    seq_idx_from_cu_seqlens,
)
from tests.device_reads import RefuseDeviceReads

ragged = st.lists(st.integers(0, 9), max_size=20)
filled = st.lists(st.integers(1, 9), max_size=20)


def cu(*offsets: int) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32)


# --- oracles ----------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(lengths=ragged)
def test_every_form_equals_a_loop_over_sequences(lengths: list[int]) -> None:
    total = sum(lengths)
    offsets = cu_seqlens_from_lengths(lengths)
    assert offsets.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert lengths_from_cu_seqlens(offsets).tolist() == lengths
    assert position_ids_from_cu_seqlens(offsets, total).tolist() == [p for n in lengths for p in range(n)]
    seq_idx = [s for s, n in enumerate(lengths) for _ in range(n)]
    assert seq_idx_from_cu_seqlens(offsets, total).tolist() == seq_idx


@settings(deadline=None)
@given(lengths=filled, spare=st.integers(0, 3))
def test_back_from_position_ids_repeats_the_total_for_spare_sequences(lengths: list[int], spare: int) -> None:
    offsets = cu_seqlens_from_lengths(lengths)
    position_ids = position_ids_from_cu_seqlens(offsets, sum(lengths))
    back = cu_seqlens_from_position_ids(position_ids, num_sequences=len(lengths) + spare)
    assert back.tolist() == offsets.tolist() + [sum(lengths)] * spare


def test_dtypes() -> None:
    offsets = cu(0, 3, 5)
    assert cu_seqlens_from_lengths([3, 2]).dtype == torch.int32
    assert lengths_from_cu_seqlens(offsets).dtype == torch.int32
    assert position_ids_from_cu_seqlens(offsets, 5).dtype == torch.int64
    assert seq_idx_from_cu_seqlens(offsets, 5).dtype == torch.int32
    assert cu_seqlens_from_position_ids(torch.tensor([0, 1]), num_sequences=1).dtype == torch.int32
    assert pad_cu_seqlens(offsets, 4, 9).dtype == torch.int32


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        lambda x: np.asarray(x, dtype=np.int32),
        lambda x: np.asarray(x, dtype=np.uint16),
        lambda x: torch.tensor(x, dtype=torch.int64),
        lambda x: torch.tensor(x, dtype=torch.int32),
        lambda x: torch.tensor(x, dtype=torch.uint8),
    ],
)
def test_lengths_of_any_kind(make: Callable[[list[int]], object]) -> None:
    assert cu_seqlens_from_lengths(make([3, 0, 2])).tolist() == [0, 3, 3, 5]


def test_strides_do_not_matter() -> None:
    strided = torch.tensor([0, 9, 1, 9, 0, 9])[::2]
    assert cu_seqlens_from_position_ids(strided, num_sequences=2).tolist() == [0, 2, 3]
    assert cu_seqlens_from_lengths(strided).tolist() == [0, 0, 1, 1]
    assert lengths_from_cu_seqlens(cu(0, 7, 3, 7, 5)[::2]).tolist() == [3, 2]


def test_no_sequences() -> None:
    for empty in ([], np.zeros(0, dtype=np.int64), torch.zeros(0, dtype=torch.int32)):
        assert cu_seqlens_from_lengths(empty).tolist() == [0]
    assert position_ids_from_cu_seqlens(cu(0), 0).tolist() == []
    none = torch.zeros(0, dtype=torch.int64)
    assert cu_seqlens_from_position_ids(none, num_sequences=2).tolist() == [0, 0, 0]
    assert pad_cu_seqlens(cu(0), 2, 4).tolist() == [0, 2, 4]
    assert pad_cu_seqlens(cu(0), 2, 0).tolist() == [0, 0, 0]


def test_the_largest_total_that_fits() -> None:
    assert cu_seqlens_from_lengths([INT32_MAX - 1, 1])[-1] == INT32_MAX
    assert pad_cu_seqlens(cu(0, 1), 3, INT32_MAX).tolist() == [0, 1, 2**30, INT32_MAX]


# --- padding to a fixed count -----------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    lengths=ragged,
    spare=st.integers(0, 8),
    tail=st.integers(0, 40),
    max_seqlen=st.none() | st.integers(1, 20),
)
def test_padding_keeps_the_real_and_spreads_the_tail_or_raises(
    lengths: list[int], spare: int, tail: int, max_seqlen: int | None
) -> None:
    kept = len(lengths)
    while kept and lengths[kept - 1] == 0:
        kept -= 1
    used, count = sum(lengths), kept + spare
    fits = (tail == 0 or spare > 0) and (
        max_seqlen is None or (tail <= spare * max_seqlen and max(lengths, default=0) <= max_seqlen)
    )
    offsets = cu_seqlens_from_lengths(lengths)
    if not fits:
        with pytest.raises(ValueError, match=r"dummy sequence|max_seqlen"):
            pad_cu_seqlens(offsets, count, used + tail, max_seqlen=max_seqlen)
        return
    padded = pad_cu_seqlens(offsets, count, used + tail, max_seqlen=max_seqlen)
    check_cu_seqlens(padded, used + tail)
    assert padded.shape == (count + 1,)
    assert torch.equal(padded[: kept + 1], offsets[: kept + 1])
    dummies = lengths_from_cu_seqlens(padded)[kept:].tolist()
    real_dummies = [n for n in dummies if n]
    assert dummies == real_dummies + [0] * (spare - len(real_dummies))  # then the total repeats
    assert len(set(real_dummies[:-1])) <= 1  # all equal but the last
    assert max(real_dummies, default=0) <= -(-tail // max(spare, 1))
    with RefuseDeviceReads():  # told the lengths, it reads nothing
        told = pad_cu_seqlens(offsets, count, used + tail, max_seqlen=max_seqlen, lengths=lengths)
    assert torch.equal(told, padded)


def test_padding_reads_the_device_only_without_lengths() -> None:
    told = pad_cu_seqlens(cu(0, 3, 5).to("meta"), 4, 9, lengths=[3, 2])
    assert told.is_meta
    assert told.shape == (5,)


# --- where it runs ----------------------------------------------------------------------------------------


def _all(lengths: Tensor, total: int, num_sequences: int) -> tuple[Tensor, ...]:
    offsets = cu_seqlens_from_lengths(lengths)
    position_ids = position_ids_from_cu_seqlens(offsets, total)
    return (
        offsets,
        lengths_from_cu_seqlens(offsets),
        position_ids,
        seq_idx_from_cu_seqlens(offsets, total),
        cu_seqlens_from_position_ids(position_ids, num_sequences=num_sequences),
    )


def test_reads_nothing_back() -> None:
    some = torch.tensor([1, 2])
    with RefuseDeviceReads():
        for read in (
            lambda: some[0].item(),
            lambda: some.nonzero(),
            lambda: torch.repeat_interleave(some, some),
            lambda: bool(some[0] == 1),
        ):
            with pytest.raises(AssertionError, match="reads the device back"):
                read()
        assert len(_all(torch.tensor([3, 2, 4]), 9, 3)) == 5


def test_runs_on_the_meta_device() -> None:
    shapes = [list(x.shape) for x in _all(torch.zeros(3, dtype=torch.int64, device="meta"), 9, 3)]
    assert shapes == [[4], [3], [9], [9], [4]]
    assert all(x.is_meta for x in _all(torch.zeros(3, dtype=torch.int64, device="meta"), 9, 3))


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_without_a_break(dynamic: bool | None) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_all, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for lengths in ([3, 2, 4], [1, 5], [2, 2, 2, 9]):
        args = (torch.tensor(lengths), sum(lengths), len(lengths))
        for ours, expected in zip(compiled(*args), _all(*args), strict=True):
            assert torch.equal(ours, expected)


def test_padding_and_lists_compile_without_a_break() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(offsets: Tensor) -> tuple[Tensor, Tensor]:
        return pad_cu_seqlens(offsets, 4, 9, max_seqlen=3, lengths=(3, 2)), cu_seqlens_from_lengths([3, 2])

    padded, offsets = compiled(cu(0, 3, 5))
    assert padded.tolist() == [0, 3, 5, 7, 9]
    assert offsets.tolist() == [0, 3, 5]


# --- bad input --------------------------------------------------------------------------------------------


TAKERS: list[Callable[[Tensor], object]] = [
    lengths_from_cu_seqlens,
    lambda x: position_ids_from_cu_seqlens(x, 5),
    lambda x: seq_idx_from_cu_seqlens(x, 5),
    lambda x: pad_cu_seqlens(x, 4, 9),
    lambda x: check_cu_seqlens(x, 5),
]


@pytest.mark.parametrize("take", TAKERS)
def test_bad_cu_seqlens(take: Callable[[Tensor], object]) -> None:
    wanted = take(cu(0, 3, 5))
    for same in ([0, 3, 5], (0, 3, 5), np.array([0, 3, 5]), np.array([0, 3, 5], np.uint8)):
        found = take(same)
        assert found is wanted is None or torch.equal(found, wanted)
    with pytest.raises(TypeError, match=r"cu_seqlens is None; wanted a list, array or tensor of ints"):
        take(None)
    with pytest.raises(ValueError, match=r"cu_seqlens holds 2147483648, past int32"):
        take([0, 2**31])
    with pytest.raises(ValueError, match=r"cu_seqlens is torch.int64; wanted torch.int32"):
        take(torch.tensor([0, 3, 5]))
    with pytest.raises(ValueError, match=r"cu_seqlens has shape \[1, 3\]; wanted \[S \+ 1\]"):
        take(cu(0, 3, 5)[None])
    with pytest.raises(ValueError, match=r"cu_seqlens has shape \[0\]"):
        take(cu())
    with pytest.raises(ValueError, match=r"cu_seqlens starts with 1; wanted 0"):
        take(cu(1, 3, 5))
    with pytest.raises(ValueError, match=r"cu_seqlens decreases from 4 to 3 at entry 2"):
        take(cu(0, 4, 3, 5))


@pytest.mark.parametrize("take", [*TAKERS[1:3], TAKERS[4]])
def test_a_last_entry_that_is_not_the_total(take: Callable[[Tensor], object]) -> None:
    with pytest.raises(
        ValueError, match=r"cu_seqlens ends with 4 but there are total=5 slots; .*pad_cu_seqlens"
    ):
        take(cu(0, 3, 4))


OFFSETS, META = cu(0, 3, 5), torch.empty(3, dtype=torch.int32, device="meta")


def found_in(*positions: float, num_sequences: int = 2) -> None:
    cu_seqlens_from_position_ids(torch.tensor(positions), num_sequences=num_sequences)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: cu_seqlens_from_lengths([3, -2]), "Sequence 1 has length -2; wanted 0 or more tokens"),
    (
        lambda: cu_seqlens_from_lengths([2**31 - 1, 1]),
        "2 lengths add up to 2147483648 tokens",
    ),
    (lambda: cu_seqlens_from_lengths(torch.tensor([1.0])), "lengths is torch.float32; wanted an integer"),
    (lambda: cu_seqlens_from_lengths([[1, 2], [3, 4]]), r"lengths has shape \[2, 2\]; wanted one dimension"),
    (lambda: found_in(4, 5, 0), r"position_ids\[0\] is 4; wanted 0 at the start"),
    (lambda: found_in(0, 1, 3), r"position_ids\[2\] is 3 after 1; wanted 0 at the start"),
    (lambda: found_in(0, 0, 1, 0), "There are 3 sequences but num_sequences=2; .*num_sequences=3 or more"),
    (lambda: found_in(0, 1, num_sequences=-1), "num_sequences=-1; wanted 0 or more"),
    # What does not fit is never cut.
    (lambda: pad_cu_seqlens(OFFSETS, 1, 9), "2 sequences do not fit into num_sequences=1; none may be cut"),
    (lambda: pad_cu_seqlens(OFFSETS, 4, 4), "5 tokens do not fit into total=4; none may be cut off"),
    (lambda: pad_cu_seqlens(OFFSETS, 2, 9), "A tail of 4 slots needs a dummy sequence.*num_sequences=3 or"),
    (lambda: pad_cu_seqlens(OFFSETS, 9, 9, max_seqlen=2), "A sequence has 3 tokens.*but max_seqlen=2"),
    (
        lambda: pad_cu_seqlens(OFFSETS, 4, 14, max_seqlen=4),
        "9 slots over 2 spare sequences makes them 5 long",
    ),
    (lambda: pad_cu_seqlens(OFFSETS, 4, 2**31), "total=2147483648; wanted at most 2147483647"),
    (
        lambda: pad_cu_seqlens(OFFSETS, 4, 9, lengths=[3, 2, 0]),
        "3 lengths do not fit cu_seqlens of 3 entries",
    ),
    (
        lambda: pad_cu_seqlens(OFFSETS, 4, 9, lengths=[2, 3]),
        r"but cu_seqlens gives \[3, 2\].*wanted the same",
    ),
    (lambda: pad_cu_seqlens(META, 4, 9, lengths=[2, -2]), r"lengths.1. is -2; wanted 0 or more"),
    (lambda: pad_cu_seqlens(META, 4, 9), "on the meta device, which holds no values. Pass lengths="),
    (lambda: position_ids_from_cu_seqlens(META, -1), "total=-1"),
    (lambda: seq_idx_from_cu_seqlens(META, -1), "total=-1"),
    (lambda: check_cu_seqlens(META, 5), "on the meta device, which holds no values"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_is_refused(case: int) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_padding_a_pair_adds_the_same_dummies() -> None:
    real, padded = cu(0, 3, 5), cu(0, 4, 8)
    assert pad_cu_seqlens(real, 4, 5 + 6).tolist() == [0, 3, 5, 8, 11]
    assert pad_cu_seqlens(padded, 4, 8 + 6).tolist() == [0, 4, 8, 11, 14]
