"""Packing and planning: speed and fill beside the peers, memory and time at a hundred million and a billion.

``python -m benchmarks.packing`` prints us, the peer, the ratio and the goal. TRL's best-fit packer is run as
installed (``pip install --no-deps trl``) for the whole job; for planning alone, which it has no function for,
its own segment tree runs inside the loop its paper describes (2404.10830). Without trl both are left out, and
a line says so. ``--full`` counts the packs of all hundred million lengths (about a minute) where the default
counts ten million of them, and says so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from benchmarks.results import faster, less
from lightning_thd import _imports
from lightning_thd.packing import LengthSummary, PackPlanner, Packs, Sequences, pack_lengths
from lightning_thd.packing.permutation import keyed_hashes

IntArray = npt.NDArray[np.int64]
SHAPES = {"long": (4096, 1.1, 1024, 8192), "chat": (600, 1.0, 16, 4096)}
MIB, BILLION = 1 << 20, 1_000_000_000
GOAL_SECONDS = {1_000_000: 0.2, 10_000_000: 2.0}
GOAL_RATIO = {100_000: 15.0, 1_000_000: 40.0}
_Result = TypeVar("_Result")


def draw(shape: str, count: int, *, seed: int = 0) -> IntArray:
    """Lognormal lengths, clipped to their bounds, as the Megatron mock data set draws them."""
    mean, sigma, low, high = SHAPES[shape]
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count), low, high).astype(np.int64)


def best_of(times: int, call: Callable[[], _Result]) -> tuple[float, _Result]:
    """Seconds of the fastest run, since other processes only ever add, and what the last one gave."""
    spent = []
    for _ in range(times):
        start = time.perf_counter()
        result = call()
        spent.append(time.perf_counter() - start)
    return min(spent), result


def verdict(met: bool) -> str:
    """The word behind a goal."""
    return "met" if met else "MISSED"


def show_counts() -> None:
    """Pack counts against placing one sequence after the other, searching every pack."""
    equal = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        capacity = int(rng.integers(8, 400))
        lengths = rng.integers(1, rng.integers(2, capacity + 1), 300)
        rooms: list[int] = []
        for length in sorted(lengths.tolist(), reverse=True):
            fits = [(room, i) for i, room in enumerate(rooms) if room >= length]
            if fits:
                rooms[min(fits)[1]] -= length
            else:
                rooms.append(capacity - length)
        equal += len(pack_lengths(lengths, capacity)) == len(rooms)
    print(f"counts equal to item-wise best-fit decreasing: {equal} of 100, goal 100: {verdict(equal == 100)}")
    less("pack counts unlike item-wise best-fit, of 100", 100 - equal, "", 0)


def trl_plan(lengths: IntArray, capacity: int) -> int:
    """Packs of best-fit decreasing on TRL's segment tree: a search, a removal and an insertion each."""
    from trl.data_utils import _SegmentTree

    tree = _SegmentTree(capacity)
    tree.add(capacity)
    open_packs: dict[int, deque[list[int]]] = defaultdict(deque)
    packs = 0
    order = np.argsort(-lengths, kind="stable")
    for i, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        room = tree.search(length)
        if room < capacity:
            pack = open_packs[room].popleft()
            if not open_packs[room]:
                tree.remove(room)
        else:
            pack = []
            packs += 1
        pack.append(i)
        open_packs[room - length].append(pack)
        if room > length:
            tree.add(room - length)
    return packs


def show_speed() -> None:
    """Planning alone, by size and column, beside next-fit and TRL."""
    print("\nplanning alone, one thread, seconds (fill of the packs)")
    for shape, capacity in (("long", 8192), ("long", 32_768), ("chat", 8192), ("chat", 32_768)):
        for count in (10_000, 100_000, 1_000_000, 10_000_000):
            with_trl = count == 100_000 or (count == 1_000_000 and (shape, capacity) == ("long", 8192))
            print(speed_line(shape, capacity, count, with_trl=with_trl and _imports.available("trl")))
    if not _imports.available("trl"):
        print("TRL is not installed: pip install --no-deps trl")


def speed_line(shape: str, capacity: int, count: int, *, with_trl: bool) -> str:
    """One size of one column."""
    lengths = draw(shape, count)
    ours, packs = best_of(3, lambda: pack_lengths(lengths, capacity))
    next_fit, loose = best_of(1, lambda: pack_lengths(lengths, capacity, algorithm="next_fit"))
    line = f"{shape}@{capacity // 1024}k {count:>10,}: ours {ours:.4f} ({packs.fill(lengths, capacity):.4f})"
    line += f", next-fit {next_fit:.4f} ({loose.fill(lengths, capacity):.3f})"
    if count in GOAL_SECONDS:
        less(f"plan {count:,}, {shape}@{capacity // 1024}k", ours, "s", GOAL_SECONDS[count])
        line += f"; goal {GOAL_SECONDS[count]} s: {verdict(ours <= GOAL_SECONDS[count])}"
    if with_trl:
        theirs, their_packs = best_of(1, lambda: trl_plan(lengths, capacity))
        faster(f"plan {count:,}, {shape}@{capacity // 1024}k, TRL", ours, theirs, "s", GOAL_RATIO[count])
        line += f"; TRL {theirs:.2f}, {theirs / ours:.0f}x, goal {GOAL_RATIO[count]:.0f}x: "
        line += f"{verdict(theirs / ours >= GOAL_RATIO[count])}"
        line += f"; packs {len(packs)} and {their_packs}: {verdict(len(packs) <= their_packs)}"
    return line


def pack_tokens(tokens: npt.NDArray[np.int32], lengths: IntArray, capacity: int) -> npt.NDArray[np.int32]:
    """Plan, then lay the tokens of all packs end to end."""
    packs = pack_lengths(lengths, capacity)
    starts = np.cumsum(lengths) - lengths
    rows = zip(starts[packs.indices].tolist(), lengths[packs.indices].tolist(), strict=True)
    return np.concatenate([tokens[start : start + length] for start, length in rows])


def show_whole_job() -> None:
    """Planning and moving an int32 token column, beside TRL on the same Arrow column."""
    lengths = draw("long", 20_000)
    tokens = np.arange(int(lengths.sum()), dtype=np.int32)
    ours, _ = best_of(2, lambda: pack_tokens(tokens, lengths, 8192))
    copy, _ = best_of(2, tokens.copy)
    line = f"\nwhole job, 20,000 long sequences, {tokens.nbytes / MIB:.0f} MiB of tokens: ours {ours:.3f} s"
    line += f" (a plain copy {copy:.3f} s)"
    if _imports.available("trl"):
        import pyarrow as pa
        from trl.data_utils import _pack_bfd

        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, pa.array(tokens))})
        theirs, _ = best_of(1, lambda: _pack_bfd(table, 8192))
        line += f", TRL {theirs:.2f} s, {theirs / ours:.1f}x"
    print(line)


class VirtualLengths:
    """A billion lengths computed when asked for: 600 to 4,695 tokens by a hash of the position."""

    summary = LengthSummary(count=BILLION, total=2647 * BILLION, shortest=600, longest=4695, digest="virtual")

    def __len__(self) -> int:
        return BILLION

    def __getitem__(self, positions: IntArray) -> IntArray:
        hashes = keyed_hashes(positions.astype(np.uint64), 1)
        return 600 + (hashes & np.uint64(4095)).astype(np.int64)


def show_memory(full: bool) -> None:
    """Peak memory and counting time over lengths in a memory map, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lengths.npy"
        mapped = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint16, shape=(100_000_000,))
        for start in range(0, len(mapped), 1_000_000):
            mapped[start : start + 1_000_000] = draw("long", 1_000_000, seed=start)
        mapped.flush()
        counted = "100000000" if full else "10000000"
        command = [sys.executable, "-m", "benchmarks.packing", "--child", str(path), counted]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    *lines, figures = done.stdout.splitlines()
    print("\n".join(lines))
    core_s, peak = map(float, figures.split())
    less("count the packs of 100M lengths", core_s, "core s", 120)
    less("peak memory over 100M mapped lengths", peak, "MiB", 1024)


def peak_mib() -> float:
    """Most memory this process ever held; unlike getrusage, not what its parent held before it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def plan_mapped(path: str, counted: int) -> None:
    """What ``show_memory`` runs: a planner of either kind over the memory map."""
    lengths = np.load(path, mmap_mode="r")
    before = peak_mib()
    start = time.perf_counter()
    planner = PackPlanner(lengths, 8192, global_batch=Sequences(512))
    made = time.perf_counter() - start
    planner.step(0, 1_000, 64)
    start = time.process_time()
    packs = PackPlanner(lengths[:counted], 8192, global_batch=Packs(64))
    spent = time.process_time() - start
    packs.step(0, 1_000, 64)
    peak = peak_mib()
    print(f"\n100M memory-mapped lengths: checked and hashed in {made:.1f} s")
    per_100m = spent * 1e8 / counted
    print(f"  packs of {counted:,} counted in {spent:.1f} core seconds, {per_100m:.0f} a 100M", end="")
    print(f"; goal 120: {verdict(per_100m <= 120)}")
    print(f"  peak memory {peak:.0f} MiB, {before:.0f} of them the imports, 191 the map itself", end="")
    print(f"; goal 1024: {verdict(peak < 1024)}")
    print(per_100m, peak)  # for the parent


def show_billion() -> None:
    """Random steps of random epochs of a billion lengths."""
    lengths = VirtualLengths()
    rng = np.random.default_rng(0)
    planner = PackPlanner(lengths, 8192, global_batch=Sequences(512))
    wanted = [(int(rng.integers(9)), int(rng.integers(len(planner)))) for _ in range(50)]
    spent = [best_of(2, partial(planner.step, epoch, k, 64))[0] for epoch, k in wanted]
    mean = float(np.mean(spent))
    print(f"\n1 billion virtual lengths: Sequences(512) {mean * 1e3:.2f} ms a step", end="")
    print(f"; goal 5: {verdict(mean <= 5e-3)}")
    less("a step of Sequences(512) in 1 billion", mean * 1e3, "ms", 5)
    mean = float(np.mean([time_packs_step(lengths, *at) for at in wanted[:5]]))
    less("a step of Packs(64) in 1 billion", mean * 1e3, "ms", 50)
    print(f"  Packs(64), another epoch each time: {mean * 1e3:.1f} ms a step", end="")
    print(f"; goal 50: {verdict(mean <= 0.05)} (windows that no step visits carry an estimated count)")


def time_packs_step(lengths: VirtualLengths, epoch: int, k: int) -> float:
    """Seconds of one step, after the counts of the windows it visits were put right.

    Counting a billion takes ten minutes. The time of a step depends on the number of counts and on the
    windows it visits alone, so the others carry an estimate; a step refuses a wrong count and names its own.
    """
    counts = np.full(-(-BILLION // 4096), 1400, np.uint32)
    while True:
        planner = PackPlanner(lengths, 8192, global_batch=Packs(64), counts=counts)
        step = k % (len(planner) - 1)
        start = time.perf_counter()
        try:
            planner.step(epoch, step, 64)
        except ValueError as err:
            words = str(err).split()
            counts[int(words[1])] = int(words[3])
        else:
            return time.perf_counter() - start


def main(argv: list[str] | None = None) -> None:
    """Print every part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="count the packs of all 100M lengths")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        plan_mapped(arguments.child[0], int(arguments.child[1]))
        return
    show_counts()
    show_speed()
    show_whole_job()
    show_memory(arguments.full)
    show_billion()


if __name__ == "__main__":
    main()
