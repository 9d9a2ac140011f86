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


def cu(*offsets: int) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32)


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
    filled = cu_seqlens_from_lengths([n for n in lengths if n])
    position_ids = position_ids_from_cu_seqlens(filled, total)
    spare = 3
    back = cu_seqlens_from_position_ids(position_ids, num_sequences=len(filled) - 1 + spare)
    assert back.tolist() == filled.tolist() + [total] * spare


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
    used = sum(lengths)
    count = kept + spare
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
        with_lengths = pad_cu_seqlens(offsets, count, used + tail, max_seqlen=max_seqlen, lengths=lengths)
    assert torch.equal(with_lengths, padded)


def test_any_kind_of_numbers_gives_int32() -> None:
    for make in (
        list,
        tuple,
        np.uint16,
        np.int32,
        torch.tensor,
        lambda x: torch.tensor(x, dtype=torch.uint8),
    ):
        offsets = cu_seqlens_from_lengths(make([3, 0, 2]))
        assert (offsets.tolist(), offsets.dtype) == ([0, 3, 3, 5], torch.int32)

    assert position_ids_from_cu_seqlens(cu(0, 3), 3).dtype == torch.int64
    assert seq_idx_from_cu_seqlens(cu(0, 3), 3).dtype == torch.int32

    strided = torch.tensor([0, 9, 1, 9, 0, 9])[::2]
    assert cu_seqlens_from_position_ids(strided, num_sequences=2).tolist() == [0, 2, 3]
    assert lengths_from_cu_seqlens(cu(0, 7, 3, 7, 5)[::2]).tolist() == [3, 2]
    assert pad_cu_seqlens(cu(0), 2, 4).tolist() == [0, 2, 4]
    assert pad_cu_seqlens(cu(0, 1), 3, INT32_MAX).tolist() == [0, 1, 2**30, INT32_MAX]

    real = cu(0, 3, 5)  # a pair gets the same dummies
    padded = cu(0, 4, 8)
    assert pad_cu_seqlens(real, 4, 5 + 6).tolist() == [0, 3, 5, 8, 11]
    assert pad_cu_seqlens(padded, 4, 8 + 6).tolist() == [0, 4, 8, 11, 14]


def _all(lengths: Tensor, total: int, num_sequences: int) -> tuple[Tensor, ...]:
    offsets = cu_seqlens_from_lengths(lengths)
    position_ids = position_ids_from_cu_seqlens(offsets, total)
    return (
        offsets,
        lengths_from_cu_seqlens(offsets),
        position_ids,
        seq_idx_from_cu_seqlens(offsets, total),
        cu_seqlens_from_position_ids(position_ids, num_sequences=num_sequences),
        pad_cu_seqlens(offsets, num_sequences + 3, total + 2, max_seqlen=9, lengths=(3, 2, 4)),
    )


def test_runs_without_reading_the_device_and_in_a_compiled_graph() -> None:
    some = torch.tensor([1, 2])
    with RefuseDeviceReads():
        with pytest.raises(AssertionError, match="reads the device back"):
            some.nonzero()
        expected = _all(torch.tensor([3, 2, 4]), 9, 3)
    shapes = [x.shape for x in _all(torch.zeros(3, dtype=torch.int64, device="meta"), 9, 3)]
    assert shapes == [x.shape for x in expected]
    torch._dynamo.reset()
    compiled = torch.compile(_all, fullgraph=True, backend="aot_eager", dynamic=True)
    for ours, wanted in zip(compiled(torch.tensor([3, 2, 4]), 9, 3), expected, strict=True):
        assert torch.equal(ours, wanted)


OFFSETS = cu(0, 3, 5)
META = torch.empty(3, dtype=torch.int32, device="meta")


def take(cu_seqlens: object) -> None:
    """Call every function that takes offsets, which all refuse them alike."""
    messages = set()
    for function in (
        lengths_from_cu_seqlens,
        lambda x: position_ids_from_cu_seqlens(x, 5),
        lambda x: seq_idx_from_cu_seqlens(x, 5),
        lambda x: pad_cu_seqlens(x, 4, 9),
        lambda x: check_cu_seqlens(x, 5),
    ):
        with pytest.raises((ValueError, TypeError)) as refused:
            function(cu_seqlens)
        messages.add(str(refused.value))
    raise ValueError(*messages)


def found_in(*positions: float, num_sequences: int = 2) -> None:
    cu_seqlens_from_position_ids(torch.tensor(positions), num_sequences=num_sequences)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: take(None), "^cu_seqlens is None; wanted a list, array or tensor of ints"),
        (lambda: take([0, 2**31]), "^cu_seqlens holds 2147483648, past int32"),
        (lambda: take([0, 5 - 2**32]), "^cu_seqlens holds -4294967291, past int32"),
        (lambda: take(torch.tensor([0, 3, 5])), "^cu_seqlens is torch.int64; wanted torch.int32"),
        (lambda: take(cu(0, 3, 5)[None]), r"^cu_seqlens has shape \[1, 3\]; wanted \[S \+ 1\]"),
        (lambda: take(cu()), r"^cu_seqlens has shape \[0\]"),
        (lambda: take(cu(1, 3, 5)), "^cu_seqlens starts with 1; wanted 0"),
        (lambda: take(cu(0, 4, 3, 5)), "^cu_seqlens decreases from 4 to 3 at entry 2"),
        (lambda: check_cu_seqlens(cu(0, 3, 4), 5), "ends with 4 but there are total=5 .*pad_cu_seqlens"),
        (lambda: check_cu_seqlens(cu(0, 3, 6), 5), "ends with 6 but .* total=5 slots. Pass total=6"),
        (lambda: seq_idx_from_cu_seqlens(cu(0, 3, 4), 5), "ends with 4 but there are total=5 slots"),
        (lambda: cu_seqlens_from_lengths([3, -2]), "Sequence 1 has length -2; wanted 0 or more tokens"),
        (lambda: cu_seqlens_from_lengths([2**31 - 1, 1]), "2 lengths add up to 2147483648 tokens"),
        (lambda: cu_seqlens_from_lengths(torch.tensor([1.0])), "lengths is torch.float32; wanted an integer"),
        (
            lambda: cu_seqlens_from_lengths([[1, 2], [3, 4]]),
            r"lengths has shape \[2, 2\]; wanted one dimension",
        ),
        (lambda: found_in(4, 5, 0), r"position_ids\[0\] is 4; wanted 0 at the start"),
        (lambda: found_in(0, 1, 3), r"position_ids\[2\] is 3 after 1; wanted 0 at the start"),
        (lambda: found_in(0, 0, 1, 0), "There are 3 sequences but num_sequences=2. Pass 3 or more"),
        (lambda: found_in(0, 1, num_sequences=-1), "num_sequences=-1; wanted 0 or more"),
        # What does not fit is never cut.
        (
            lambda: pad_cu_seqlens(OFFSETS, 1, 9),
            "2 sequences do not fit into num_sequences=1; none may be cut off",
        ),
        (lambda: pad_cu_seqlens(OFFSETS, 4, 4), "5 tokens do not fit into total=4; none may be cut off"),
        (
            lambda: pad_cu_seqlens(OFFSETS, 2, 9),
            "A tail of 4 slots needs a dummy sequence.*num_sequences=3 or",
        ),
        (lambda: pad_cu_seqlens(OFFSETS, 4, 14, max_seqlen=4), "9 slots over 2 spare .* makes them 5 long"),
        (lambda: pad_cu_seqlens(OFFSETS, 4, 9, max_seqlen=2), "^A sequence has 3 tokens, but max_seqlen=2"),
        (lambda: pad_cu_seqlens(OFFSETS, 4, 2**31), "total=2147483648; wanted at most 2147483647"),
        (lambda: pad_cu_seqlens(OFFSETS, 4, 9, lengths=[3, 2, 0]), "3 lengths do not fit cu_seqlens of 3"),
        (lambda: pad_cu_seqlens(OFFSETS, 4, 9, lengths=[2, 3]), r"but cu_seqlens gives \[3, 2\].*the same"),
        (lambda: pad_cu_seqlens(OFFSETS, 4, 9, lengths=[3, 1]), r"lengths\[1:\] are \[1\] but .* \[2\]"),
        (lambda: pad_cu_seqlens(META, 4, 9), "on the meta device, which holds no values. Pass lengths="),
        (lambda: position_ids_from_cu_seqlens(META, -1), "total=-1"),
        (lambda: check_cu_seqlens(META, 5), "on the meta device, which holds no values"),
    ],
)
def test_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
