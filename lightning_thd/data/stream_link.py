"""Training data that can only be iterated, a data module's settings -> the settings of a stream loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd.data.mixing import Sources
from lightning_thd.data.planning import PlanSettings
from lightning_thd.data.progress import refuse_cut_steps
from lightning_thd.data.read.encode import load_tokenizer
from lightning_thd.data.read.sources import Opener
from lightning_thd.data.sets import is_mixture, weighted
from lightning_thd.data.store.measure import OnError
from lightning_thd.data.streams import Stream, StreamLoader, StreamMixture, StreamPolicies, is_stream
from lightning_thd.packing.mixtures import Mixing


def as_stream(
    train: object, on_error: OnError, max_errors: int | None, mixing: Mixing | None
) -> Stream | StreamMixture | None:
    """Wrap training data that can only be iterated as a stream; None for data with a length.

    Raises:
        TypeError: for what is no source with a weight.
        ValueError: for a mixture of which a source has no weight that is a number above 0.
    """
    if isinstance(train, Stream):
        return train
    if train is None:
        return None
    wrap = partial(Stream, on_error=on_error, max_errors=max_errors)
    if not is_mixture(train):
        return wrap(source=train) if is_stream(train) else None
    assert isinstance(train, Mapping)
    if not any(_is_streamed(given) for given in train.values()):
        return None
    parts = {name: weighted(name, given) for name, given in train.items()}
    streams = {
        name: source if isinstance(source, Stream) else wrap(source=source)
        for name, (source, _) in parts.items()
    }
    return StreamMixture(
        streams=streams,
        weights={name: weight for name, (_, weight) in parts.items()},
        mixing=Mixing() if mixing is None else mixing,
    )


def _is_streamed(given: object) -> bool:
    """Return whether a source of a mixture, with its weight, can only be iterated."""
    source = given[0] if isinstance(given, tuple | list) and len(given) == 2 else given
    return isinstance(source, Stream) or is_stream(source)


def stream_sources(loader: StreamLoader) -> Sources:
    """Describe the sources of a stream mixture."""
    return Sources(
        of=loader,
        names=loader.source_names,
        source_of=loader.source_of,
        tokens_of=lambda epoch, step, dp: loader.next_tokens(),
        per_step=loader.per_step,
    )


class StreamOfFit:
    """The stream loader of a fit: where Lightning asks for its loaders again, the stream goes on."""

    def __init__(self) -> None:
        self._key: object = None

    def loader(
        self, trainer: L.Trainer | None, key: object, make: Callable[[], StreamLoader], states: Sequence[Any]
    ) -> StreamLoader:
        """Return the loader that a fit iterates already, or make one that goes on where it should.

        Args:
            trainer: that asks; None in other loops.
            key: settings of the loader; under others one is made anew, at the position of that before.
            make: makes it.
            states: of loaders in a checkpoint whose epoch was complete.
        """
        before, self._key = self._key, key
        combined = None if trainer is None else trainer.fit_loop._combined_loader
        given = [] if combined is None else combined.flattened
        running = next((loader for loader in given if isinstance(loader, StreamLoader)), None)
        if running is not None and before == key:
            return running
        loader = make()
        refuse_cut_steps(trainer, loader)
        loader.go_on(states if running is None else [running.state_dict()])
        return loader


def refuse_streams(sources: Mapping[str, object]) -> None:
    """Refuse streams where every sequence must be used once, in a known order.

    Raises:
        ValueError: naming the stage.
    """
    for stage, source in sources.items():
        if isinstance(source, Stream) or (source is not None and is_stream(source)):
            raise ValueError(
                f"{stage} is a stream ({type(source).__name__}), but evaluation uses each sequence once, "
                "in a known order. Pass a dataset with a length, a list or a path; train may be a stream."
            )


def refuse_repeats(trainer: L.Trainer | None, plans: PlanSettings) -> None:
    """Refuse settings that need a batch by its number, which a stream cannot give.

    Raises:
        MisconfigurationException: for ``overfit_batches`` and for a ready-made schedule.
    """
    if getattr(trainer, "overfit_batches", 0) > 0:
        raise MisconfigurationException(
            "overfit_batches repeats the first batches of data that can be asked for them, and a stream "
            "cannot. Pass a dataset with a length, or overfit_batches=0."
        )
    if plans.schedule is not None:
        raise MisconfigurationException(
            "A schedule numbers the sequences of a dataset with a length. Leave it out for a stream."
        )


def stream_policies(
    plans: PlanSettings, opener: Opener, *, drop_empty: bool, vocab_size: int | None, pin_memory: bool | None
) -> StreamPolicies:
    """Collect the settings of a data module that apply to its streams."""
    return StreamPolicies(
        capacity=plans.capacity,
        global_batch=plans.global_batch,
        tokenizer=partial(load_tokenizer, opener.tokenizer),
        text_key=opener.text_key,
        append_eos=opener.append_eos,
        oversize=plans.oversize,
        drop_empty=drop_empty,
        tail=plans.tail,
        seed=plans.seed,
        cost=plans.cost,
        scheduler=plans.scheduler,
        pad_to=plans.pad_to,
        vocab_size=vocab_size,
        num_workers=opener.num_workers,
        pin_memory=pin_memory,
    )
