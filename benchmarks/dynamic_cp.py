"""Steps of fixed and of dynamic context parallelism, simulated over real plans: time, balance, planning.

``python -m benchmarks.dynamic_cp`` prints its inputs and, for chats (up to 16k tokens) and long documents (up
to 256k) on 8, 64 and 512 ranks, the time of a step at the fixed degree that holds the longest sequence over
that of a dynamic plan; what the slowest ranks take of an even share; the milliseconds of planning; and the
fullest rank's share of its capacity, which must not pass 1. Goals: at least 1.6, at most 1.05, at most 20 ms.

A group's microbatch takes its FLOPs over its ranks at the given rate, and the bytes of its exchange at the
bandwidth of the link it lies on: within a node up to 8 ranks, between nodes above. ``keys`` gathers keys and
values, as a ring does; ``cheapest`` trades rows for heads where that moves fewer bytes. Both plans are ours,
balanced by the same FLOPs, and pay for slots, padding included, by the same formulas; a microbatch takes as
long as its slowest rank. Left out, for both: FSDP's traffic, kernels that are slower on fewer slots, overlap.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks import results
from benchmarks.balance import LLAMA_8B
from lightning_thd.flops import FlopsModel
from lightning_thd.packing import Cost, balance
from lightning_thd.packing.sharing import Sharing, share_out
from lightning_thd.parallel.context.costs import LayerSizes

Ints: TypeAlias = npt.NDArray[np.int64]
Way: TypeAlias = Literal["keys", "cheapest"]

GAIN, EVEN, PLANNING_MS = 1.6, 1.05, 20.0
STEPS = 3
# FLOP/s that training reaches on an H100 (40 % of its dense bf16 peak of 989e12); bytes/s a GPU receives
# over NVLink 4 and over 400 Gb/s InfiniBand; seconds of a small collective; ranks of a node.
FLOPS_PER_S, NODE_BYTES, NETWORK_BYTES, LATENCY_S, NODE = 400e12, 450e9, 50e9, 20e-6, 8
LAYER = LayerSizes(heads=32, kv_heads=8, head_size=128, value_size=128, element_bytes=2)
LAYERS = 32
# name -> median, sigma, shortest and longest of lognormal lengths
WAYS: tuple[Way, ...] = ("keys", "cheapest")
SHAPES = {"chat": (600, 1.0, 16, 16_384), "long": (1_300, 1.5, 1_024, 262_144)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One line of the table: slots of a rank, the largest degree, sequences of a step."""

    shape: str
    ranks: int
    capacity: int
    largest: int
    sequences: int


CASES = (
    Case(shape="chat", ranks=8, capacity=2_048, largest=8, sequences=256),
    Case(shape="chat", ranks=64, capacity=2_048, largest=8, sequences=1_024),
    Case(shape="chat", ranks=512, capacity=2_048, largest=8, sequences=4_096),
    Case(shape="long", ranks=8, capacity=32_768, largest=8, sequences=256),
    Case(shape="long", ranks=64, capacity=8_192, largest=64, sequences=1_024),
    Case(shape="long", ranks=512, capacity=8_192, largest=64, sequences=4_096),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a case gave, each the mean over its steps but for the last."""

    gain: float
    waits: float
    planning_ms: float
    fullest: float


def draw(shape: str, count: int, seed: int) -> Ints:
    """Lengths of one step."""
    median, sigma, low, high = SHAPES[shape]
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, count)
    return np.clip(drawn, low, high).astype(np.int64)


def exchange_s(slots: int, degree: int, way: Way) -> float:
    """Seconds a rank of a group takes to exchange, all layers, forward and backward."""
    if degree == 1:
        return 0.0
    moved = LAYER.gather_bytes(slots, degree)
    if way == "cheapest" and LAYER.heads % degree == 0:
        moved = min(moved, LAYER.ulysses_bytes(slots, degree))
    link = NODE_BYTES if degree <= NODE else NETWORK_BYTES
    return 2 * LAYERS * (moved / link + 4 * LATENCY_S)


def seconds(lengths: Ints, cost: Cost, degree: int, sharing: Sharing, way: Way) -> tuple[float, int]:
    """Time of a group's microbatch, and the slots of each of its ranks."""
    align = sharing.align(degree)
    slots = (
        int(lengths.sum()) if align is None else align.padded_total(int(align.padded_lengths(lengths).sum()))
    )
    padding = (slots - int(lengths.sum())) * cost.linear
    work = float(cost(lengths).sum()) + padding
    return work / degree / FLOPS_PER_S + exchange_s(slots // degree, degree, way), slots // degree


def fixed_degree(longest: int, capacity: int) -> int:
    """The power of two whose ranks hold the longest sequence."""
    return 1 << (-(-longest // capacity) - 1).bit_length()


def fixed_step(lengths: Ints, case: Case, cost: Cost, sharing: Sharing, way: Way) -> float:
    """Seconds of a step at the fixed degree, its packs balanced over the groups."""
    degree = fixed_degree(SHAPES[case.shape][3], case.capacity)
    align = sharing.align(degree)
    padded = lengths if align is None else align.padded_lengths(lengths)
    plan = balance(padded, case.capacity * degree, dp=case.ranks // degree, cost=cost)
    times = [[seconds(lengths[pack], cost, degree, sharing, way)[0] for pack in rank] for rank in plan]
    return float(np.max(times, axis=0).sum())


def run_case(case: Case, way: Way) -> Found:
    """Simulate a case."""
    cost = Cost.from_flops(FlopsModel.from_config(LLAMA_8B), longest=SHAPES[case.shape][3])
    token_s = float(cost(np.array([1024]))[0]) / 1024 / FLOPS_PER_S
    degrees = Sharing(max_degree=case.largest).degrees[1:]
    sharing = Sharing(
        max_degree=case.largest, exchange=tuple(exchange_s(4096, c, way) / 4096 / token_s for c in degrees)
    )
    gains, waits, planning, fullest = [], [], [], 0.0
    for seed in range(STEPS):
        lengths = draw(case.shape, case.sequences, seed)
        begin = time.process_time()
        plan = share_out(lengths, case.capacity, ranks=case.ranks, sharing=sharing, cost=cost)
        planning.append(time.process_time() - begin)
        slowest, busy = np.zeros(plan.num_microbatches), 0.0
        for at, degree in enumerate(plan.degree.tolist()):
            own = lengths[plan.order[plan.offsets[at] : plan.offsets[at + 1]]]
            taken, slots = seconds(own, cost, degree, sharing, way)
            slowest[plan.microbatch[at]] = max(slowest[plan.microbatch[at]], taken)
            busy += taken * degree
            fullest = max(fullest, slots / case.capacity)
        gains.append(fixed_step(lengths, case, cost, sharing, way) / slowest.sum())
        waits.append(slowest.sum() * case.ranks / busy)
    return Found(
        gain=float(np.mean(gains)),
        waits=float(np.mean(waits)),
        planning_ms=float(np.median(planning)) * 1e3,
        fullest=fullest,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    print(
        f"Llama-3.1-8B, {FLOPS_PER_S / 1e12:.0f} TFLOP/s, {NODE_BYTES / 1e9:.0f} GB/s in a node of {NODE}, "
        f"{NETWORK_BYTES / 1e9:.0f} GB/s between nodes, {LATENCY_S * 1e6:.0f} us a collective; {STEPS} steps."
    )
    for case, way in product(CASES, WAYS):
        found = run_case(case, way)
        degree = fixed_degree(SHAPES[case.shape][3], case.capacity)
        name = f"{case.shape}, {case.ranks} ranks of {case.capacity:,} slots, {way}"
        rows = (
            results.keep(f"fixed degree {degree} / dynamic, {name}", found.gain, "x", at_least=GAIN),
            results.less(f"slowest ranks / even share, {name}", found.waits, "", EVEN),
            results.less(f"planning, {name}", found.planning_ms, "ms", PLANNING_MS),
            results.less(f"fullest rank / capacity, {name}", found.fullest, "", 1.0),
        )
        for row in rows:
            print(f"{row.what}: {row.ours:.3f} {row.unit} (goal {row.goal})")


if __name__ == "__main__":
    main()
