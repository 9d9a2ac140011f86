"""A stream and its ranks -> batches of one rank, made ahead in a thread, and a state all ranks share."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.data.progress import Progress, refuse_cut_steps, refuse_other_trainer, running_trainer
from lightning_thd.data.streams.ahead import Ahead, Weakly
from lightning_thd.data.streams.engine import ROW_BITS, Engine, Made, Settings
from lightning_thd.data.streams.intake import Source
from lightning_thd.data.streams.ranks.peers import Peers
from lightning_thd.data.streams.ranks.wire import Wire
from lightning_thd.data.streams.schedule import IntArray
from lightning_thd.data.streams.shards import Shard, refuse_split, traits
from lightning_thd.packing.resume import fingerprint

_REMEMBERED = 10_000  # steps whose tokens are known until they are asked for: a log interval has fewer


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """The shards and sources of an opened stream.

    Attributes:
        shards: source after source.
        sources: of which they are.
        replays: whether reading them again gives the same records for sure.
        alone: objects that one rank reads for all, by the names of their shards.
    """

    shards: Sequence[Shard]
    sources: Sequence[Source]
    replays: bool
    alone: Mapping[str, Any] = field(default_factory=dict)


class StreamLoader:
    """Batches of one rank from a stream, epoch after epoch.

    An epoch ends with the shards, after ``steps_per_epoch`` steps, or where the Trainer's limit is; the next
    goes on where the stream stands. Ranks that share packs iterate too, and read nothing.

    Args:
        settings: how the stream is read and packed.
        rank: data-parallel rank.
        kind: ``"pack"`` hands out one ``THDBatch`` after the other, ``"step"`` a ``THDStep``.
        parts: the parts that the source was taken apart in, which a checkpoint keeps.
        replays: whether reading the shards again gives the same records for sure.
        alone: objects that one rank reads for all, which must not split themselves by rank.
        reopen: takes the stream apart anew where a checkpoint says in how many parts.
        steps_per_epoch: steps of an epoch; None ends it with the shards.
        consumed: number of batches the trainer is done with, ever; what was handed out if absent.
        on_load: told the batch of the epoch at which a restored loader goes on, except at an epoch's end.
        begins: whether the trainer has begun an epoch of which it has asked for no batch.
        check: called before each batch; raises where the trainer no longer fits the steps.
        pin_memory: page-lock batches.
    """

    reads_for_peers = True  # a strategy need not hand the batches of one rank to others

    def __init__(
        self,
        settings: Settings,
        *,
        rank: int = 0,
        kind: Literal["pack", "step"] = "pack",
        parts: int = 1,
        replays: bool = True,
        alone: Mapping[str, Any] | None = None,
        reopen: Callable[[int], Opened] | None = None,
        steps_per_epoch: int | None = None,
        consumed: Callable[[], int] | None = None,
        on_load: Callable[[int], None] | None = None,
        begins: Callable[[], bool] | None = None,
        check: Callable[[], None] | None = None,
        pin_memory: bool = False,
    ) -> None:
        self._settings, self._rank, self._kind = settings, rank, kind
        self._parts, self._replays, self._steps_per_epoch = parts, replays, steps_per_epoch
        self._reopen = reopen
        self._consumed, self._on_load, self._begins, self._check = consumed, on_load, begins, check
        self._pin = pin_memory
        dp = settings.scheduling.dp
        self.per_step = settings.scheduling.step.n // dp if kind == "pack" else 1
        alone = alone or {}
        shards = self._names(), len(settings.shards)
        tell = {name: traits(source) for name, source in alone.items()}, shards
        self._peers = Peers.of_job(rank, dp, timeout_s=settings.timeout_s, tell=tell)
        if dp > 1:
            refuse_split(alone, [of for of, _ in self._peers.told])
            self._refuse_other_shards([shards for _, shards in self._peers.told])
        self.epoch = 0
        self._start = 0  # step of the epoch that comes first
        self._handed_out = 0
        self._begun_at = 0  # batches the trainer was done with when this iteration began
        self._given: deque[tuple[int, dict[str, Any], Made]] = deque()  # not done with, and where before it
        self._again: deque[Made] = deque()  # that were handed out and not run
        self._running = 0  # the epoch whose batches were asked for last
        self._states: deque[tuple[int, dict[str, Any]]] = deque()  # steps handed out -> what to save
        self._tokens: deque[IntArray] = deque(maxlen=_REMEMBERED)  # of each source, step after step
        self._latest: dict[str, Any] | None = None  # of the stream, after the last step handed out
        self._ended = False  # the position is the end of an epoch, not the beginning of the next
        self._base: dict[str, Any] = self._position()
        self._same = False
        self._engine: Engine | None = None
        self._ahead: Ahead | None = None

    @staticmethod
    def _refuse_other_shards(of_ranks: list[tuple[str, int]]) -> None:
        other = next((rank for rank, shards in enumerate(of_ranks) if shards != of_ranks[0]), None)
        if other is not None:
            raise ValueError(
                f"The ranks list other shards: rank 0 has {of_ranks[0][1]}, rank {other} has "
                f"{of_ranks[other][1]}, or other names. Give every rank all of them, in the same order: each "
                "takes its share by itself."
            )

    def __len__(self) -> int:
        if self._steps_per_epoch is None:
            raise TypeError("A stream has no length. Pass steps_per_epoch to give its epochs one.")
        return self._steps_per_epoch * self.per_step

    @property
    def counts(self) -> dict[str, int]:
        """Return how many records of all ranks were unusable, and how many policies changed or dropped."""
        return {} if self._engine is None else dict(self._engine.counts)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Return the names of a mixture's sources; empty for a single stream."""
        return self._settings.names

    def source_of(self, ids: npt.ArrayLike) -> IntArray:
        """Return the number of the source of each sequence id, int64 ``[S]``."""
        found: IntArray = self._settings.source_of[np.asarray(ids, np.int64) >> ROW_BITS]
        return found

    def next_tokens(self) -> IntArray:
        """Pop the real tokens of each source in the oldest step not yet logged, int64 ``[N]``."""
        return self._tokens.popleft() if self._tokens else np.zeros(len(self._settings.sources), np.int64)

    def __iter__(self) -> Iterator[THDBatch | THDStep]:
        # A generator starts at the first next(); until then the position is that of the epoch before.
        self._meet_caller()
        self._take_back()
        number, handed = self._start, 0
        self._running, self._handed_out = self.epoch, 0
        self._begun_at = self._consumed() if self._consumed is not None else 0
        self._ended = ends = False
        self._base = self._position()
        self._states.clear()
        while not ends:
            made = self._again.popleft() if self._again else self._next()
            if made is None:
                raise ValueError(
                    "A pass over the stream gave no step: it has too few sequences for one step of "
                    f"{self._settings.scheduling.step}, or none. Set tail='pad', or ask for fewer to a step."
                )
            self._give(handed, made)
            number, handed = number + 1, handed + 1
            ends = number == self._steps_per_epoch or (self._steps_per_epoch is None and made.last)
            self._latest = made.state
            self._ended = ends
            self.epoch, self._start = (self._running + 1, 0) if ends else (self._running, number)
            self._states.append((handed, self._position()))
            step = made.step.pin_memory() if self._pin else made.step
            for batch in [step] if self._kind == "step" else step.microbatches:
                if self._check is not None:
                    self._check()
                self._handed_out += 1
                yield batch

    def _meet_caller(self) -> None:
        """Refuse a Trainer given this loader alone, made for another; go on as its checkpoint says."""
        trainer = running_trainer(self) if self._consumed is None else None
        if trainer is not None:
            dp = self._settings.scheduling.dp
            refuse_other_trainer(trainer, kind=self._kind, rank=self._rank, ranks=dp, per_step=self.per_step)
            refuse_cut_steps(trainer, self)
            self.go_on(Progress(trainer).unread_states())

    def _position(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "step": self._start, "stream": self._latest, "ended": self._ended}

    def _done(self) -> int:
        """Return how many whole steps of this iteration the Trainer has finished."""
        batches = self._handed_out if self._consumed is None else self._consumed() - self._begun_at
        return batches // self.per_step

    def _give(self, handed: int, made: Made) -> None:
        """Store a step until the Trainer has finished it, and its token counts until they are logged."""
        if self.source_names:
            self._tokens.append(made.tokens)
        if self._consumed is not None:
            self._given.append((handed, self._position(), made))
            while self._given[0][0] < self._done():
                self._given.popleft()

    def _take_back(self) -> None:
        """Queue steps again that a Trainer fetched but dropped, to begin another epoch or fit."""
        done = self._done()
        dropped = [(before, made) for handed, before, made in self._given if handed >= done]
        self._given.clear()
        if dropped:
            before = dropped[0][0]
            self.epoch, self._start, self._latest = before["epoch"], before["step"], before["stream"]
            self._again.extendleft(reversed([made for _, made in dropped]))
            for _ in dropped[: len(self._tokens)]:  # counted again when they are handed out again
                self._tokens.pop()

    def _next(self) -> Made | None:
        """Return the next step, made by this rank or received from the rank that reads for it."""
        if not self._peers.reads:
            made: Made | None = self._peers.receive()
            return made
        try:
            if self._ahead is None:
                self._begin()
            assert self._ahead is not None
            made = self._ahead.take()
        except Exception as err:
            with suppress(RuntimeError):  # a rank that is gone hides no error
                self._peers.send(err)
            raise
        self._peers.send(made)
        return made

    def _begin(self) -> None:
        settings = self._settings
        wire = Wire(self._rank, settings.scheduling.dp, self._peers.readers, timeout_s=settings.timeout_s)
        self._engine = Engine(settings, wire, self._latest, same=self._same)
        self._ahead = Ahead(self._engine)
        # A loader that is dropped leaves no thread and no processes behind; at exit the thread is waited for.
        # What waits for that holds neither: an error kept there would hold all its traceback names, this too.
        weakref.finalize(self, Weakly(self._ahead.let_go)).atexit = False

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

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last whole step that was consumed, the same on every rank."""
        done = self._done()
        while len(self._states) > 1 and self._states[1][0] <= done:
            self._states.popleft()  # nobody asks for earlier steps again
        found = [state for handed, state in self._states if handed == done]
        state = {**(found[0] if found else self._base), **self._identity()}
        begins = self._begins is not None and self._begins()
        return {**state, "ended": False} if begins else state

    def _identity(self) -> dict[str, Any]:
        return {
            "parts": self._parts,
            "shards": len(self._settings.shards),
            "names": self._names(),
            "plan": self._plan_key(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the last whole step of ``state``, on any number of ranks and workers.

        Raises:
            ValueError: when the state is of another stream.
        """
        if "stream" not in state or "names" not in state:
            raise ValueError(
                f"The state holds {', '.join(sorted(state)) or 'nothing'}, not that of a stream. Was the "
                "checkpoint written with a dataset that has a length? Start the stream without it."
            )
        if int(state["parts"]) != self._parts:
            self._parts = int(state["parts"])
            assert self._reopen is not None
            opened = self._reopen(self._parts)
            self._settings = replace(self._settings, shards=opened.shards, sources=opened.sources)
        if state["names"] != self._names():
            raise ValueError(
                f"The checkpoint was written with {state['shards']} shards, and the stream has "
                f"{len(self._settings.shards)}, or others, or in other shares. Restore them in the same "
                "order, or start anew."
            )
        if not self._replays and state["stream"] is not None and not state["stream"].get("marks"):
            rank_zero_warn(
                "The stream is a generator or a dataset without a position: it begins anew, and the records "
                "that were used are passed over. That is exact where it gives the same records again."
            )
        if self._ahead is not None:
            self._ahead.stop()
        self._ahead = self._engine = None
        self._latest, self._same = state["stream"], state["plan"] == self._plan_key()
        self._running = self.epoch = int(state["epoch"])
        self._start = int(state["step"])
        self._ended = bool(state.get("ended", not self._start))
        self._handed_out = self._begun_at = 0
        for kept in (self._states, self._given, self._again, self._tokens):
            kept.clear()
        self._base = self._position()
        if self._on_load is not None and not self._ended:
            self._on_load(self._start * self.per_step)
        if self._consumed is not None:
            self._begun_at = self._consumed()

    def go_on(self, states: Sequence[Any]) -> None:
        """Resume from the state of a stream among those of a checkpoint's loaders, if there is one.

        Raises:
            ValueError: when the state is of another stream.
        """
        for state in states:
            if isinstance(state, Mapping) and "stream" in state:
                self.load_state_dict(dict(state))
                return
