"""A source that is read in order, and how -> a ``Stream``, which ``THDDataModule`` trains on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from lightning_thd._checks import whole_number
from lightning_thd.batch import THDBatch
from lightning_thd.data.read.encode import Tokenizer
from lightning_thd.data.streams.engine import Settings
from lightning_thd.data.streams.intake import Source
from lightning_thd.data.streams.loader import Opened, StreamLoader
from lightning_thd.data.streams.reader import OnError
from lightning_thd.data.streams.samples import Sampler
from lightning_thd.data.streams.schedule import Scheduling
from lightning_thd.data.streams.shards import Shard, open_shards
from lightning_thd.data.streams.turns import whole_shares
from lightning_thd.data.trainer_link import Host, model_cost, model_windows, vocab_size
from lightning_thd.packing import Cost, Packs, Scheduler, Sequences
from lightning_thd.packing.lengths import make_slots
from lightning_thd.packing.mixtures import Mixing, check_weights
from lightning_thd.packing.planner import Tail


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Data without a length: read once from front to back, on every rank its own shards.

    ``THDDataModule(Stream("shards/*.jsonl.gz", shuffle_buffer=1_000), capacity=8_192)``. An
    ``IterableDataset`` or a generator function given to ``THDDataModule`` is ``Stream(source=...)``.

    Attributes:
        source: paths or globs of ``.jsonl[.gz|.zst]``, ``.parquet``, ``.arrow`` and ``.tar`` shards, alone or
            in a list, local or through fsspec; a Hugging Face or torch ``IterableDataset``; a function that
            begins an iterator, ``make()`` or ``make(part, parts)``. One that is not in parts is read by one
            rank for all, and must not split itself by rank.
        window: sequences each rank keeps at hand to choose from: more fill packs and share work better, and
            take memory.
        shuffle_buffer: sequences each rank keeps at hand to draw steps from at random; 0 keeps their order.
        steps_per_epoch: optimizer steps of an epoch; None ends it with the shards. Endless streams need one,
            or a Trainer with ``max_steps``.
        on_error: ``"raise"`` for a record that cannot be used, or ``"skip"`` and count it.
        max_errors: most records that are skipped, of the whole job; None for no limit.
        timeout_s: seconds until a rank, or a worker, that gives nothing ends the job.
    """

    source: Any = field(kw_only=False)
    window: int = 256
    shuffle_buffer: int = 0
    steps_per_epoch: int | None = None
    on_error: OnError = "raise"
    max_errors: int | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        whole_number(self.window, "window", least=1, advice="It is the number of sequences a rank keeps.")
        whole_number(self.shuffle_buffer, "shuffle_buffer", advice="0 keeps the order of the shards.")
        if self.steps_per_epoch is not None:
            whole_number(self.steps_per_epoch, "steps_per_epoch", least=1, advice="None has no limit.")
        if self.max_errors is not None:
            whole_number(self.max_errors, "max_errors", advice="None has no limit.")
        if self.on_error not in ("raise", "skip"):
            raise ValueError(f"on_error={self.on_error!r} is unknown. Choose 'raise' or 'skip'.")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s={self.timeout_s}; wanted seconds above 0.")


@dataclass(frozen=True, kw_only=True)
class StreamMixture:
    """Several streams that sources take turns of, so that any prefix of the steps has their shares.

    Attributes:
        streams: by the names of the sources. ``shuffle_buffer``, ``on_error`` and ``max_errors`` hold for
            each; the longest ``window`` and ``timeout_s`` for all.
        weights: share of each source, in any unit, counted in sequences.
        mixing: what happens when a source runs dry, and the temperature.
    """

    streams: Mapping[str, Stream]
    weights: Mapping[str, float]
    mixing: Mixing = field(default_factory=Mixing)

    def __post_init__(self) -> None:
        check_weights(self.weights)
        if self.mixing.passes is not None or self.mixing.epoch != "longest":
            raise ValueError(
                "Mixing(passes=) and Mixing(epoch=) count sequences of sources whose sizes are known, and a "
                "stream's is not. Give weights, Mixing(dry=) for what happens when a source runs dry, and "
                "Stream(steps_per_epoch=) for epochs of a given length."
            )
        lengths = {one.steps_per_epoch for one in self.streams.values()} - {None}
        if len(lengths) > 1:
            raise ValueError(
                f"The streams of a mixture ask for epochs of {sorted(map(str, lengths))} steps. Set one "
                "steps_per_epoch."
            )

    @property
    def window(self) -> int:
        """Sequences that each rank keeps at hand, of all sources together."""
        return max(stream.window for stream in self.streams.values())

    @property
    def timeout_s(self) -> float:
        """Seconds until a rank, or a worker, that gives nothing ends the job."""
        return max(stream.timeout_s for stream in self.streams.values())

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of an epoch."""
        return max((one.steps_per_epoch or 0 for one in self.streams.values())) or None

    def shares(self) -> dict[str, int]:
        """Whole numbers in the proportions of the weights, by temperature."""
        raised = [weight ** (1 / self.mixing.temperature) for weight in self.weights.values()]
        return dict(zip(self.weights, whole_shares(raised), strict=True))


def open_sources(stream: Stream | StreamMixture, parts: int) -> Opened:
    """Take the sources of a stream apart into shards.

    Args:
        stream: one, or a mixture.
        parts: that sources which can be asked for any number of parts are asked for.

    Raises:
        ValueError: for what is no source, naming it in a mixture.
    """
    if isinstance(stream, Stream):
        streams, shares = {"": stream}, {"": 1}
    else:
        streams, shares = dict(stream.streams), stream.shares()
    shards: list[Shard] = []
    sources: list[Source] = []
    replays = True
    for name, one in streams.items():
        try:
            found = open_shards(one.source, parts=parts)
        except ValueError as err:
            raise ValueError(f"The source {name!r} of the mixture: {err}" if name else f"{err}") from err
        sources.append(
            Source(
                name=name,
                first=len(shards),
                stop=len(shards) + len(found.shards),
                share=shares[name],
                shuffle_buffer=one.shuffle_buffer,
                on_error=one.on_error,
                max_errors=one.max_errors,
            )
        )
        shards += found.shards
        replays &= found.replays
    return Opened(shards=shards, sources=sources, replays=replays)


@dataclass(frozen=True, kw_only=True)
class StreamPolicies:
    """What a data module decides for its streams; the names are those of its arguments."""

    capacity: int
    global_batch: Packs | Sequences | None
    tokenizer: Callable[[], Tokenizer]
    text_key: str = "text"
    append_eos: bool = True
    oversize: str = "error"
    drop_empty: bool = False
    tail: Tail = "pad"
    seed: int = 0
    cost: Cost | None = None
    scheduler: Scheduler | None = None
    pad_to: int | None = None
    vocab_size: int | None = None
    num_workers: int = 0
    pin_memory: bool | None = None


def stream_loader(
    stream: Stream | StreamMixture,
    policies: StreamPolicies,
    host: Host,
    *,
    kind: Literal["pack", "step"],
    parts: int | None = None,
    consumed: Callable[[], int] | None = None,
    on_load: Callable[[int], None] | None = None,
) -> StreamLoader:
    """Make the loader of one rank. Collective over the job.

    Args:
        stream: what is read.
        policies: of the data module.
        host: who runs it.
        kind: what the loader hands out.
        parts: parts of sources that can be asked for any number; by default the data-parallel ranks.
        consumed: batches of the epoch that the Trainer is done with.
        on_load: told where a restored loader goes on.

    Raises:
        ValueError: for a source that is no stream, and policies that a stream cannot keep.
    """
    if host.sharing is not None:
        raise ValueError(
            "context_parallel_size='dynamic' plans a degree for every microbatch from all lengths, which a "
            "stream does not know. Set a fixed context_parallel_size, or train on a dataset with a length."
        )
    if policies.oversize == "split":
        raise ValueError(
            "oversize='split' needs every length before the first step, which a stream does not know. Set "
            "'truncate', 'drop' or 'own_pack', or cut the sequences while they are read."
        )
    step = policies.global_batch or Packs(host.ranks * host.accumulate)
    if isinstance(step, Packs) and step.n % host.ranks:
        raise ValueError(f"{step} cannot be shared by {host.ranks} data-parallel ranks. Use a multiple.")
    if policies.scheduler is not None and isinstance(step, Packs):
        raise ValueError(f"A scheduler cannot serve {step}. Pass global_batch=Sequences(n).")
    slots = make_slots(policies.capacity, host.alignment)
    parts = parts or host.ranks
    found = open_sources(stream, parts)
    tokenizer = policies.tokenizer()
    settings = Settings(
        shards=found.shards,
        sources=found.sources,
        dry=(stream.mixing.dry or "restart") if isinstance(stream, StreamMixture) else "rest",
        make_sampler=partial(
            Sampler,
            capacity=slots.usable // slots.multiple * slots.multiple,
            oversize=policies.oversize,  # type: ignore[arg-type]  # checked above
            drop_empty=policies.drop_empty,
            tokenizer=tokenizer,
            text_key=policies.text_key,
            append_eos=policies.append_eos,
            vocab_size=policies.vocab_size or vocab_size(host.model),
        ),
        scheduling=Scheduling(
            step=step,
            slots=slots,
            cost=policies.cost or model_cost(host.model, policies.capacity) or Cost(),
            dp=host.ranks,
            tail=policies.tail,
            scheduler=policies.scheduler,
        ),
        collate=partial(
            THDBatch.collate,
            align=host.alignment,
            pad_to=policies.pad_to,
            windows=model_windows(host.model),
        ),
        window=max(stream.window, stream.shuffle_buffer) if isinstance(stream, Stream) else stream.window,
        seed=policies.seed,
        num_workers=policies.num_workers,
        timeout_s=stream.timeout_s,
    )
    return StreamLoader(
        settings,
        rank=host.rank,
        kind=kind,
        parts=parts,
        replays=found.replays,
        reopen=partial(open_sources, stream),
        steps_per_epoch=stream.steps_per_epoch,
        consumed=consumed,
        on_load=on_load,
        pin_memory=host.on_gpu if policies.pin_memory is None else policies.pin_memory,
    )
