"""Segment lengths and offsets: ours, the one-hot way, the dense mask; then the padding that alignment costs.

``python -m benchmarks.segments`` prints, for T from 1,024 to 1,048,576, time and peak scratch a slot of each
way in one run, the slope of ours, and the waste of our alignment rule beside that of SkyRL, verl and NeMo-RL.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.results import faster, keep, less
from lightning_thd.alignment import Alignment, Recipe
from lightning_thd.segments import MaskFamily, seqlens_offsets

FAMILIES: tuple[MaskFamily, ...] = ("causal", "causal_bottom_right", "padding")
TOTALS = [1 << k for k in range(10, 21)]
SEGMENTS = [16, 256, 4096]
# A way is shown until its largest tables would pass these. One-hot is cut for time alone: it grows as T x M.
ONE_HOT_BYTES, DENSE_BYTES = 512 << 20, 2 << 30
GOAL_SPEEDUP, GOAL_SLOPE = 40.0, 1.1
GOAL_BYTES = {"causal": 24, "causal_bottom_right": 40, "padding": 24}

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def make_inputs(total: int, num_segments: int) -> Inputs:
    """Segments of one length with padding behind each; keys are a copy, so that ours takes the long way."""
    length = total // num_segments
    slot = torch.arange(total, dtype=torch.int32)
    ids = (slot // length + 1).where(slot % length < max(1, length - length // 16), 0)
    return ids, ids.clone(), slot % length, (slot % length).clone()


def run_lengths(ids: Tensor) -> Tensor:
    """The length of the run of equal ids that each slot stands in."""
    _, runs = torch.unique_consecutive(ids, return_counts=True)
    return torch.repeat_interleave(runs, runs).to(torch.int32)


def keys(ids: Tensor, pos: Tensor, mask: MaskFamily) -> Tensor:
    """The number by which a query reaches a key, as in ``lightning_thd.segments``."""
    if mask == "padding":
        return torch.zeros_like(ids)
    return pos if mask == "causal" else pos - run_lengths(ids)


def run_starts(ids: Tensor, num_segments: int) -> Tensor:
    """Where runs that are not padding start, then -1."""
    starts = torch.cat([ids[:1] != 0, (ids[1:] != ids[:-1]) & (ids[1:] != 0)]).nonzero()[:, 0]
    return torch.nn.functional.pad(starts, (0, num_segments + 1 - len(starts)), value=-1)


def one_hot(inputs: Inputs, mask: MaskFamily, num_segments: int) -> list[Tensor]:
    """Limits and counts of every segment from [M, T] tables, the fastest of the layouts tried here."""
    ids_q, ids_kv, pos_q, pos_kv = inputs
    keys_q, keys_kv = keys(ids_q, pos_q, mask), keys(ids_kv, pos_kv, mask)
    numbers = torch.arange(1, num_segments + 1, dtype=ids_q.dtype)[:, None]
    hot_q, hot_kv = ids_q == numbers, ids_kv == numbers
    lowest = torch.where(hot_kv, keys_kv, 2**31 - 1).amin(-1)
    highest = torch.where(hot_q, keys_q, -(2**31)).amax(-1)
    seen_q = (ids_q != 0) & (keys_q >= lowest[(ids_q - 1).clamp(min=0)])
    seen_kv = (ids_kv != 0) & (keys_kv <= highest[(ids_kv - 1).clamp(min=0)])
    return [
        (hot_q & seen_q).sum(-1, dtype=torch.int32),
        (hot_kv & seen_kv).sum(-1, dtype=torch.int32),
        run_starts(ids_q.where(seen_q, 0), num_segments),
        run_starts(ids_kv.where(seen_kv, 0), num_segments),
    ]


def dense(inputs: Inputs, mask: MaskFamily, num_segments: int) -> list[Tensor]:
    """The T x T mask itself."""
    ids_q, ids_kv, pos_q, pos_kv = inputs
    seen = keys(ids_q, pos_q, mask)[:, None] >= keys(ids_kv, pos_kv, mask)
    seen &= ids_q[:, None] == ids_kv
    seen &= (ids_q != 0)[:, None]
    row, col = ids_q.where(seen.any(1), 0), ids_kv.where(seen.any(0), 0)
    lengths = [torch.bincount(x, minlength=num_segments + 1)[1:] for x in (row, col)]
    return [*lengths, *(run_starts(x, num_segments) for x in (row, col))]


def ours(inputs: Inputs, mask: MaskFamily, num_segments: int) -> list[Tensor]:
    """The four fields that all ways have."""
    return list(seqlens_offsets(*inputs, mask=mask, max_segments=num_segments)[:4])


def once(call: Callable[[], list[Tensor]]) -> tuple[float, int, list[Tensor]]:
    """Seconds, highest sum of live bytes by torch's own allocator events, and results of one call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
        start = time.perf_counter()
        results = call()
        seconds = time.perf_counter() - start
    held = peak = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return seconds, peak, results


def measure(
    way: Callable[[Inputs, MaskFamily, int], list[Tensor]],
    inputs: Inputs,
    mask: MaskFamily,
    num_segments: int,
) -> tuple[float, float, list[Tensor]]:
    """Microseconds (median of 0.2 s of calls; one call where it is longer), peak bytes a slot, results."""

    def call() -> list[Tensor]:
        return way(inputs, mask, num_segments)

    seconds, peak, results = once(call)
    times = [seconds]
    if seconds < 0.2:
        times = []
        while len(times) < 3 or (sum(times) < 0.2 and len(times) < 50):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6, peak / inputs[0].numel(), results


def compare(total: int, num_segments: int, mask: MaskFamily) -> tuple[float, float, float | None]:
    """Print one line; give our time, our bytes a slot, and the speed-up over one-hot."""
    inputs = make_inputs(total, num_segments)
    us, scratch, expected = measure(ours, inputs, mask, num_segments)
    cells = [f"{us:10.0f} {scratch:7.1f}"]
    speedup = None
    for way, needed, limit in (
        (one_hot, 6 * total * num_segments, ONE_HOT_BYTES),
        (dense, 2 * total * total, DENSE_BYTES),
    ):
        if way is dense and num_segments != 256:  # its cost does not depend on the segments
            continue
        if needed > limit:
            cells.append(f"{'-':>11} {needed / 2**30:6.1f}G {'-':>8}")
            continue
        peer_us, peer_scratch, results = measure(way, inputs, mask, num_segments)
        assert all(torch.equal(a.long(), b.long()) for a, b in zip(expected, results, strict=True))
        cells.append(f"{peer_us:11.0f} {peer_scratch:7.0f} {peer_us / us:7.1f}x")
        if way is one_hot:
            speedup = peer_us / us
    print(f"{mask:20s} {total:8d} {num_segments:5d} | {' | '.join(cells)}", flush=True)
    return us, scratch, speedup


def segments_table() -> bool:
    """Print every size and the verdicts."""
    print(f"{'':36s}|       ours us  B/slot | one-hot us  B/slot    ratio | dense us   B/slot    ratio")
    verdicts: list[tuple[str, float, str, float, bool]] = []
    for mask in FAMILIES:
        times = []
        for num_segments in SEGMENTS:
            for total in TOTALS:
                if total < 4 * num_segments or (num_segments != 256 and total.bit_length() % 2 == 0):
                    continue
                us, scratch, speedup = compare(total, num_segments, mask)
                if num_segments == 256:
                    times.append((total, us))
                if (total, num_segments) == (131_072, 256) and speedup is not None:
                    goal = GOAL_BYTES[mask]
                    verdicts.append(
                        (f"{mask} x one-hot", speedup, ">=", GOAL_SPEEDUP, speedup >= GOAL_SPEEDUP)
                    )
                    verdicts.append((f"{mask} B/slot", scratch, "<=", goal, scratch <= goal))
        large = [(t, us) for t, us in times if t >= 16_384]
        slope = float(np.polyfit(*np.log(np.asarray(large)).T, 1)[0])
        verdicts.append((f"{mask} slope from 16k", slope, "<=", GOAL_SLOPE, slope <= GOAL_SLOPE))
    print("\nGoals at T=131,072 with 256 segments")
    for name, value, sign, goal, met in verdicts:
        unit = "B" if "B/slot" in name else "x" if "one-hot" in name else ""
        limits = {"at_least": goal} if sign == ">=" else {"at_most": goal}
        keep(f"T=131,072, {name}", value, unit, **limits)
        print(f"  {name:32s} {value:8.2f}   goal {sign} {goal:g}   {'met' if met else 'MISSED'}")
    return all(verdict[-1] for verdict in verdicts)


# --- alignment --------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """One parallel layout with sequence parallelism, and one recipe."""

    tp: int
    cp: int
    recipe: Recipe


def peer_multiples(setting: Setting) -> dict[str, tuple[int, int]]:
    """What each project pads sequences and packs to: facts read from its source, as formulas."""
    tp, cp, recipe = setting
    both = 2 * tp * cp if cp > 1 else tp
    dual = 2 * cp if cp > 1 else 1
    align = Alignment.for_(cp=cp, tp=tp, sequence_parallel=True, recipe=recipe)
    divisor = 128 if recipe == "blockwise" else 16
    return {
        "ours": (align.sequence_multiple, align.total_multiple),
        "each to lcm": (math.lcm(2 * cp * tp, 16 * cp), 1),
        "SkyRL": (math.lcm(both, 16 * cp), 1),
        "verl": (math.lcm(16, both), 128 * both),
        "NeMo-RL": (dual * tp, divisor * dual * tp),
    }


def chat_packs(rng: np.random.Generator, num_packs: int, capacity: int = 16_384) -> list[np.ndarray]:
    """Chats of mean 300 tokens, log-normal, filled into packs in order."""
    lengths = np.clip(rng.lognormal(np.log(300) - 0.5, 1.0, num_packs * 60).astype(np.int64), 8, 8192)
    packs: list[np.ndarray] = []
    start = 0
    ends = np.cumsum(lengths)
    while len(packs) < num_packs:
        stop = int(np.searchsorted(ends, (ends[start - 1] if start else 0) + capacity, side="right"))
        packs.append(lengths[start:stop])
        start = stop
    return packs


def waste_table() -> bool:
    """Print the waste of every rule, and the share of packs it leaves that some kernel refuses."""
    packs = chat_packs(np.random.default_rng(0), 200)
    real = sum(int(pack.sum()) for pack in packs)
    print(
        "\nPadding of chats of mean 300 in packs of 16,384 tokens, per cent "
        "(share of packs that are no multiple of what the kernels want)"
    )
    met = True
    for setting in (
        Setting(1, 1, "tensorwise"),
        Setting(2, 4, "tensorwise"),
        Setting(4, 1, "tensorwise"),
        Setting(4, 2, "blockwise"),
        Setting(2, 2, "mxfp8"),
        Setting(4, 2, "nvfp4"),
    ):
        multiple = Alignment.for_(
            cp=setting.cp, tp=setting.tp, sequence_parallel=True, recipe=setting.recipe
        ).total_multiple
        cells, wasted = [], {}
        for name, (each, whole) in peer_multiples(setting).items():
            slots = [-(-int((-(-pack // each) * each).sum()) // whole) * whole for pack in packs]
            refused = sum(n % multiple > 0 for n in slots) / len(slots)
            wasted[name] = sum(slots) / real - 1
            cells.append(f"{name} {100 * wasted[name]:5.2f} ({100 * refused:3.0f}%)")
            met &= name != "ours" or refused == 0
        if setting == (2, 4, "tensorwise"):
            half = wasted["ours"] <= wasted["each to lcm"] / 2
            faster(
                "padding at tp2 cp4, each to lcm", 100 * wasted["ours"], 100 * wasted["each to lcm"], "%", 2
            )
            cells.append(f"goal <= half of each to lcm: {'met' if half else 'MISSED'}")
            met &= half
        print(f"  tp{setting.tp} cp{setting.cp} {setting.recipe:10s} | {' | '.join(cells)}")
    return met


def random_batches(num_batches: int = 10_000) -> bool:
    """Check random batches over recipes, tp, cp and sequence parallel against every rule."""
    rng = np.random.default_rng(1)
    recipes: list[Recipe | None] = [None, "tensorwise", "blockwise", "mxfp8", "nvfp4"]
    violations = bare = real = slots = 0
    for _ in range(num_batches):
        cp, tp = int(rng.choice([1, 2, 4, 8])), int(rng.choice([1, 2, 4, 8]))
        align = Alignment.for_(
            cp=cp, tp=tp, sequence_parallel=bool(rng.integers(2)), recipe=recipes[rng.integers(5)]
        )
        lengths = rng.integers(1, 1200, size=rng.integers(1, 64))
        padded = align.padded_lengths(lengths)
        total = align.padded_total(int(padded.sum()))
        violations += total % align.total_multiple > 0
        violations += bool((padded % align.sequence_multiple).any())
        bare += int(lengths.sum()) % align.total_multiple > 0
        real, slots = real + int(lengths.sum()), slots + total
    print(
        f"\n{num_batches:,} random batches over recipes x tp x cp x sequence parallel: {violations} "
        f"violations (unpadded {bare}), waste {100 * (slots / real - 1):.2f} per cent"
    )
    less("violations in 10,000 random batches", violations, "", 0)
    return violations == 0


def main(argv: list[str] | None = None) -> int:
    """Print everything; 1 where a goal was missed."""
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, one thread\n")
    met = [segments_table(), waste_table(), random_batches()]
    return 0 if all(met) else 1


if __name__ == "__main__":
    raise SystemExit(main())
