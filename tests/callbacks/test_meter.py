from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_thd.batch import THDStep
from lightning_thd.callbacks.meter import Counted, Hardware, Meter, compute_dtype, count_table, interval
from lightning_thd.callbacks.seen import OnHost, microbatches
from lightning_thd.flops import Chunk, FlopsModel, SeqStats
from lightning_thd.flops.model import from_ints
from lightning_thd.flops.rates import Work
from lightning_thd.flops.terms import Layer, matmul, scores
from lightning_thd.parallel.shard import part_of
from lightning_thd.stats import Blocks, Window
from tests.callbacks.fits import Clock, pack

TERMS = (matmul("w", 50), scores(1, 5, 5, window=3), scores(1, 5, 5, window=Chunk(4)), scores(1, 2, 2))
MODEL = FlopsModel(name="windows", layers=(Layer(path="", terms=TERMS),), recompute="full")
LENGTHS = st.lists(st.lists(st.integers(0, 20), max_size=6), min_size=1, max_size=6)


def make_meter(clock: Clock | None = None) -> Meter:
    return Meter("train", "training", clock or Clock(), Hardware(ranks=2))


@given(batches=LENGTHS, work=st.sampled_from(["training", "forward"]), counted=st.booleans())
def test_an_interval_is_the_sum_of_its_microbatches(
    batches: list[list[int]], work: Work, counted: bool
) -> None:
    """Rank 0 has the batches, rank 1 the same twice; windows counted by the collator or by the meter."""
    windows = MODEL.windows if counted else ()
    rows = []

    for rank in range(2):
        meter = Meter("train", work, Clock(), Hardware(peak=2.0 + rank, ranks=2), MODEL)
        for lengths in batches:
            seen = [(SeqStats.from_lengths(lengths, windows=windows), OnHost(lengths))] * (rank + 1)
            meter.steps[-1].extend(seen)
            meter.end_step()
        rows.append(meter.flush())

    totals = interval(rows, MODEL, work, 1.0)
    expected = [SeqStats.from_lengths(lengths, windows=MODEL.windows) for lengths in batches]
    assert totals.measured.stats == sum(expected * 3, start=SeqStats())
    assert totals.measured.microbatches == 3 * len(batches)
    assert totals.peak == 2.5

    costs = [MODEL.training_flops(stats).hardware for stats in expected]
    if work == "forward":
        costs = [MODEL.forward_flops(stats).hardware for stats in expected]
    assert totals.heaviest == pytest.approx(2 * sum(costs))
    assert totals.mean == pytest.approx(1.5 * sum(costs))


@pytest.mark.parametrize("most", [5, 10])
def test_a_rank_that_left_steps_out_lends_its_own_rate(most: int) -> None:
    """Ten steps of 8 tokens in 10 s on either rank, but one measures the last five or none: 16 tokens/s."""
    rows = []
    for left_out in (0, most):
        clock = Clock()
        meter = make_meter(clock)
        meter.resume()
        for step in range(10):
            meter.add(pack(8))
            clock.sleep(1.0)
            meter.end_step()
            if step + 1 == left_out:
                meter.leave_out()
        rows.append(meter.flush())
    totals = interval(rows, None, "training", 1.0)
    assert totals.measured.stats.real_tokens / totals.seconds == pytest.approx(16)


def test_no_microbatches_of_unknown_flops_leave_those_of_others_known() -> None:
    one = Counted(SeqStats.from_lengths([3]), 1, MODEL.forward_flops(SeqStats()))
    assert Counted(SeqStats(), 0, None) + one == one + Counted(SeqStats(), 0, None) == one


def test_the_dtype_of_matmuls_follows_torchs_new_setting_and_no_packed_weights() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # torch's older getter then raises
    try:
        assert compute_dtype("32-true", torch.nn.Linear(2, 2)) == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")
    model = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    model.packed = torch.nn.Parameter(torch.zeros(99, dtype=torch.uint8), requires_grad=False)
    assert compute_dtype("32-true", model) is torch.bfloat16
    assert compute_dtype("fp16", model) is torch.float16


def test_a_rank_waits_for_its_device_before_it_sends_its_time(monkeypatch: Any) -> None:
    clock = Clock()
    sent = list[list[int]]()
    meter = make_meter(clock)
    meter.resume()
    monkeypatch.setattr("lightning_thd.callbacks.meter.synchronize", lambda _: clock.sleep(1.0))
    monkeypatch.setattr("lightning_thd.callbacks.meter.gather_ints", lambda x, **_: sent.append(x) or [x] * 2)
    meter.reduce()
    assert 10**9 in sent[0]


def test_what_batches_tell() -> None:
    batch = pack(5, 3, pad_to=10)
    (one,) = microbatches(batch)
    assert one == (batch.stats, (5, 3))
    assert microbatches(THDStep([batch, batch])) == [one, one]
    assert microbatches(batch.stats) == [(batch.stats, None)]
    ids = torch.ones(2, 4, dtype=torch.long)
    dense = [(SeqStats.from_cu_seqlens(None, shape=(2, 4)), OnHost((4, 4)))]
    padded: list[Any] = [ids, {"input_ids": ids}, [ids, torch.ones(2)]]
    assert [microbatches(kind) for kind in padded] == [dense] * 3
    unknown: list[Any] = [None, [], {}, "text", torch.ones(3), torch.ones(2, 4), {"pixels": ids}]
    assert [microbatches(kind) for kind in unknown] == [[]] * 7


@pytest.mark.parametrize("window", [1, 7, 40, 64, 65, 100, 10_000, Chunk(64), Blocks(16)])
def test_windows_are_counted_right_whether_or_not_a_sequence_ends_them(window: Window) -> None:
    model = FlopsModel(name="one", layers=(Layer(path="", terms=(scores(1, 5, 5, window=window),)),))
    draw = np.random.default_rng(0)
    batches = [tuple(draw.integers(0, 65, number).tolist()) for number in (0, 1, 2, 3, 50, 400) * 20]
    batches += [(64,) * 8, (64,) * 511 + (65,), (1,) * 511 + (64,), (1,) * 511 + (9_999,), (65,), (0, 65, 0)]
    table = count_table([(SeqStats.from_lengths(lengths), OnHost(lengths)) for lengths in batches], model)
    for row, lengths in zip(table.tolist(), batches, strict=True):
        assert from_ints(row, model) == SeqStats.from_lengths(lengths, windows=model.windows)


def test_a_share_of_a_pack_is_counted_by_its_lengths() -> None:
    model = FlopsModel(name="one", layers=(Layer(path="", terms=(scores(1, 5, 5, window=60),)),))
    for lengths in ((100,), (100, 1), (1,) * 6):
        whole = SeqStats.from_lengths(lengths, windows=model.windows)
        part = part_of(SeqStats.from_lengths(lengths), 2, 0)
        (row,) = count_table([(part, OnHost(lengths))], model).tolist()
        assert row[-1] == whole.window_pairs[0][1]


def test_other_windows_without_lengths_are_refused() -> None:
    meter = make_meter()
    meter.model = MODEL
    meter.add(SeqStats.from_lengths([8]))
    windows = re.escape(str(list(MODEL.windows)))
    with pytest.raises(ValueError, match=f"no lengths, and its stats lack .* attention windows {windows}"):
        meter.flush()
