"""The simulation of dynamic degrees counts what it says."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import dynamic_cp
from lightning_thd.packing import Cost
from lightning_thd.packing.sharing import Sharing


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
    found = dynamic_cp.run_case(case, "keys")
    assert found.fullest <= 1.0
    assert found.waits >= 1.0
    assert found.gain > 0.9
