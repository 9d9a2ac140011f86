"""Shards read by all ranks -> the steps of a stream, which all ranks make at the same time.

The engine gathers a table of the sequences that all ranks have read (``intake``), orders them and plans steps
(``schedule``). All ranks plan from the same table, then send each other the sequences (``ranks``). In a
mixture, sources take turns by their shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_thd.batch import THDStep
from lightning_thd.data.loader import RankStep
from lightning_thd.data.streams.intake import Intake, Settings
from lightning_thd.data.streams.ranks import Wire, exchange
from lightning_thd.data.streams.schedule import (
    IntArray,
    Ledger,
    PlannedStep,
    ledger_of,
    pending_rows,
    plan_steps,
    restored_ledger,
    rows_of,
)
from lightning_thd.packing import Sequences
from lightning_thd.packing.mixtures import take_turns
from lightning_thd.packing.plan import StepScales

BoolArray = npt.NDArray[np.bool_]

ROW_BITS = 40  # The low 40 bits of a sequence id are its row, and the others are the index of its shard.


class Engine:
    """Makes the steps of a stream, pass after pass. All reading ranks call its methods in the same order."""

    def __init__(
        self, settings: Settings, wire: Wire, state: dict[str, Any] | None = None, *, same: bool = False
    ) -> None:
        self._settings = settings
        self._wire = wire
        self._intake = Intake(settings, wire)
        self.counts = self._intake.counts  # how many records were bad, or left out or changed by policies

        if state is None:
            self.ledger = _first_ledger(settings)
        else:
            self.ledger = ledger_of(state)
            self._intake.marks = {place: [mark] for place, mark in state["marks"].items()}
            self._intake.forms = state["forms"]
            self._intake.restore_counts(state)
            if same:  # it has a row for each rank
                self._intake.turns = state["turns"].numpy().copy()

        # The state from which the first step resumes, and whether its planned steps fit this job.
        self._restore = None if state is None else (state, same)

        count = len(settings.sources)
        self._gave = np.zeros(count, bool)  # sources that gave a sequence in their present pass
        self._next: PlannedStep | None = None  # the step that was planned ahead
        self._to_open = list(range(count))  # sources whose next pass has not begun
        self._closed = False  # after the end of a pass or an error, no step is made until ``open_pass``
        self.open_pass()

    def open_pass(self) -> None:
        """Begin the next pass over sources that ended; the calling thread starts their workers."""
        for number in self._to_open:
            self._open(number)
        self._to_open = []
        self._closed = False

    def _open(self, number: int) -> None:
        """Begin a pass over one source, or continue it at the cursors of its shards."""
        source = self._settings.sources[number]
        ledger = self.ledger
        # In a resumed pass whose records were all bad until now, this is true, and the next pass finds out.
        self._gave[number] = bool(ledger.cursors[source.first : source.stop].any())
        self._intake.open(number, int(ledger.rounds[number]), ledger.cursors)

    def make_next(self) -> RankStep | None:
        """Make the next step; None once the pass has ended or failed, until ``open_pass`` is called."""
        if self._closed:
            return None

        self._closed = True  # it stays closed if the step raises
        step = self.make()
        self._closed = step is None or step.last
        return step

    def make(self) -> RankStep | None:
        """Plan, exchange and collate the next step; return None if this pass has no more steps."""
        ledger = self._restored()
        planned = self._next if self._next is not None else self._plan()
        self._next = None
        if planned is None:
            self._end_pass()
            return None

        microbatches = exchange(planned, self._intake.payloads, self._wire)
        try:
            step = self._collated(planned, microbatches)
        except Exception as err:
            self._intake.fail(err)  # the other ranks receive it when they plan their next step
        ledger.steps += 1

        # Where sources begin again one by one, a pass ends once each was used whole.
        last = self._settings.dry == "restart" and self._whole_passes() > ledger.number
        if last:
            ledger.number += 1
            ledger.steps = 0
        state = self._state()  # before planning ahead, which moves the ledger

        self._next = self._plan()  # the model runs an earlier step meanwhile
        if self._next is None and not last:
            last = True
            self._end_pass()
            state = self._state()
        return RankStep(batches=[step], last=last, stream=state, tokens=self._tokens_of(planned))

    def _restored(self) -> Ledger:
        """Return the ledger; the first call after a resume reads the pending sequences of the state again."""
        if self._restore is None:
            return self.ledger

        state, same = self._restore
        self._restore = None
        ended = np.array(state["ended"], bool) if same else self._intake.exhausted
        pending = self._intake.read_again(pending_rows(state), ended)
        self.ledger = restored_ledger(
            state, pending, dp=self._wire.ranks, same=same, source_of=self._settings.source_of
        )
        return self.ledger

    def _whole_passes(self) -> int:
        """Return how often every source was used whole; unused sequences may still be of earlier passes."""
        ledger = self.ledger
        whole = ledger.rounds.copy()
        for table in (ledger.pool, *(step.table for step in ledger.planned)):
            np.minimum.at(whole, self._settings.source_of[table["shard"]], table["round"])
        return int(whole.min())

    def _tokens_of(self, planned: PlannedStep) -> IntArray | None:
        """Return the tokens of each source of a mixture in a step, int64 ``[N]``; None without a mixture."""
        if not self._settings.names:
            return None
        sources = self._settings.source_of[planned.table["shard"]]
        return np.bincount(sources, planned.table["length"], len(self._gave)).astype(np.int64)

    def _state(self) -> dict[str, Any]:
        """Return the position in the stream, the same on all ranks, for a checkpoint."""
        state = self.ledger.state()
        intake = self._intake
        intake.drop_marks(state["pending"].numpy(), self.ledger)
        state["marks"] = {place: marks[0] for place, marks in intake.marks.items()}
        state["forms"] = intake.forms
        state["turns"] = torch.from_numpy(intake.turns.copy())
        state["ended"] = intake.exhausted.tolist()
        state["bad"] = list(intake.bad)
        state["counts"] = dict(intake.counts)
        return state

    def _end_pass(self) -> None:
        """End this pass; in the next, all sources begin again, or with ``dry="stop"`` those that ran dry."""
        ledger = self.ledger
        settings = self._settings
        stops = settings.dry == "stop"
        if stops:
            begin_again = np.flatnonzero(self._intake.exhausted.all(1))
        else:
            begin_again = np.arange(len(settings.sources))

        ledger.cursors[np.isin(settings.source_of, begin_again)] = 0
        ledger.rounds[begin_again] += 1
        self._intake.end_pass(begin_again)
        ledger.number += 1
        ledger.steps = 0
        if not stops:  # with "stop", the sequences that are left belong to the next pass
            self.counts["tail_dropped"] += len(ledger.pool)
            ledger.pool = ledger.pool[:0]
            ledger.drawn[:] = 0
            ledger.out[:] = False
            self._intake.payloads.clear()
        self._to_open = begin_again.tolist()

    def _plan(self) -> PlannedStep | None:
        """Return the next planned step, after reading if needed; None at the end of the pass."""
        ledger = self.ledger
        settings = self._settings
        if ledger.planned:
            self._gather(settings.window, most=ledger.pace)
            return ledger.planned.popleft()

        window = settings.window
        while True:
            self._gather(window)
            ledger.pool["at"] = np.arange(len(ledger.pool))
            order = order_of(ledger, settings, self._intake.exhausted)
            ready = rows_of(ledger.pool, order.rows)
            steps, left = plan_steps(ready, settings.scheduling, ended=order.ended)
            if steps:
                if len(settings.sources) > 1:
                    ledger.drawn, ledger.out = order.after(ledger, steps, settings.source_of)
                ledger.pool = np.concatenate([left, rows_of(ledger.pool, order.rest)])
                ledger.planned.extend(steps)
                # Reading is spread evenly over the steps that are planned now.
                ledger.pace = -(-settings.window // len(steps))
                return ledger.planned.popleft()
            if order.ended:
                return None
            window += settings.window  # the sequences that ranks hold do not fill a step yet

    def _gather(self, window: int, *, most: int | None = None) -> None:
        """Fill each rank up to ``window`` unplanned sequences, but read at most ``most`` of each source."""
        settings = self._settings
        ledger = self.ledger
        intake = self._intake

        # This collective runs even if nothing is left to read, because it also brings errors of other ranks.
        wanted = wanted_of(window, ledger, settings, intake.exhausted)
        fresh = intake.gather(wanted if most is None else np.minimum(wanted, most))
        intake.advance(ledger.cursors)
        self._gave[np.unique(settings.source_of[fresh["shard"]])] = True
        ledger.pool = np.concatenate([ledger.pool, fresh])

        if settings.dry == "restart":
            for number in np.flatnonzero(intake.exhausted.all(1)).tolist():
                self._restart(number)

    def _restart(self, number: int) -> None:
        """Begin the next pass over a source that ran dry, while the others go on."""
        source = self._settings.sources[number]
        ledger = self.ledger
        if not self._gave[number]:
            raise ValueError(f"The source {source.name!r} gave no sequence in a whole pass. Leave it out.")

        ledger.cursors[source.first : source.stop] = 0
        ledger.rounds[number] += 1
        self._intake.end_pass(np.array([number]))
        self._open(number)

    def _collated(self, planned: PlannedStep, microbatches: list[list[dict[str, Any]]]) -> THDStep:
        """Collate this rank's microbatches of a step, each with the scales of the whole step."""
        table = planned.table
        count = planned.microbatches
        weights = (float(table[name].sum()) for name in ("weight", "sequences", "length"))
        scales = StepScales.of(weights, dp=planned.dp, num_microbatches=count)
        ids = (table["shard"].astype(np.int64) << ROW_BITS) | table["row"]
        first = self._wire.rank * count
        bounds = pairwise(planned.offsets[first : first + count + 1].tolist())

        batches = []
        for number, (samples, (start, stop)) in enumerate(zip(microbatches, bounds, strict=True)):
            batch = self._settings.collate(
                samples,
                sequence_ids=ids[start:stop].tolist(),
                loss_scale=scales.loss,
                sequence_scale=scales.sequence,
                token_scale=scales.token,
                microbatch=number,
            )
            batches.append(batch)
        return THDStep(batches)


def _first_ledger(settings: Settings) -> Ledger:
    """Return the position at the start of a stream."""
    of_sources = np.zeros(len(settings.sources), np.int64)
    return Ledger(
        cursors=np.zeros_like(settings.source_of),
        rounds=of_sources,
        drawn=of_sources.copy(),
        out=np.zeros(len(settings.sources), bool),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The order in which sequences of the pool are used, as far as it is known."""

    rows: IntArray  # int64, positions in the pool of sequences whose turn is known, in order
    rest: IntArray  # int64, positions of all other sequences, in the order of the pool
    ended: bool  # the pass ends after ``rows``
    # With dry="rest", the sources that ran dry within ``rows``: (turns that all had taken by then, source)
    ran_dry: Sequence[tuple[int, int]] = ()

    def after(
        self, ledger: Ledger, steps: Sequence[PlannedStep], source_of: IntArray
    ) -> tuple[IntArray, BoolArray]:
        """Return ``Ledger.drawn`` and ``Ledger.out`` as they are once ``steps`` are used."""
        taken = np.zeros(len(ledger.pool), bool)
        for step in steps:
            taken[step.table["at"]] = True
        source_of_row = source_of[ledger.pool["shard"]]
        unused = set(np.unique(source_of_row[~taken]).tolist())

        # A source is out once none of its sequences is left unused. Then the counts of all sources restart.
        out = ledger.out.copy()
        drawn = ledger.drawn
        begin = 0
        for turns, source in self.ran_dry:
            if source in unused:
                break
            out[source] = True
            drawn = np.zeros_like(drawn)
            begin = turns

        rows = self.rows[begin:]
        used_rows = rows[taken[rows]]
        return drawn + np.bincount(source_of_row[used_rows], minlength=len(drawn)), out


def shares_of(settings: Settings, out: BoolArray) -> dict[int, int]:
    """Return the shares of the sources that still take part, by their index."""
    return {number: source.share for number, source in enumerate(settings.sources) if not out[number]}


def order_of(ledger: Ledger, settings: Settings, dry: BoolArray) -> Order:
    """Order the pool by turns of sources, shuffled ones at random; ``dry`` is ``Intake.exhausted``."""
    queues = _queues(ledger, settings)
    if len(queues) == 1:
        return Order(rows=queues[0], rest=queues[0][:0], ended=bool(dry.all()))

    waiting = [len(queue) for queue in queues]
    turns, ran_dry, ended = _turns(waiting, ledger, settings, dry)
    rows = np.empty(len(turns), np.int64)
    for number, queue in enumerate(queues):
        its_turns = turns == number
        rows[its_turns] = queue[: np.count_nonzero(its_turns)]

    is_rest = np.ones(len(ledger.pool), bool)
    is_rest[rows] = False
    return Order(
        rows=rows,
        rest=np.flatnonzero(is_rest),
        ended=ended,
        ran_dry=ran_dry if settings.dry == "rest" else [],
    )


def _queues(ledger: Ledger, settings: Settings) -> list[IntArray]:
    """Return for each source its positions in the pool, int64, in the order of their use."""
    source_of_row = settings.source_of[ledger.pool["shard"]]
    # The 1 sets this seed apart from the one that shuffles the shards of a pass.
    rng = np.random.default_rng([settings.seed, ledger.number, ledger.steps, 1])
    queues = []
    for number, source in enumerate(settings.sources):
        queue = np.flatnonzero(source_of_row == number)
        if source.shuffle_buffer:
            queue = queue[rng.permutation(len(queue))]
            queue = queue[np.argsort(ledger.pool["round"][queue], kind="stable")]  # earlier passes first
        queues.append(queue)
    return queues


def _turns(
    waiting: list[int], ledger: Ledger, settings: Settings, dry: BoolArray
) -> tuple[IntArray, list[tuple[int, int]], bool]:
    """Return the source of each next sequence, the sources that ran dry, and whether the pass ends there."""
    step = settings.scheduling.step
    unused = np.array(waiting, np.int64)
    out = ledger.out.copy()
    drawn = ledger.drawn
    turns: list[int] = []
    ran_dry: list[tuple[int, int]] = []
    ended = bool(out.all())

    while not ended:
        still_wanted = step.n - len(turns) if isinstance(step, Sequences) else None
        more, empty = take_turns(shares_of(settings, out), drawn.tolist(), unused.tolist(), still_wanted)
        turns += more
        unused -= np.bincount(np.array(more, np.int64), minlength=len(unused))
        if empty is None or not dry[empty].all():
            break  # enough turns, or a source must be read first

        ran_dry.append((len(turns), empty))
        out[empty] = True
        drawn = np.zeros_like(drawn)  # the turns of the other sources are counted anew
        ended = settings.dry == "stop" or bool(out.all())

    return np.array(turns, np.int64), ran_dry, ended


def wanted_of(window: int, ledger: Ledger, settings: Settings, exhausted: BoolArray) -> IntArray:
    """Return how many sequences of each of N sources each rank must read, int64 ``[N, ranks]``."""
    sources, ranks = exhausted.shape
    shares = shares_of(settings, ledger.out)
    # The sequences that each rank holds of each source, counted in a table [N, ranks] laid out flat.
    cell = settings.source_of[ledger.pool["shard"]] * ranks + ledger.pool["holder"]
    held = np.bincount(cell, minlength=sources * ranks).reshape(sources, ranks)

    wanted = np.zeros((sources, ranks), np.int64)
    still_read = [number for number in shares if not exhausted[number].all()]
    if not still_read:
        return wanted

    active_ranks = int((~exhausted[still_read]).any(0).sum())  # ranks that can still read
    step = settings.scheduling.step
    total = max(window * active_ranks, step.n if isinstance(step, Sequences) else 1)
    all_shares = sum(shares.values())
    for number in still_read:
        of_source = -(-total * shares[number] // all_shares)
        if len(shares) > 1:
            of_source += 1  # in a mixture, a source may be one turn ahead of its share
        reads = ~exhausted[number]  # bool ``[ranks]``
        of_rank = max(-(-of_source // int(reads.sum())), settings.sources[number].shuffle_buffer)
        wanted[number] = np.where(reads, np.maximum(0, of_rank - held[number]), 0)
    return wanted
