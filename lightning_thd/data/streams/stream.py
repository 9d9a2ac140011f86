"""A source that is read in order, or several with weights -> the steps of one rank.

A thread makes steps ahead. The threads of all ranks that read make the same steps at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_thd._checks import answers, choice, real_number, whole_number
from lightning_thd.data.loader import Ahead, Kind, Position, RankStep
from lightning_thd.data.planning import DataSettings
from lightning_thd.data.read.encode import load_tokenizer
from lightning_thd.data.read.sources import Opener
from lightning_thd.data.read.vision_chat import VisionChat
from lightning_thd.data.store.index import OnError
from lightning_thd.data.streams.engine import ROW_BITS, Engine
from lightning_thd.data.streams.intake import Settings, Source
from lightning_thd.data.streams.ranks import Peers, Wire
from lightning_thd.data.streams.samples import Sampler
from lightning_thd.data.streams.schedule import IntArray, Scheduling, ledger_of
from lightning_thd.data.streams.shards import Shard, first_records, open_shards
from lightning_thd.data.trainer_link import Job, model_cost, model_patch, vocab_size
from lightning_thd.packing import Cost, Packs
from lightning_thd.packing.lengths import make_slots
from lightning_thd.packing.mixtures import Mixing, check_weights, whole_shares
from lightning_thd.packing.planner import fingerprint
from lightning_thd.warnings import DataWarning, warn

_AHEAD = 2  # steps that are made while one runs
_NAMED = 1_000  # shards that a checkpoint names, so that an error can say which of them are missing


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Training data that can only be iterated: in each pass, each rank reads a part from front to back.

    ``THDDataModule(Stream("shards/*.jsonl.gz", shuffle_buffer=1_000), capacity=8_192)``. An
    ``IterableDataset`` or a generator function given to ``THDDataModule`` is ``Stream(source=...)``.

    Attributes:
        source: a path, folder or glob of ``.jsonl`` (also compressed), ``.parquet``, ``.arrow`` or
            ``.feather`` files, or a list of them, local or through fsspec; an ``IterableDataset``; a function
            that returns an iterator, ``make()`` or ``make(part, parts)``. A source without parts is
            read by one rank for all ranks, so it must not split itself by rank.
        window: sequences that each rank holds to plan from; more of them fill packs and balance work better.
        shuffle_buffer: sequences from which a rank draws at random; shards are shuffled too. 0 shuffles none.
        steps_per_epoch: optimizer steps of an epoch; None ends it with the data, so set it for endless data.
        on_error: ``"raise"`` stops at an unusable record, ``"skip"`` skips and counts it; None takes
            ``on_error`` of the data module, and its ``max_errors`` too if none is given here.
        max_errors: most records that the whole job skips; None sets no bound, unless ``on_error`` is None.
        timeout_s: seconds to wait for a rank that sends nothing; then the job ends with an error.
    """

    source: Any = field(kw_only=False)
    window: int = 256
    shuffle_buffer: int = 0
    steps_per_epoch: int | None = None
    on_error: OnError | None = None
    max_errors: int | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        whole_number(self.window, "window", least=1, advice="It is the number of sequences a rank holds.")
        whole_number(self.shuffle_buffer, "shuffle_buffer", advice="0 keeps the order of the shards.")
        if self.steps_per_epoch is not None:
            whole_number(self.steps_per_epoch, "steps_per_epoch", least=1, advice="None sets no bound.")
        if self.max_errors is not None:
            whole_number(self.max_errors, "max_errors", advice="None sets no bound.")
        if self.on_error is not None:
            choice(self.on_error, "on_error", "raise", "skip")
        advice = "It is the seconds a rank waits for another."
        real_number(self.timeout_s, "timeout_s", above=0, advice=advice)


# The data module reads the records, whatever their source.
_READING = "Pass it to THDDataModule(Stream(...), {}=..., capacity=...)."
_with_advice = answers(
    **{name: _READING.format(name) for name in ("text_key", "tokenizer", "processor", "records", "capacity")}
)
Stream.__init__ = _with_advice(Stream.__init__)  # type: ignore[method-assign]


@dataclass(frozen=True, kw_only=True)
class Streams:
    """One stream, or several that take turns by their shares."""

    streams: Mapping[str, Stream]  # name in the mixture -> stream; a single stream has the name ""
    weights: Mapping[str, float]  # name -> share of the sequences, in any unit
    mixing: Mixing = field(default_factory=Mixing)

    def __post_init__(self) -> None:
        check_weights(self.weights)
        if self.mixing.epoch != "longest" or self.mixing.shares == "tokens":
            raise ValueError("Mixing(epoch=) and Mixing(shares='tokens') need sources whose sizes are known.")
        lengths = {stream.steps_per_epoch for stream in self.streams.values()} - {None}
        if len(lengths) > 1:
            raise ValueError(f"The streams of a mixture ask for epochs of {sorted(map(str, lengths))} steps.")

    def open(self, opener: Opener, parts: int) -> tuple[list[Shard], list[Source]]:
        """Open the sources as shards; a function ``make(part, parts)`` gives ``parts`` shards."""
        shares = dict(zip(self.weights, whole_shares([*self.weights.values()]), strict=True))
        shards: list[Shard] = []
        sources: list[Source] = []
        for name, stream in self.streams.items():
            try:
                of_source = open_shards(stream.source, parts=parts)
            except ValueError as err:
                raise ValueError(f"The source {name!r} of the mixture: {err}" if name else f"{err}") from err

            # A stream with either of the two has its own policy, and takes none from the data module.
            has_policy = stream.on_error is not None or stream.max_errors is not None
            source = Source(
                name=name,
                first=len(shards),
                stop=len(shards) + len(of_source),
                share=shares[name],
                shuffle_buffer=stream.shuffle_buffer,
                on_error=stream.on_error or opener.on_error,
                max_errors=stream.max_errors if has_policy else opener.max_errors,
            )
            sources.append(source)
            shards += of_source
        return shards, sources


class StreamedSteps:
    """The steps of one rank from a stream; of ranks that share packs, one reads for the others."""

    resumes = True

    def __init__(self, streams: Streams, settings: DataSettings, job: Job, *, kind: Kind) -> None:
        self._streams = streams
        self._opener = settings.opener
        self.kind = kind
        self._rank = job.rank
        self._parts = job.ranks  # the shards of a function ``make(part, parts)``
        self._pin = settings.pins(job)
        self._settings = _settings(streams, settings, job)
        self.names: Sequence[str] = self._settings.names
        # All streams of a mixture that give a number give the same.
        self.steps_per_epoch = max(stream.steps_per_epoch or 0 for stream in streams.streams.values()) or None
        self.per_step = self._settings.scheduling.step.n // job.ranks if kind == "pack" else 1

        shards = self._settings.shards if job.ranks > 1 else ()
        listed = [(shard.name, first_records(shard) if shard.whole else None) for shard in shards]
        self._peers, lists = Peers.of_job(job, listed, timeout_s=self._settings.timeout_s)
        _refuse_other_shards(lists)

        self.engine: Engine | None = None  # made with the first step, which may be after a state is loaded
        self._same = False  # whether the planned steps of a loaded state fit this job
        self._ahead = Ahead("thd-stream")
        self._pass_open = True
        self._error: Exception | None = None  # the error that ended the stream

    def length(self, epoch: int) -> int | None:
        """Return the number of batches of an epoch; None without ``steps_per_epoch``."""
        return None if self.steps_per_epoch is None else self.steps_per_epoch * self.per_step

    @property
    def counts(self) -> dict[str, int]:
        """Return how many records of all ranks were unusable, or changed or left out by a policy."""
        return {} if self.engine is None else dict(self.engine.counts)

    def source_of(self, ids: npt.ArrayLike) -> IntArray:
        """Return the index of the source of each sequence id, int64 ``[S]``."""
        sources: IntArray = self._settings.source_of[np.asarray(ids, np.int64) >> ROW_BITS]
        return sources

    def steps(self, position: Position, limit: int | None) -> Iterator[RankStep]:
        """Yield steps without end, pass after pass over the stream, from its present position on."""
        while True:
            rank_step = self._next_step(position)
            if rank_step is None:
                raise ValueError(
                    "A pass over the stream gave no step: it has too few sequences for one step of "
                    f"{self._settings.scheduling.step}, or none. Lower global_batch, or give more data."
                )

            (step,) = rank_step.batches
            step = step.pin_memory() if self._pin else step
            yield replace(rank_step, batches=[step] if self.kind == "step" else step.packs)

    def _next_step(self, position: Position) -> RankStep | None:
        """Make the next step and send it to ranks that share it, or receive it from the rank that reads."""
        if not self._peers.reads:
            step: RankStep | None = self._peers.receive()
            return step

        try:
            step = self._make_step(position)
        except Exception as err:
            with suppress(RuntimeError):  # a peer that has ended must not hide the error
                self._peers.send(err)
            raise
        self._peers.send(step)
        return step

    def _make_step(self, position: Position) -> RankStep | None:
        """Return the next step of the thread, and let it make one more, as every rank does."""
        settings = self._settings
        if self._error is not None:
            raise self._error

        if self.engine is None:
            wire = Wire(self._rank, settings.scheduling.dp, self._peers.readers, timeout_s=settings.timeout_s)
            self.engine = Engine(settings, wire, position.stream, same=self._same)
        elif not self._pass_open:
            while self._ahead.pending:  # calls that returned None, because the pass had ended
                self._ahead.next_result()
            self.engine.open_pass()

        self._work_ahead()
        try:
            step: RankStep | None = self._ahead.next_result()
        except Exception as err:
            self._error = err
            raise

        self._pass_open = step is not None and not step.last
        self._work_ahead()
        return step

    def _work_ahead(self) -> None:
        """Queue steps for the thread; the same number on all ranks, because making one is a collective."""
        assert self.engine is not None
        while len(self._ahead.pending) < _AHEAD:
            self._ahead.submit(self.engine.make_next)

    def state(self, position: Position) -> dict[str, Any]:
        """Return the position, and texts that identify the shards and settings for which it holds."""
        return {
            "epoch": position.epoch,
            "step": position.step,
            "ended": position.ended,
            "stream": position.stream,
            "parts": self._parts,
            "shards": len(self._settings.shards),
            "names": self._names(),
            "shard_names": [shard.name for shard in self._settings.shards[:_NAMED]],
            "plan": self._plan_key(),
        }

    def load(self, state: Mapping[str, Any]) -> Position:
        """Return the position in a state, for any number of ranks; raise if another stream saved it."""
        if "stream" not in state or "names" not in state:
            raise ValueError(f"The state holds {', '.join(sorted(state))}, so no stream has saved it.")

        # A function ``make(part, parts)`` gives the parts of the job that saved the state.
        if int(state["parts"]) != self._parts:
            self._parts = int(state["parts"])
            shards, sources = self._streams.open(self._opener, self._parts)
            self._settings = replace(self._settings, shards=shards, sources=sources)
        if state["names"] != self._names():
            raise ValueError(self._other_stream(state))
        self._warn_of_skipping(state["stream"])

        self._ahead.stop()
        self.engine = None
        self._error = None
        self._pass_open = True
        self._same = state["plan"] == self._plan_key()
        return Position(
            epoch=int(state["epoch"]),
            step=int(state["step"]),
            ended=bool(state["ended"]),
            stream=state["stream"],
        )

    def _other_stream(self, state: Mapping[str, Any]) -> str:
        """Return the error for a checkpoint of other shards, which says how they differ."""
        names = [shard.name for shard in self._settings.shards]
        saved = list(state.get("shard_names", ()))
        missing = [name for name in saved if name not in set(names)]
        added = [name for name in names[:_NAMED] if name not in set(saved)]

        counts = f"The checkpoint was written with {state['shards']} shards, but the stream has {len(names)}"
        advice = "Pass the same source, with the files under the names that they had"
        if not missing and not added:
            return f"{counts}, or other shares of its sources. {advice}."
        if not saved or max(int(state["shards"]), len(names)) > _NAMED:
            return f"{counts}, or others. {advice}."

        changes = []
        if missing:
            changes.append(f"{_some(missing)} missing")
        if added:
            changes.append(f"{_some(added)} new")
        return f"{counts}: {', and '.join(changes)}. {advice}; records may be appended to a file."

    def _warn_of_skipping(self, state: dict[str, Any] | None) -> None:
        """Warn if a shard was read that did not save its position, and may give other records again."""
        if state is None:
            return
        was_read = {*np.flatnonzero(ledger_of(state).cursors).tolist(), *state["pending"][:, 0].tolist()}
        has_mark = {shard for shard, _ in state["marks"]}
        if not all(self._settings.shards[shard].replays for shard in was_read - has_mark):
            warn(
                "The stream cannot save its position, because it is a generator or similar. It begins again "
                "and skips the used records. That is exact only if it gives the same records again.",
                DataWarning,
            )

    def _plan_key(self) -> str:
        """Return a text of the settings that planned steps depend on."""
        scheduling = self._settings.scheduling
        scheduler = getattr(scheduling.scheduler, "__qualname__", None)
        return repr((scheduling.step, scheduling.slots, scheduling.cost, scheduling.dp, scheduler))

    def _names(self) -> str:
        """Return a hash of the names of shards and sources, by which a state knows its stream."""
        settings = self._settings
        names: dict[str, Any] = {"shards": [shard.name for shard in settings.shards]}
        if settings.names:
            names["sources"] = [(source.name, source.stop, source.share) for source in settings.sources]
            names["dry"] = settings.dry
        return fingerprint(names)


def _some(names: Sequence[str]) -> str:
    """Return the first of some names and how many more there are, with the verb of a sentence about them."""
    if len(names) == 1:
        return f"{names[0]} is"
    if len(names) == 2:
        return f"{names[0]} and {names[1]} are"
    return f"{names[0]} and {len(names) - 1} more are"


def _settings(streams: Streams, settings: DataSettings, job: Job) -> Settings:
    """Return how to read and pack a stream in a job; refuse settings that a stream cannot follow."""
    if job.sharing is not None:
        raise ValueError("context_parallel_size='dynamic' plans a degree from all lengths. Pass a dataset.")
    if settings.oversize == "split":
        raise ValueError("oversize='split' needs every length before the first step. Set another policy.")

    step = settings.step(job)
    opener = settings.opener
    if isinstance(step, Packs) and step.n % job.ranks:
        raise ValueError(f"{step} cannot be shared by {job.ranks} data-parallel ranks. Pass a multiple.")
    if settings.scheduler is not None and isinstance(step, Packs):
        raise ValueError(f"A scheduler cannot serve {step}. Pass global_batch=Sequences(n).")
    if opener.packed in ("sequences", "packs"):
        raise ValueError(f"packed={opener.packed!r} takes rows apart, which a stream cannot. Pass a dataset.")

    slots = make_slots(settings.capacity, job.alignment, settings.max_patches)
    chat = None
    records = opener.records
    if opener.processor is not None:
        chat = VisionChat(opener.processor, opener.records, opener.metadata_keys)
        if "" in streams.streams:  # outside a mixture; ids cannot be rendered, so only messages are read
            records = "messages"
    shards, sources = streams.open(opener, job.ranks)
    make_sampler = partial(
        Sampler,
        tokenizer=load_tokenizer(opener.tokenizer),
        chat=chat,
        capacity=slots.longest,
        oversize=settings.oversize,
        drop_empty=settings.empty == "drop",
        text_key=opener.text_key,
        append_eos=opener.append_eos,
        records=records,
        metadata_keys=opener.metadata_keys,
        one_each=opener.packed != "off",
        vocab_size=settings.vocab_size or vocab_size(job.model),
        extras_cost=settings.extras_cost,
        patch=model_patch(job.model),
        max_patches=settings.max_patches,
    )
    scheduling = Scheduling(
        step=step,
        slots=slots,
        cost=settings.cost or model_cost(job.model, settings.capacity) or Cost(),
        dp=job.ranks,
        tail=settings.tail,
        scheduler=settings.scheduler,
    )
    return Settings(
        shards=shards,
        sources=sources,
        dry=streams.mixing.dry or "restart",
        make_sampler=make_sampler,
        scheduling=scheduling,
        collate=settings.collator(job),
        window=max(max(stream.window, stream.shuffle_buffer) for stream in streams.streams.values()),
        seed=int(settings.seed) % 2**256,  # numpy refuses a negative seed
        num_workers=settings.num_workers,
        timeout_s=max(stream.timeout_s for stream in streams.streams.values()),
    )


def _refuse_other_shards(lists: list[list[tuple[str, str | None]]]) -> None:
    """Raise if a rank lists other shards than rank 0, or reads other first records from one."""
    names = [name for name, _ in lists[0]]
    for rank, listed in enumerate(lists):
        if [name for name, _ in listed] != names:
            raise ValueError(
                f"The ranks list other shards: rank 0 has {len(lists[0])}, rank {rank} has {len(listed)}, or "
                "other names. Give every rank all shards, in the same order."
            )
        for (name, first_of_rank_0), (_, first) in zip(lists[0], listed, strict=True):
            if first != first_of_rank_0:
                raise ValueError(
                    f"{name} has other first records on rank {rank} than on rank 0, so it splits itself by "
                    "rank, or draws without a seed. Pass a function make(part, parts) that begins one part."
                )
