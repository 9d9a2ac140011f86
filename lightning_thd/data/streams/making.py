"""A stream and the settings of its data module -> the loader of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from lightning_thd._checks import choice, described, flags, instance, whole_number
from lightning_thd.batch import THDBatch
from lightning_thd.data.read.encode import Tokenizer
from lightning_thd.data.streams.engine import Settings
from lightning_thd.data.streams.loader import Opened, StreamLoader
from lightning_thd.data.streams.samples import Sampler
from lightning_thd.data.streams.schedule import Scheduling
from lightning_thd.data.streams.stream import Stream, StreamMixture, open_sources
from lightning_thd.data.trainer_link import Host, model_cost, model_windows, vocab_size
from lightning_thd.packing import Cost, Packs, Scheduler, Sequences
from lightning_thd.packing.entries import Oversize
from lightning_thd.packing.lengths import MOST_SLOTS, make_slots
from lightning_thd.packing.planner import Tail


@dataclass(frozen=True, kw_only=True)
class StreamPolicies:
    """The settings of a data module that apply to its streams, under the names of its arguments."""

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

    def __post_init__(self) -> None:
        whole_number(self.capacity, "capacity", least=1, most=MOST_SLOTS, advice="The tokens of a pack.")
        choice(self.oversize, "oversize", *get_args(Oversize))
        choice(self.tail, "tail", *get_args(Tail))
        whole_number(self.seed, "seed", least=None)
        whole_number(self.num_workers, "num_workers", advice="0 reads in the training process.")
        instance(self.text_key, "text_key", str, advice="It names the field with the text.")
        if self.global_batch is not None:
            instance(
                self.global_batch, "global_batch", Packs, Sequences, advice="Pass Packs(n) or Sequences(n)."
            )
        for name in ("pad_to", "vocab_size"):
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), name, least=1)
        flags(append_eos=self.append_eos, drop_empty=self.drop_empty)
        if self.pin_memory is not None:
            flags(pin_memory=self.pin_memory)


def stream_loader(
    stream: Stream | StreamMixture,
    policies: StreamPolicies,
    host: Host,
    *,
    kind: Literal["pack", "step"],
    parts: int | None = None,
    consumed: Callable[[], int] | None = None,
    on_load: Callable[[int], None] | None = None,
    begins: Callable[[], bool] | None = None,
    check: Callable[[], None] | None = None,
) -> StreamLoader:
    """Build the stream loader of one rank; a collective of the job.

    Args:
        stream: what is read.
        policies: of the data module.
        host: who runs it.
        kind: what the loader hands out.
        parts: parts of sources that can be asked for any number; by default the data-parallel ranks.
        consumed: batches that the Trainer is done with, ever.
        on_load: told where a restored loader goes on.
        begins: whether the Trainer has begun an epoch of which it has asked for no batch.
        check: called before each batch; raises where the Trainer no longer fits the steps.

    Raises:
        ValueError: for a source that is no stream, and policies that a stream cannot keep.
    """
    instance(stream, "stream", Stream, StreamMixture, advice="Pass Stream(source).")
    instance(policies, "policies", StreamPolicies, advice="Pass StreamPolicies(capacity=..., ...).")
    instance(host, "host", Host, advice="Pass Host(rank=..., ranks=...).")
    choice(kind, "kind", "pack", "step")
    if parts is not None:
        whole_number(parts, "parts", least=1, advice="It is the number of parts of the sources.")
    hooks = {"consumed": consumed, "on_load": on_load, "begins": begins, "check": check}
    for name, told in hooks.items():
        if told is not None and not callable(told):
            raise TypeError(f"{name} is {described(told)}; wanted a function, or None.")
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
        raise ValueError(
            f"{step} cannot be shared by {host.ranks} data-parallel ranks. Use a multiple of it."
        )
    if policies.scheduler is not None and isinstance(step, Packs):
        raise ValueError(f"A scheduler cannot serve {step}. Pass global_batch=Sequences(n).")
    parts = parts or host.ranks
    found = open_sources(stream, parts)
    settings = _settings(stream, policies, host, found, step)
    return StreamLoader(
        settings,
        rank=host.rank,
        kind=kind,
        parts=parts,
        replays=found.replays,
        alone=found.alone,
        reopen=partial(open_sources, stream),
        steps_per_epoch=stream.steps_per_epoch,
        consumed=consumed,
        on_load=on_load,
        begins=begins,
        check=check,
        pin_memory=host.on_gpu if policies.pin_memory is None else policies.pin_memory,
    )


def _settings(
    stream: Stream | StreamMixture,
    policies: StreamPolicies,
    host: Host,
    found: Opened,
    step: Packs | Sequences,
) -> Settings:
    """Collect the settings of reading and packing a stream."""
    slots = make_slots(policies.capacity, host.alignment)
    one = stream if isinstance(stream, Stream) else None
    sampling: dict[str, Any] = {
        "capacity": slots.usable // slots.multiple * slots.multiple,
        "oversize": policies.oversize,
        "drop_empty": policies.drop_empty,
        "text_key": policies.text_key,
        "append_eos": policies.append_eos,
        "vocab_size": policies.vocab_size or vocab_size(host.model),
    }
    tokenizer = policies.tokenizer()
    return Settings(
        shards=found.shards,
        sources=found.sources,
        dry=(stream.mixing.dry or "restart") if isinstance(stream, StreamMixture) else "rest",
        make_sampler=partial(Sampler, tokenizer=tokenizer, **sampling),
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
        window=stream.window if one is None else max(one.window, one.shuffle_buffer),
        seed=policies.seed,
        num_workers=policies.num_workers,
        timeout_s=stream.timeout_s,
    )
