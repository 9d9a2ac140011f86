"""A random data set and how it is packed -> its loaders on any ranks, and what every sequence becomes.

Every token of a case tells its sequence and its place in it, so that nothing can be lost, doubled or mixed up
unseen: token j of sequence i is ``i * MOST + j``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from lightning_thd import Packs, Sequences, THDDataModule
from lightning_thd.data.loader import THDLoader
from lightning_thd.data.streams import Stream
from lightning_thd.packing.mixtures import Mixing

MOST = 64  # tokens of a sequence, one less at most
SMALLEST = 32  # capacity of a pack
_SHARDS = 3


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One data set and all that stays the same while jobs on it come and go."""

    lengths: tuple[tuple[int, ...], ...]  # tokens of the sequences of each source
    weights: tuple[float, ...]  # of each source; a single one is no mixture
    stream: str | None  # of what kind the stream is that gives them; None for data with a length
    step: Packs | Sequences  # what an optimizer step takes
    capacity: int  # of a pack, at first
    oversize: str  # what becomes of longer sequences
    tail: str  # what becomes of the last step of an epoch
    window: int  # sequences that are packed together, or that a rank of a stream keeps at hand
    seed: int  # of every shuffle
    mixing: Mixing | None  # how sources make an epoch
    shuffle: int  # sequences of a stream that a rank draws from
    steps_per_epoch: int | None  # of a stream
    batches: bool  # a loader hands out packs one by one, as to a Trainer, not whole steps

    @property
    def mixed(self) -> bool:
        return len(self.lengths) > 1

    @property
    def names(self) -> list[str]:
        return [f"s{k}" for k in range(len(self.lengths))]

    @property
    def first(self) -> list[int]:
        """The number of the first sequence of each source, and of one past the last."""
        return np.cumsum([0, *map(len, self.lengths)]).tolist()

    def length(self, i: int) -> int:
        return [length for source in self.lengths for length in source][i]

    def source_of(self, i: int) -> int:
        return int(np.searchsorted(self.first, i, side="right")) - 1

    def ids(self, i: int) -> list[int]:
        return [i * MOST + j for j in range(self.length(i))]

    def samples(self, source: int) -> list[dict[str, Any]]:
        return [{"input_ids": self.ids(i)} for i in range(self.first[source], self.first[source + 1])]


class Records:
    """Begins an iterator over the sequences of a source, always the same."""

    def __init__(self, setup: Setup, source: int) -> None:
        self.setup = setup
        self.source = source

    def __call__(self) -> Iterator[dict[str, Any]]:
        return iter(self.setup.samples(self.source))


class Parts(Records):
    """As ``Records``, in as many parts as it is asked for."""

    def __call__(self, part: int, parts: int) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        return iter(self.setup.samples(self.source)[part::parts])


class WithState(IterableDataset[dict[str, Any]]):
    """An iterable that knows where it stands."""

    def __init__(self, setup: Setup, source: int) -> None:
        self.setup = setup
        self.source = source
        self.at = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        start = self.at
        self.at = 0
        for self.at, sample in enumerate(self.setup.samples(self.source)[start:], start + 1):  # noqa: B020
            yield sample
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = int(state["at"])


STREAMS = ("files", "function", "parts", "state")


def write(setup: Setup, folder: Path) -> None:
    """Write the shards of a stream of files, of very different sizes, one of them empty."""
    if setup.stream != "files":
        return
    for source in range(len(setup.lengths)):
        samples = setup.samples(source)
        cuts = [0, len(samples) // 4, len(samples) // 4, len(samples)]
        for shard in range(_SHARDS):
            lines = [json.dumps(sample) + "\n" for sample in samples[cuts[shard] : cuts[shard + 1]]]
            (folder / f"{source}-{shard}.jsonl").write_text("".join(lines))


def _source(setup: Setup, folder: Path, source: int) -> Any:
    kinds = {"function": Records, "parts": Parts, "state": WithState}
    if setup.stream is None:
        return [{"input_ids": np.array(sample["input_ids"])} for sample in setup.samples(source)]
    data = f"{folder}/{source}-*.jsonl" if setup.stream == "files" else kinds[setup.stream](setup, source)
    return Stream(
        data, window=setup.window, shuffle_buffer=setup.shuffle, steps_per_epoch=setup.steps_per_epoch
    )


def loader_of(
    setup: Setup, folder: Path, *, capacity: int, rank: int = 0, dp: int = 1, workers: int = 0
) -> THDLoader:
    """Make the training loader of one rank."""
    parts = [_source(setup, folder, source) for source in range(len(setup.lengths))]
    mixture = dict(zip(setup.names, zip(parts, setup.weights, strict=True), strict=True))
    data = THDDataModule(
        mixture if setup.mixed else parts[0],
        capacity=capacity,
        global_batch=setup.step,
        oversize=setup.oversize,
        tail=setup.tail,
        window=setup.window,
        seed=setup.seed,
        mixing=setup.mixing,
        num_workers=workers,
    )

    accumulate = setup.step.n // dp if isinstance(setup.step, Packs) else 1
    data.attach(rank=rank, ranks=dp, accumulate=accumulate)
    data.setup("fit")
    return data.train_dataloader() if setup.batches else data.train_steps()


Rows = list[tuple[int, ...]]


@dataclass(frozen=True)
class StepOfRank:
    """What one rank's part of a step holds, in plain values: by microbatch rows, targets, slots and scales.

    ``ids`` are those by which the loader knows the rows.
    """

    ids: list[list[int]]
    rows: list[Rows]
    targets: list[Rows]
    slots: list[int]
    scales: list[float]


def step_of_rank(microbatches: Any) -> StepOfRank:
    """Read the tokens themselves, not what a batch says they are."""
    ids = [batch.unpack(batch.input_ids) for batch in microbatches]
    targets = [batch.unpack(batch.targets) for batch in microbatches]
    return StepOfRank(
        [list(batch.sequence_ids) for batch in microbatches],
        [[tuple(row.tolist()) for row in batch if len(row)] for batch in ids],
        [[tuple(row.tolist()) for row in batch if len(row)] for batch in targets],
        [len(batch.input_ids) for batch in microbatches],
        [float(batch.loss_scale) for batch in microbatches],
    )


def check_step(setup: Setup, of_ranks: list[StepOfRank], capacity: int) -> None:
    """Hold one step against what its sequences are: whole, in packs that fit, with exact scales."""
    assert len({len(rank.rows) for rank in of_ranks}) == 1, "ranks run different numbers of microbatches"
    goals = 0
    for rank in of_ranks:
        for rows, targets, slots in zip(rank.rows, rank.targets, rank.slots, strict=True):
            assert slots <= capacity or (setup.oversize == "own_pack" and len(rows) == 1), slots
            for row, goal in zip(rows, targets, strict=True):
                _check_row(setup, row, goal, capacity)
                goals += sum(target != -100 for target in goal)
    scale = len(of_ranks) * len(of_ranks[0].rows) / goals if goals else 0.0
    for rank in of_ranks:
        assert all(abs(actual - scale) <= 1e-12 * scale for actual in rank.scales), (rank.scales, scale)


def _check_row(setup: Setup, row: tuple[int, ...], goal: tuple[int, ...], capacity: int) -> None:
    i, start = divmod(row[0], MOST)
    ids = setup.ids(i)
    if setup.oversize == "split":
        assert start % capacity == 0, start
        expected = ids[start : start + capacity]
    else:
        assert start == 0, (i, start)
        expected = ids[:capacity] if setup.oversize == "truncate" else ids
        assert setup.oversize == "own_pack" or len(expected) <= capacity
    assert list(row) == expected
    follows = ids[start + len(row)] if setup.oversize == "split" and start + len(row) < len(ids) else -100
    assert list(goal) == [*expected[1:], follows]


@st.composite
def setups(draw: Any, *, kinds: tuple[str, ...] = ("map", "mixture", "stream", "streams")) -> Setup:
    """Draw a data set and how it is packed, of which every epoch has a step."""
    kind = draw(st.sampled_from(kinds))
    streamed = kind in ("stream", "streams")
    oversize = draw(
        st.sampled_from(["error", "drop", "truncate", "own_pack", *([] if streamed else ["split"])])
    )
    longest = SMALLEST if oversize == "error" else MOST - 1
    number = draw(st.integers(2, 3)) if kind in ("mixture", "streams") else 1
    lengths = []

    for _ in range(number):
        more = draw(st.lists(st.integers(1, longest), min_size=0 if number > 1 else 3, max_size=20))
        lengths.append((draw(st.integers(1, SMALLEST)), *more))

    weights = tuple(draw(st.sampled_from([1.0, 2.0, 0.3])) for _ in lengths)
    packs = draw(st.booleans())
    step = Packs(4) if packs else Sequences(draw(st.integers(1, 9)))
    usable = sum(length <= SMALLEST for source in lengths for length in source)
    drops = number == 1 and not packs and usable >= step.n and draw(st.booleans())
    return Setup(
        lengths=tuple(lengths),
        weights=weights,
        stream=draw(st.sampled_from(STREAMS)) if streamed else None,
        step=step,
        capacity=draw(st.sampled_from([SMALLEST, 48, 64])),
        oversize=oversize,
        tail="drop" if drops else "pad",
        window=draw(st.sampled_from([1, 3, 16])),
        seed=draw(st.integers(0, 99)),
        mixing=_mixing(draw, streamed) if number > 1 else None,
        shuffle=draw(st.sampled_from([0, 5])) if streamed else 0,
        steps_per_epoch=draw(st.sampled_from([None, None, 3])) if streamed and not drops else None,
        batches=packs and not streamed and draw(st.booleans()),
    )


def _mixing(draw: Any, streamed: bool) -> Mixing:
    if streamed:
        return Mixing(dry=draw(st.sampled_from(["restart", "stop", "rest"])))
    return draw(st.sampled_from([Mixing(), Mixing(epoch=30)]))


def reference(setup: Setup, folder: Path, capacity: int, epochs: int) -> list[list[list[tuple[int, ...]]]]:
    """Read epochs on one rank, in one process, undisturbed: of every step its rows, sorted."""
    loader = loader_of(setup, folder, capacity=capacity)
    per_step = setup.step.n if setup.batches and isinstance(setup.step, Packs) else 1
    steps_of_epochs = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(epochs):
            batches = list(loader)
            steps = [batches[k : k + per_step] for k in range(0, len(batches), per_step)]
            of_steps = [step_of_rank(step if setup.batches else step[0].microbatches) for step in steps]
            steps_of_epochs.append([sorted(row for rows in one.rows for row in rows) for one in of_steps])
    return steps_of_epochs
