"""A stream and its ranks -> the steps of one rank, made ahead in a thread, in lockstep with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_thd.data.loader import Ahead, Kind, Made, Position
from lightning_thd.data.streams.engine import ROW_BITS, Engine, EngineStep
from lightning_thd.data.streams.intake import Settings, Source
from lightning_thd.data.streams.ranks import Peers, Wire
from lightning_thd.data.streams.schedule import IntArray
from lightning_thd.data.streams.shards import Shard, refuse_split, traits
from lightning_thd.packing.planner import fingerprint

_AHEAD = 2  # Two steps are made while one runs.


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """The shards of an opened stream, source after source."""

    shards: Sequence[Shard]
    sources: Sequence[Source]
    replays: bool  # Reading the shards again gives the same records for sure.
    read_once: Mapping[str, Any] = field(default_factory=dict)  # objects that one rank reads for all, by name


class StreamedSteps:
    """The steps of one rank from a stream; ranks that share packs receive them, and read nothing."""

    goes_on = True

    def __init__(
        self,
        settings: Settings,
        opened: Opened,
        *,
        rank: int,
        kind: Kind,
        parts: int,
        reopen: Callable[[int], Opened],
        steps_per_epoch: int | None,
        pin_memory: bool,
    ) -> None:
        self._settings, self._rank, self.kind, self._pin = settings, rank, kind, pin_memory
        self._parts, self._replays, self._reopen = parts, opened.replays, reopen
        self.steps_per_epoch = steps_per_epoch
        dp = settings.scheduling.dp
        self.per_step = settings.scheduling.step.n // dp if kind == "pack" else 1
        shards = self._names(), len(settings.shards)
        tell = {name: traits(source, first=dp > 1) for name, source in opened.read_once.items()}, shards
        self._peers = Peers.of_job(rank, dp, timeout_s=settings.timeout_s, tell=tell)
        if dp > 1:
            refuse_split(opened.read_once, [of for of, _ in self._peers.told])
            (first, count), *others = [shards for _, shards in self._peers.told]
            for number, (names, found) in enumerate(others, 1):
                if (names, found) != (first, count):
                    raise ValueError(
                        f"The ranks list other shards: rank 0 has {count}, rank {number} has {found}, or "
                        "other names. Give every rank all of them, in the same order: each takes its share."
                    )
        self._same = False  # The planned steps of a loaded state fit this job.
        self.engine: Engine | None = None
        self._ahead, self._pass_open = Ahead("thd-stream"), True
        self._error: Exception | None = None  # that ended the stream

    def length(self, epoch: int) -> int:
        """Return the batches of an epoch of a given number of steps."""
        if self.steps_per_epoch is None:
            raise TypeError("A stream has no length. Pass steps_per_epoch to give its epochs one.")
        return self.steps_per_epoch * self.per_step

    @property
    def counts(self) -> dict[str, int]:
        """Return how many records of all ranks were unusable, and how many policies changed or dropped."""
        return {} if self.engine is None else dict(self.engine.counts)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of a mixture's sources; empty for a single stream."""
        return self._settings.names

    def source_of(self, ids: npt.ArrayLike) -> IntArray:
        """Return the number of the source of each sequence id, int64 ``[S]``."""
        found: IntArray = self._settings.source_of[np.asarray(ids, np.int64) >> ROW_BITS]
        return found

    def steps(self, at: Position, limit: int | None) -> Iterator[Made]:
        """Make steps without end, pass after pass over the stream, from where the stream is."""
        while True:
            made = self._received(at)
            if made is None:
                raise ValueError(
                    "A pass over the stream gave no step: it has too few sequences for one step of "
                    f"{self._settings.scheduling.step}, or none. Set tail='pad', or ask for fewer to a step."
                )
            step = made.step.pin_memory() if self._pin else made.step
            yield Made(
                batches=[step] if self.kind == "step" else step.microbatches,
                last=made.last,
                stream=made.state,
                tokens=made.tokens if self.names else None,
            )

    def _received(self, at: Position) -> EngineStep | None:
        """Return the next step, made by this rank or received from the rank that reads for it."""
        if not self._peers.reads:
            made: EngineStep | None = self._peers.receive()
            return made
        try:
            made = self._taken(at)
        except Exception as err:
            with suppress(RuntimeError):  # a rank that is gone hides no error
                self._peers.send(err)
            raise
        self._peers.send(made)
        return made

    def _taken(self, at: Position) -> EngineStep | None:
        """Return the next step, and let the thread make one more: equally many on every rank."""
        settings = self._settings
        if self._error is not None:
            raise self._error
        if self.engine is None:
            wire = Wire(self._rank, settings.scheduling.dp, self._peers.readers, timeout_s=settings.timeout_s)
            self.engine = Engine(settings, wire, at.stream, same=self._same)
        elif not self._pass_open:
            while len(self._ahead):  # calls that made nothing, as the pass had ended
                self._ahead.take()
            self.engine.open_pass()  # in this thread, in which workers start
        self._allow()
        try:
            made: EngineStep | None = self._ahead.take()
        except Exception as err:
            self._error = err
            raise
        self._pass_open = made is not None and not made.last
        self._allow()
        return made

    def _allow(self) -> None:
        assert self.engine is not None
        while len(self._ahead) < _AHEAD:
            self._ahead.begin(self.engine.make_next)

    def state(self, at: Position) -> dict[str, Any]:
        """Return the position, and the names of the shards and settings it belongs to."""
        return {
            "epoch": at.epoch,
            "step": at.step,
            "ended": at.ended,
            "stream": at.stream,
            "parts": self._parts,
            "shards": len(self._settings.shards),
            "names": self._names(),
            "plan": self._plan_key(),
        }

    def load(self, state: Mapping[str, Any]) -> Position:
        """Return the position of a state, for any number of ranks; refuse one of another stream."""
        if "stream" not in state or "names" not in state:
            raise ValueError(
                f"The state holds {', '.join(sorted(state)) or 'nothing'}, not that of a stream. Was the "
                "checkpoint written with a dataset that has a length? Start the stream without it."
            )
        if int(state["parts"]) != self._parts:
            self._parts = int(state["parts"])
            opened = self._reopen(self._parts)
            self._settings = replace(self._settings, shards=opened.shards, sources=opened.sources)
        if state["names"] != self._names():
            raise ValueError(
                f"The checkpoint was written with {state['shards']} shards, and the stream has "
                f"{len(self._settings.shards)}, or others, or in other shares. Restore them in the same "
                "order, or start the stream without it."
            )
        if not self._replays and state["stream"] is not None and not state["stream"].get("marks"):
            rank_zero_warn(
                "The stream is a generator or a dataset without a position: it begins again, and the records "
                "that were used are passed over. That is exact where it gives the same records again."
            )
        self._ahead.stop()
        self.engine, self._error, self._pass_open = None, None, True
        self._same = state["plan"] == self._plan_key()
        return Position(
            epoch=int(state["epoch"]),
            step=int(state["step"]),
            ended=bool(state.get("ended", not state["step"])),
            stream=state["stream"],
        )

    def _plan_key(self) -> str:
        how = self._settings.scheduling
        return repr((how.step, how.slots, how.cost, how.dp, getattr(how.scheduler, "__qualname__", None)))

    def _names(self) -> str:
        settings = self._settings
        known: dict[str, Any] = {"shards": [shard.name for shard in settings.shards]}
        if settings.names:
            mixed = [(source.name, source.stop, source.share) for source in settings.sources]
            known |= {"sources": mixed, "dry": settings.dry}
        return fingerprint(known)
