"""Steps that were trained, epoch after epoch -> how often each sequence was used, held against what is said.

The oracles count one by one, and share no code with what plans.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

from lightning_thd import Sequences
from lightning_thd.packing.mixtures import Mixing
from tests.data.lives.setups import MOST, Rows, Setup


def exact_counts(sizes: Mapping[str, int], weights: Mapping[str, float], mixing: Mixing) -> dict[str, float]:
    """Say what an epoch would take of sources of these sizes if sequences could be cut."""
    shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    expected = [sizes[name] / shares[name] for name in sizes]
    sized = {"longest": max(expected), "shortest": min(expected)}
    number = round(sized[mixing.epoch]) if isinstance(mixing.epoch, str) else mixing.epoch
    return {name: share * number for name, share in shares.items()}


class Line:
    """The steps along the line that survives."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.epochs: list[list[Rows]] = [[]]
        self.capacities: set[int] = set()  # that jobs on this line had

    def copy(self) -> Line:
        line = copy.copy(self)
        line.epochs = [list(epoch) for epoch in self.epochs]
        line.capacities = set(self.capacities)
        return line

    def add(self, rows: Rows) -> None:
        """Add the rows of a step of all ranks."""
        self.epochs[-1].append(rows)
        if isinstance(self.setup.step, Sequences):
            begun = sum(row[0] % MOST == 0 for row in rows)
            assert begun <= self.setup.step.n, f"{begun} sequences in a step of {self.setup.step}"
        self._check_shares()

    def uses(self, epochs: slice) -> Counter[int]:
        """Count the uses of every sequence, of which no token came more often than another."""
        tokens = Counter(t for epoch in self.epochs[epochs] for step in epoch for row in step for t in row)
        used = {i: count for t, count in tokens.items() if (i := t // MOST) * MOST == t}
        # What one capacity cuts off, another job of the line may have trained.
        whole = min(self.capacities) if self.setup.oversize == "truncate" else MOST
        for token, count in tokens.items():
            most = used.get(token // MOST, 0)
            assert count == most or (token % MOST >= whole and count < most), (
                f"token {token} came {count} times: {used}"
            )
        if self.setup.oversize == "split":
            for i in used:
                assert all(t in tokens for t in self.setup.ids(i)), f"a piece of sequence {i} is lost"
        return Counter(used)

    def _taking_part(self, k: int, *, certain: bool) -> list[int]:
        """Name the sequences of a source that the policies leave in, whatever capacity a job had."""
        limit = (min if certain else max)(self.capacities)
        drops = self.setup.oversize == "drop"
        every = range(self.setup.first[k], self.setup.first[k + 1])
        return [i for i in every if not drops or self.setup.length(i) <= limit]

    def _check_shares(self) -> None:
        """A mixture of streams has had its shares after any number of steps."""
        setup = self.setup
        if not (setup.stream and setup.mixed and isinstance(setup.step, Sequences)):
            return
        assert setup.mixing is not None
        if setup.mixing.dry == "rest" or len(self.capacities) > 1:
            return
        uses = self.uses(slice(None))
        of_source = Counter(setup.source_of(i) for i in uses.elements())
        for k, weight in enumerate(setup.weights):
            share = uses.total() * weight / sum(setup.weights)
            assert abs(of_source[k] - share) < 1 + 1e-9, (of_source, share)

    def end_epoch(self) -> None:
        """Hold the epoch that ended against what the setup says of it, and begin the next."""
        setup = self.setup
        number = len(self.epochs)
        all_uses = self.uses(slice(None))
        # Packs of a stream are filled from a window, in which a short source may stand several times.
        choosy = setup.mixed and setup.stream is not None and not isinstance(setup.step, Sequences)

        for k in range(len(setup.lengths)):
            counts = [all_uses[i] for i in self._taking_part(k, certain=True)]
            slack = number if setup.tail == "drop" else 1
            assert choosy or max(counts) - min(counts) <= slack, (k, counts)
            unlikely = set(range(setup.first[k], setup.first[k + 1])) - set(
                self._taking_part(k, certain=False)
            )
            assert not any(all_uses[i] for i in unlikely), "a sequence that is dropped was used"

        if setup.steps_per_epoch is not None:
            assert len(self.epochs[-1]) == setup.steps_per_epoch
        elif setup.mixed and setup.stream is None:
            self._check_mixture()
        elif setup.mixed:
            self._check_streams(all_uses, number)
        else:
            self._check_once(self.uses(slice(-1, None)))

        self.epochs.append([])

    def check_state(self, state: Any, places: dict[tuple[int, int], int]) -> None:
        """Hold a stream's state against the line: what was read is used or pending, as often as read."""
        setup = self.setup
        stream = state.get("stream")
        if setup.tail == "drop" or (setup.oversize == "drop" and len(self.capacities) > 1) or stream is None:
            return
        if setup.oversize == "drop":  # lines that died may have had other capacities
            places = {at: i for at, i in places.items() if setup.length(i) <= min(self.capacities)}
        per_source = {"files": 3, "parts": int(state["parts"])}.get(setup.stream or "", 1)
        pending = Counter((shard, row) for shard, row, _ in stream["pending"].tolist())
        uses = self.uses(slice(None))
        cursors = stream["cursors"].tolist()

        for place in {*pending, *places}:
            shard, row = place
            read = stream["rounds"][shard // per_source] + (row < cursors[shard])
            used = uses[places[place]] if place in places else 0
            assert used + pending[place] == read, (place, used, pending[place], read)

    def _check_once(self, uses: Counter[int]) -> None:
        setup = self.setup
        certain = self._taking_part(0, certain=True)
        assert all(uses[i] <= 1 for i in uses), uses
        missing = [i for i in certain if not uses[i]]
        if setup.tail == "pad":
            assert not missing, missing
        elif isinstance(setup.step, Sequences):
            assert len(missing) < setup.step.n
            assert all(len(step) >= setup.step.n for step in self.epochs[-1])

    def _check_mixture(self) -> None:
        setup = self.setup
        assert setup.mixing is not None
        sizes = {name: len(self._taking_part(k, certain=True)) for k, name in enumerate(setup.names)}
        weights = dict(zip(setup.names, setup.weights, strict=True))
        counts = Counter(setup.source_of(i) for i in self.uses(slice(-1, None)).elements())
        for k, (name, expected) in enumerate(exact_counts(sizes, weights, setup.mixing).items()):
            assert abs(counts[k] - expected) < 1 + 1e-9, (name, counts, expected)

    def _check_streams(self, uses: Counter[int], number: int) -> None:
        assert self.setup.mixing is not None
        if self.setup.mixing.dry == "stop":
            return  # the sources end at other times: shares and equal use say all there is to say
        for k in range(len(self.setup.lengths)):
            counts = [uses[i] for i in self._taking_part(k, certain=True)]
            assert min(counts) >= number, (k, counts)
            assert self.setup.mixing.dry != "rest" or max(counts) == number, (k, counts)
