"""A source that is read in order, or several with weights, and settings -> the loader of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from lightning_thd._checks import real_number, whole_number
from lightning_thd.batch.thd_batch import collate_checked
from lightning_thd.data.loader import THDLoader
from lightning_thd.data.planning import DataSettings
from lightning_thd.data.read.encode import load_tokenizer
from lightning_thd.data.read.sources import Opener
from lightning_thd.data.read.vision_chat import VisionChat
from lightning_thd.data.streams.intake import OnError, Settings, Source
from lightning_thd.data.streams.samples import Sampler
from lightning_thd.data.streams.schedule import Scheduling
from lightning_thd.data.streams.shards import Shard, open_shards
from lightning_thd.data.streams.steps import Opened, StreamedSteps
from lightning_thd.data.trainer_link import Host, Progress, model_cost, model_counts, model_patch, vocab_size
from lightning_thd.packing import Cost, Packs
from lightning_thd.packing.lengths import make_slots
from lightning_thd.packing.mixtures import Mixing, check_weights, whole_shares

_MOST_KEPT = 2**31 - 1  # sequences in the memory of one rank


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Training data that can only be iterated: read once from front to back, each rank its own shards.

    ``THDDataModule(Stream("shards/*.jsonl.gz", shuffle_buffer=1_000), capacity=8_192)``. An
    ``IterableDataset`` or a generator function given to ``THDDataModule`` is ``Stream(source=...)``.

    Attributes:
        source: a path, folder or glob of ``.jsonl`` (also compressed), ``.parquet``, ``.arrow`` or
            ``.feather`` files, or a list of them, local or through fsspec; a Hugging Face or torch
            ``IterableDataset``; a function that begins an iterator, ``make()`` or ``make(part, parts)``. One
            that is not in parts is read by one rank for all, and must not split itself by rank.
        window: sequences each rank keeps at hand to choose from: more fill packs and share work better, and
            take memory.
        shuffle_buffer: sequences each rank keeps at hand to draw steps from at random; 0 keeps their order.
        steps_per_epoch: optimizer steps of an epoch; None ends it with the shards. Endless streams need one,
            or a Trainer with ``max_steps``.
        on_error: ``"raise"`` for a record that cannot be used, or ``"skip"`` and count it; None takes
            ``on_error`` and ``max_errors`` of the data module.
        max_errors: most records that are skipped, of the whole job; None for no limit.
        timeout_s: seconds until a rank, or a worker, that gives nothing ends the job.
    """

    source: Any = field(kw_only=False)
    window: int = 256
    shuffle_buffer: int = 0
    steps_per_epoch: int | None = None
    on_error: OnError | None = None
    max_errors: int | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        advice = "It is the number of sequences a rank keeps."
        whole_number(self.window, "window", least=1, most=_MOST_KEPT, advice=advice)
        advice = "0 keeps the order of the shards."
        whole_number(self.shuffle_buffer, "shuffle_buffer", most=_MOST_KEPT, advice=advice)
        if self.steps_per_epoch is not None:
            whole_number(self.steps_per_epoch, "steps_per_epoch", least=1, advice="None has no limit.")
        if self.max_errors is not None:
            whole_number(self.max_errors, "max_errors", advice="None has no limit.")
        if self.on_error not in (None, "raise", "skip"):
            raise ValueError(f"on_error={self.on_error!r} is unknown. Choose 'raise' or 'skip'.")
        if (
            real_number(self.timeout_s, "timeout_s", advice="It is the seconds a rank waits for another.")
            <= 0
        ):
            raise ValueError(f"timeout_s={self.timeout_s}; wanted seconds above 0. The default is 600.")


@dataclass(frozen=True, kw_only=True)
class StreamMixture:
    """Several streams taking turns, so that after any number of steps each has had its share."""

    streams: Mapping[str, Stream]
    weights: Mapping[str, float]  # share of each source, in any unit, counted in sequences
    mixing: Mixing = field(default_factory=Mixing)

    def __post_init__(self) -> None:
        check_weights(self.weights)
        if self.mixing.passes is not None or self.mixing.epoch != "longest" or self.mixing.shares == "tokens":
            raise ValueError(
                "Mixing(passes=), Mixing(epoch=) and Mixing(shares='tokens') need sources whose sizes are "
                "known, and a stream's is not. Give weights, Mixing(dry=) for what happens when a source "
                "runs dry, and Stream(steps_per_epoch=) for epochs of a given length."
            )
        lengths = {one.steps_per_epoch for one in self.streams.values()} - {None}
        if len(lengths) > 1:
            raise ValueError(
                f"The streams of a mixture ask for epochs of {sorted(map(str, lengths))} steps. Set one "
                "steps_per_epoch."
            )

    @property
    def window(self) -> int:
        """Return how many sequences of all sources each rank keeps at hand."""
        return max(stream.window for stream in self.streams.values())

    @property
    def timeout_s(self) -> float:
        """Return after how many seconds a silent rank or worker ends the job."""
        return max(stream.timeout_s for stream in self.streams.values())

    @property
    def steps_per_epoch(self) -> int | None:
        """Return the optimizer steps of an epoch."""
        return max(one.steps_per_epoch or 0 for one in self.streams.values()) or None

    def shares(self) -> dict[str, int]:
        """Return whole numbers in the proportions of the weights, temperature applied."""
        raised = self.mixing.tempered(self.weights)
        return dict(zip(raised, whole_shares([*raised.values()]), strict=True))


def open_sources(stream: Stream | StreamMixture, opener: Opener, parts: int) -> Opened:
    """Open the sources of a stream or a mixture as shards; some can be asked for any number of ``parts``."""
    if isinstance(stream, Stream):
        streams, shares = {"": stream}, {"": 1}
    else:
        streams, shares = dict(stream.streams), stream.shares()
    shards: list[Shard] = []
    sources: list[Source] = []
    replays = True
    read_once: dict[str, Any] = {}
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
                on_error=one.on_error or opener.on_error,
                max_errors=opener.max_errors
                if one.on_error is None and one.max_errors is None
                else one.max_errors,
            )
        )
        shards += found.shards
        replays &= found.replays
        read_once |= {f"{name}/{kind}" if name else kind: value for kind, value in found.read_once.items()}
    return Opened(shards=shards, sources=sources, replays=replays, read_once=read_once)


def stream_loader(
    stream: Stream | StreamMixture,
    settings: DataSettings,
    host: Host,
    *,
    kind: Literal["pack", "step"],
    progress: Progress | None = None,
) -> THDLoader:
    """Build the loader of one rank; a collective of the job."""
    if host.sharing is not None:
        raise ValueError(
            "context_parallel_size='dynamic' plans a degree for every microbatch from all lengths, which a "
            "stream does not know. Set a fixed context_parallel_size, or train on a dataset with a length."
        )
    if settings.oversize == "split":
        raise ValueError(
            "oversize='split' needs every length before the first step, which a stream does not know. Set "
            "'truncate', 'drop' or 'own_pack', or cut the sequences while they are read."
        )
    step = settings.step(host)
    if isinstance(step, Packs) and step.n % host.ranks:
        raise ValueError(
            f"{step} cannot be shared by {host.ranks} data-parallel ranks. Use a multiple of it."
        )
    if settings.scheduler is not None and isinstance(step, Packs):
        raise ValueError(f"A scheduler cannot serve {step}. Pass global_batch=Sequences(n).")
    opener, slots = settings.opener, make_slots(settings.capacity, host.alignment, settings.max_patches)
    if opener.packed in ("sequences", "packs"):
        raise ValueError(
            f"packed={opener.packed!r} takes rows of several sequences apart, which a stream cannot. Give "
            "the sequences one by one, or open the rows as a dataset with a length."
        )
    opened = open_sources(stream, opener, host.ranks)
    steps = StreamedSteps(
        Settings(
            shards=opened.shards,
            sources=opened.sources,
            dry=(stream.mixing.dry or "restart") if isinstance(stream, StreamMixture) else "rest",
            make_sampler=partial(
                Sampler,
                tokenizer=load_tokenizer(opener.tokenizer),
                chat=None if opener.processor is None else VisionChat(opener.processor),
                capacity=slots.usable // slots.multiple * slots.multiple,
                oversize=settings.oversize,
                drop_empty=settings.empty == "drop",
                text_key=opener.text_key,
                append_eos=opener.append_eos,
                records=opener.records,
                one_each=opener.packed != "off",
                vocab_size=settings.vocab_size or vocab_size(host.model),
                extras_cost=settings.extras_cost,
                patch=model_patch(host.model),
                max_patches=settings.max_patches,
            ),
            scheduling=Scheduling(
                step=step,
                slots=slots,
                cost=settings.cost or model_cost(host.model, settings.capacity) or Cost(),
                dp=host.ranks,
                tail=settings.tail,
                scheduler=settings.scheduler,
            ),
            collate=partial(
                collate_checked,
                align=host.alignment,
                pad_to=settings.pad_to,
                **model_counts(host.model),
            ),
            window=max(stream.window, stream.shuffle_buffer) if isinstance(stream, Stream) else stream.window,
            seed=settings.seed,
            num_workers=settings.num_workers,
            timeout_s=stream.timeout_s,
        ),
        opened,
        rank=host.rank,
        kind=kind,
        parts=host.ranks,
        reopen=partial(open_sources, stream, opener),
        steps_per_epoch=stream.steps_per_epoch,
        pin_memory=host.on_gpu if settings.pin_memory is None else settings.pin_memory,
    )
    return THDLoader(steps, progress=progress, capacity=settings.capacity)
