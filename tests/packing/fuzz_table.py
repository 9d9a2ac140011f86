"""Public functions of packing, for ``tests.fuzz``."""

from __future__ import annotations

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
from lightning_thd.packing.permutation import permute
from lightning_thd.packing.sharing import Sharing, check_tiling, share_out
from tests.fuzz import Entry

LENGTHS = [1, 2, 3, 4]
PLANNER = PackPlanner(LENGTHS, 8, global_batch=Packs(2))
PLAN = PLANNER.step(0, 0, 2)
ONE = {"lengths": LENGTHS, "capacity": 8}
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "pack_lengths": (pack_lengths, {**ONE, "algorithm": "bfd", "max_sequences": None}),
    "balance": (
        balance,
        {**ONE, "dp": 2, "cost": None, "num_microbatches": None, "patches": LENGTHS, "max_patches": 8},
    ),
    "Cost": (Cost, {"linear": 1.0, "quadratic": 1.0, "patch": 1.0, "patch_pair": 1.0}),
    "Cost()": (Cost(), {"lengths": LENGTHS}),
    "Packing": (Packing, {"indices": np.arange(4), "offsets": np.array([0, 2, 4])}),
    "totals": (pack_lengths(LENGTHS, 8).totals, {"values": LENGTHS}),
    "fill": (pack_lengths(LENGTHS, 8).fill, ONE),
    "PackPlanner": (
        PackPlanner,
        {**ONE, "global_batch": Packs(1), "align": None, "cost": None}
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
    "Packs": (Packs, {"n": 3}),
    "Sequences": (Sequences, {"n": 3}),
    "Spans": (
        Spans,
        {"index": np.array([0, 1]), "start": np.array([0, 2]), "stop": np.array([3, 4])}
        | {"continued": np.array([False, True])},
    ),
    "StepPlan": (StepPlan, {name: getattr(PLAN, name) for name in StepPlan.__dataclass_fields__}),
    "sharing.Sharing": (
        Sharing,
        {"max_degree": 4, "layout": "dual_chunk", "tp": 1, "sequence_parallel": False, "waits": "step"},
    ),
    "sharing.check_tiling": (check_tiling, {"ranks": 4, "max_degree": 2}),
    "sharing.share_out": (
        share_out,
        {"lengths": [3, 70, 9], "capacity": 64, "ranks": 4, "sharing": Sharing(max_degree=2), "cost": Cost()},
    ),
    "mixtures.Mixing": (Mixing, {"epoch": "longest", "shares": "tokens"}),
    "mixtures.make_mixture": (
        make_mixture,
        {"lengths": {"a": np.array([3, 4])}, "weights": {"a": 1}, "seed": 1, "most": 8},
    ),
}
TABLE = {
    f"packing.{n}": Entry(call, lambda _, right=right: dict(right)) for n, (call, right) in CALLS.items()
}
