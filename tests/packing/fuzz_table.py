"""Public functions of packing, for ``tests.fuzz``."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from lightning_thd.packing import Packing, Packs, Sequences, Spans, StepPlan, pack_lengths
from lightning_thd.packing.mixtures import Mixing, make_mixture
from lightning_thd.packing.mixtures import share_out as share_out_mixture
from lightning_thd.packing.sharing import Sharing, check_tiling, share_out
from tests.fuzz import Entry
from tests.packing.test_bad_input import CALLS, PLANNER


def _lengths(rng: random.Random) -> dict[str, Any]:
    return {
        "lengths": rng.choice([list, np.array])([rng.randint(1, 64) for _ in range(rng.randint(1, 20))]),
        "capacity": 64,
        "algorithm": rng.choice(["bfd", "ffd", "next_fit"]),
        "max_sequences": rng.choice([None, 3]),
    }


def _each_once(given: dict[str, Any], packs: Packing) -> None:
    assert sorted(packs.indices) == list(range(len(given["lengths"])))
    for pack in packs:
        assert sum(given["lengths"][i] for i in pack) <= 64
        assert given["max_sequences"] is None or len(pack) <= 3


def _shared(rng: random.Random) -> dict[str, Any]:
    return {
        "lengths": [rng.randint(1, 100) for _ in range(rng.randint(1, 8))],
        "capacity": 64,
        "ranks": 4,
        "sharing": Sharing(max_degree=2),
        "cost": lambda lengths: lengths.astype(float),
    }


PLAN = PLANNER.step(0, 0, 2)

TABLE = {
    **{f"packing.{n}": Entry(call, lambda _, right=right: dict(right)) for n, (call, right) in CALLS.items()},
    "packing.pack_lengths of many": Entry(pack_lengths, _lengths, _each_once),
    "packing.Packs": Entry(Packs, lambda rng: {"n": rng.randint(1, 9)}),
    "packing.Sequences": Entry(Sequences, lambda rng: {"n": rng.randint(1, 9)}),
    "packing.Spans": Entry(
        Spans,
        lambda _: {
            "index": np.array([0, 1]),
            "start": np.array([0, 2]),
            "stop": np.array([3, 4]),
            "continued": np.array([False, True]),
        },
    ),
    "packing.StepPlan": Entry(
        StepPlan, lambda _: {name: getattr(PLAN, name) for name in StepPlan.__dataclass_fields__}
    ),
    "packing.sharing.Sharing": Entry(
        Sharing,
        lambda _: {
            "max_degree": 4,
            "layout": "dual_chunk",
            "tp": 1,
            "sequence_parallel": False,
            "waits": "microbatch",
            "together": 4,
        },
    ),
    "packing.sharing.check_tiling": Entry(check_tiling, lambda _: {"ranks": 4, "max_degree": 2}),
    "packing.sharing.share_out": Entry(share_out, _shared),
    "packing.mixtures.Mixing": Entry(
        Mixing, lambda rng: {"temperature": rng.choice([1, 2.0]), "epoch": "longest", "passes": None}
    ),
    "packing.mixtures.share_out": Entry(
        share_out_mixture,
        lambda rng: {"sizes": {"a": 3, "b": 5}, "weights": {"a": 1, "b": rng.random() + 0.1}, "mixing": None},
    ),
    "packing.mixtures.make_mixture": Entry(
        make_mixture,
        lambda _: {"lengths": {"a": np.array([3, 4])}, "weights": {"a": 1}, "seed": 1, "most": 8},
    ),
}
