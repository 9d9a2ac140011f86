"""The simulation of dynamic degrees counts what it says."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import dynamic_cp
from lightning_thd.packing import Cost
from lightning_thd.packing.sharing import SharedBins, Sharing


def test_a_step_whose_sequences_all_need_every_rank_gains_nothing() -> None:
    case = dynamic_cp.Case(shape="chat", ranks=8, capacity=2_048, largest=8, sequences=16)
    cost, sharing = Cost(linear=1e9, quadratic=1e5), Sharing(max_degree=8)
    lengths = np.full(4, 16_384)
    fixed = dynamic_cp.fixed_step(lengths, case, cost, sharing, "keys")
    alone, slots = dynamic_cp.seconds(lengths[:1], cost, 8, sharing, "keys")
    assert fixed == pytest.approx(4 * alone)
    assert slots == 2_048


def test_exchanges() -> None:
    assert dynamic_cp.exchange_s(1000, 1, "keys") == 0.0
    keys, cheapest = (dynamic_cp.exchange_s(1000, 32, way) for way in dynamic_cp.WAYS)
    assert keys > cheapest > 0
    assert dynamic_cp.fixed_degree(262_144, 8_192) == 32
    assert dynamic_cp.fixed_degree(16_384, 2_048) == 8


def test_a_case_is_within_its_memory() -> None:
    case = dynamic_cp.Case(shape="chat", ranks=8, capacity=2_048, largest=8, sequences=64)
    for host in ("DDP", "FSDP"):
        found = dynamic_cp.run_case(case, "keys", host)
        assert found.fullest <= 1.0
        assert found.waits >= 1.0
        assert 0.9 < found.gain <= found.most_gain * 1.001
        assert found.least_waits >= 1.0


def test_a_group_begins_once_its_last_rank_is_ready() -> None:
    sharing = Sharing(max_degree=2, exchange=(0.0,), waits="step")
    plan = SharedBins(
        order=np.arange(3),
        offsets=np.array([0, 1, 2, 3]),
        degree=np.array([1, 1, 2]),
        first=np.array([0, 1, 0]),
        microbatch=np.array([0, 0, 1]),
        load=np.zeros(3),
        num_microbatches=2,
    )
    lengths, cost = np.array([100, 300, 400]), Cost(linear=4e14, quadratic=0.0)
    exchange = dynamic_cp.exchange_s(200, 2, "keys")
    taken, busy, fullest = dynamic_cp.shared_step(plan, lengths, 2, cost, sharing, "keys")
    assert taken == pytest.approx(300 + 200 + exchange)
    assert busy == pytest.approx(100 + 300 + 400 + 2 * exchange)
    assert fullest == 300
