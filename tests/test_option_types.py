"""Every flag and number of every public function, given a value of another type, is refused."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch

from tests.fuzz import REFUSALS, Entry, tables

# What the library itself makes and hands out; its fields are results, not options.
RECORDS = {
    "cuda_graph.GraphStats",
    "flops.FlopsBreakdown",
    "flops.Member",
    "packing.StepPlan",
    "parallel.pipeline.Schedule",
    "parallel.pipeline.Split",
}
# What these options take besides the type that is drawn for them.
TAKEN: dict[tuple[str, str], tuple[type, ...]] = {
    ("callbacks.cuda_graph.CUDAGraphCallback", "max_sequences"): (int, list),
    ("callbacks.THDThroughputMonitor", "peak"): (int,),
    ("data.streams.Stream", "source"): (int, list, torch.Tensor, object),  # refused when it is opened
    ("integrations.PackedLoop", "peak"): (int,),
    ("integrations.prepare_fabric", "peak"): (int,),
    ("integrations.prepare_thd", "peak"): (int,),
    ("integrations.ThroughputCallback", "peak"): (int,),
    ("loss.fused_linear_cross_entropy", "chunk"): (int,),
    ("loss.fused_linear_distillation", "chunk"): (int,),
    ("loss.fused_linear_distillation of top k", "chunk"): (int,),
    ("loss.fused_linear_logprobs", "chunk"): (int,),
    ("packing.mixtures.Mixing", "epoch"): (int,),
    ("strategies.THDModelParallelStrategy", "data_parallel_size"): (int,),
}
OTHERS: dict[type, tuple[Any, ...]] = {
    bool: ("no", 2, torch.ones(2)),
    int: ("3", [1], torch.ones(2), object()),
    float: ("3", [1], torch.ones(2), object()),
    type(None): (object(), 3.5, [object()]),
}
TABLES = {name: entry for name, entry in tables().items() if name not in RECORDS}


def drawn(entry: Entry, seed: int = 0) -> dict[str, Any]:
    arguments: dict[str, Any] = entry.good(random.Random(seed))
    return arguments


@pytest.mark.parametrize("name", TABLES)
def test_options_of_another_type_are_refused(name: str) -> None:
    entry = TABLES[name]
    taken = []

    for option in drawn(entry):
        kinds = [type(drawn(entry, s).get(option)) for s in range(20)]
        seed = next((s for s, kind in enumerate(kinds) if kind in OTHERS and kind is not type(None)), 0)
        if kinds[seed] not in OTHERS or (kinds[seed] is type(None) and set(kinds) != {type(None)}):
            continue
        for other in OTHERS[type(drawn(entry, seed)[option])]:
            if type(other) in TAKEN.get((name, option), ()):
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    entry.call(**{**drawn(entry, seed), option: other})
            except (*REFUSALS, RuntimeError, *entry.also):  # torch refuses tensors as options itself
                continue
            taken.append(f"{option}={other!r:.30}")

    assert not taken
