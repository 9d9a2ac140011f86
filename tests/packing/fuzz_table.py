"""Public functions of packing, for ``tests.fuzz``."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from lightning_thd.packing import (
    Cost,
    Packing,
    PackPlanner,
    Packs,
    Sequences,
    Spans,
    StepPlan,
    balance,
    pack_lengths,
)
from lightning_thd.packing.mixtures import Mixing, make_mixture
from lightning_thd.packing.mixtures import share_out as share_out_mixture
from lightning_thd.packing.permutation import permute
from lightning_thd.packing.sharing import Sharing, check_tiling, share_out
from tests.fuzz import Entry

LENGTHS = [1, 2, 3, 4]
PLANNER = PackPlanner(LENGTHS, 8, global_batch=Packs(2))
Call = tuple[Callable[..., Any], dict[str, Any]]
CALLS: dict[str, Call] = {
    "pack_lengths": (
        pack_lengths,
        {"lengths": LENGTHS, "capacity": 8, "algorithm": "bfd", "max_sequences": None},
    ),
    "balance": (
        balance,
        {"lengths": LENGTHS, "capacity": 8, "dp": 2, "cost": None, "num_microbatches": None}
        | {"patches": LENGTHS, "max_patches": 8},
    ),
    "Cost": (Cost, {"linear": 1.0, "quadratic": 1.0, "patch": 1.0, "patch_pair": 1.0}),
    "Cost()": (Cost(), {"lengths": LENGTHS}),
    "Packing": (Packing, {"indices": np.arange(4), "offsets": np.array([0, 2, 4])}),
    "totals": (pack_lengths(LENGTHS, 8).totals, {"values": LENGTHS}),
    "fill": (pack_lengths(LENGTHS, 8).fill, {"lengths": LENGTHS, "capacity": 8}),
    "PackPlanner": (
        PackPlanner,
        {"lengths": LENGTHS, "capacity": 8, "global_batch": Packs(1), "align": None, "cost": None}
        | {"window": 16, "oversize": "error", "tail": "pad", "seed": 0, "loss_tokens": None}
        | {"scheduler": None, "schedule": None, "counts": None, "num_workers": 0}
        | {"patches": LENGTHS, "max_patches": 8},
    ),
    "step": (PLANNER.step, {"epoch": 0, "k": 0, "dp": 1}),
    "rank": (PLANNER.step(0, 0).microbatches, {"rank": 0}),
    "tail_dropped": (PLANNER.tail_dropped, {"epoch": 0}),
    "state": (PLANNER.state, {"epoch": 0, "step": 0}),
    "resume": (PLANNER.resume, {"state": PLANNER.state(0, 0)}),
    "permute": (permute, {"positions": [0, 1], "total": 5, "key": 3}),
}


def _lengths(rng: random.Random) -> dict[str, Any]:
    return {
        "lengths": rng.choice([list, np.array])([rng.randint(1, 64) for _ in range(rng.randint(1, 20))]),
        "capacity": 64,
        "algorithm": rng.choice(["bfd", "next_fit"]),
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
        },
    ),
    "packing.sharing.check_tiling": Entry(check_tiling, lambda _: {"ranks": 4, "max_degree": 2}),
    "packing.sharing.share_out": Entry(share_out, _shared),
    "packing.mixtures.Mixing": Entry(Mixing, lambda _: {"epoch": "longest", "shares": "tokens"}),
    "packing.mixtures.share_out": Entry(
        share_out_mixture,
        lambda rng: {"sizes": {"a": 3, "b": 5}, "weights": {"a": 1, "b": rng.random() + 0.1}, "mixing": None},
    ),
    "packing.mixtures.make_mixture": Entry(
        make_mixture,
        lambda _: {"lengths": {"a": np.array([3, 4])}, "weights": {"a": 1}, "seed": 1, "most": 8},
    ),
}
