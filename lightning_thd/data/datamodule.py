"""Sources -> packed, planned, resumable loaders for every stage of a Lightning Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import lightning.pytorch as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_thd.alignment import Alignment
from lightning_thd.data import trainer_link as link
from lightning_thd.data.loader import BatchMaker, Kind, THDLoader
from lightning_thd.data.planning import PlanSettings, make_planner
from lightning_thd.data.read.encode import Tokenizer, load_tokenizer
from lightning_thd.data.read.sources import Opener, Packed, Source, is_known
from lightning_thd.data.sets import DataSet, open_set
from lightning_thd.data.store.index import Empty
from lightning_thd.data.streams import Stream, StreamLoader, StreamPolicies, is_stream, stream_loader
from lightning_thd.packing import Cost, PackPlanner, Packs, Scheduler, Sequences
from lightning_thd.packing.entries import Oversize
from lightning_thd.packing.planner import Tail

_STAGES = {"fit": ("train", "val"), "validate": ("val",)}


class THDDataModule(L.LightningDataModule):
    """Packs sequences of any length into batches of at most ``capacity`` tokens, in the batch.

    ``THDDataModule(dataset, capacity=8_192)`` works under any Lightning strategy.

    Args:
        train: a map-style dataset giving ``{"input_ids": ints[, "labels": ints]}`` (labels unshifted, -100
            where ignored), or the path of a ``.jsonl`` file, a ``.parquet`` or ``.arrow`` file with a column
            ``input_ids`` or a folder of them, a text file, a folder of text or ``.jsonl`` files, or a folder
            that ``datasets.Dataset.save_to_disk`` or ``TokenStore.save`` wrote. Instead of ids, rows and JSON
            objects may hold text, ``prompt`` and ``completion``, or ``messages``: these are tokenised once,
            with loss on what the assistant says alone where there is one. An ``IterableDataset``, a function
            that begins an iterator, ``.tar`` shards, or a ``data.streams.Stream``: read once, front to back.
        capacity: most tokens of a pack.
        global_batch: ``Packs(n)``, n packs to an optimizer step, or ``Sequences(n)``, exactly n sequences
            to a step in as many microbatches as they need (needs a strategy of ours). Default: one pack a
            rank a batch, ``Packs(ranks * accumulate_grad_batches)``.
        val: as ``train``; every sequence is used once, in packs of the dataset's own order.
        test: as ``val``.
        predict: as ``val``; ``batch.unpack(output)`` and ``batch.sequence_ids`` give predictions a sequence.
        tokenizer: ``str -> ids`` for text, or the name of a Hugging Face tokenizer; UTF-8 bytes by default.
            Conversations need a Hugging Face tokenizer with a chat template.
        text_key: the key of the text in a JSONL object or a row.
        append_eos: end documents and completions with the tokenizer's EOS where it does not do so.
        packed: what rows become that were packed before and carry ``lengths``, ``cu_seqlens`` or
            ``position_ids``: ``"sequences"`` takes them apart and plans the sequences anew, which shuffles
            them, fits any capacity and balances the ranks; ``"packs"`` keeps each row as a ready pack, in
            the order given, for ``Packs(n)``; ``"off"`` takes a row for one sequence; ``"auto"`` is
            ``"sequences"`` where the first row carries such a key and ``"off"`` elsewhere.
        oversize: what becomes of a training sequence longer than ``capacity``: ``error``, ``drop``,
            ``truncate``, ``split`` or ``own_pack``. Validation, test and prediction use ``own_pack`` in place
            of ``error``, so that nothing is lost there.
        empty: what becomes of a sequence without tokens: ``error`` or ``drop``.
        tail: the last, incomplete step of an epoch: ``pad`` with emptier packs, or ``drop``.
        window: sequences that are packed together; larger packs better, smaller shuffles better.
        seed: decides the order of every epoch.
        schedule: a ready-made plan for training with ``Packs(n)``: the number of the microbatch of each
            sequence, ints ``[N]``.
        scheduler: a function in the place of ``packing.balance``, for ``Sequences(n)``.
        cost: work of a sequence by its length, which the ranks get equal shares of; by default that of the
            model, where its transformers config is found.
        pad_to: fill every pack to this many slots; by default packs differ in size.
        vocab_size: ids are checked against it; found in the model's config when absent.
        num_workers: processes that read and collate; as many tokenise and count.
        prefetch_factor: batches prepared ahead by each worker.
        pin_memory: page-lock batches; by default when training on a GPU.
        cache_dir: where tokenised text and counts are kept; ``~/.cache/lightning_thd`` by default. Datasets
            with a ``fingerprint``, Hugging Face datasets and files are counted once; other objects anew in
            every run.

    Raises:
        ValueError: for values that cannot be, data that does not fit its policy, ids outside the vocabulary.
        MisconfigurationException: for a Trainer whose accumulation, ranks or strategy contradict
            ``global_batch``.
    """

    def __init__(
        self,
        train: Source | Stream | None = None,
        *,
        capacity: int,
        global_batch: Packs | Sequences | None = None,
        val: Source | None = None,
        test: Source | None = None,
        predict: Source | None = None,
        tokenizer: Tokenizer | str | None = None,
        text_key: str = "text",
        append_eos: bool = True,
        packed: Packed = "auto",
        oversize: Oversize = "error",
        empty: Empty = "error",
        tail: Tail = "pad",
        window: int = 4096,
        seed: int = 0,
        schedule: Sequence[int] | None = None,
        scheduler: Scheduler | None = None,
        cost: Cost | None = None,
        pad_to: int | None = None,
        vocab_size: int | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.capacity, self.global_batch = capacity, global_batch
        self._plans = PlanSettings(
            capacity=capacity,
            global_batch=global_batch,
            oversize=oversize,
            tail=tail,
            window=window,
            seed=seed,
            schedule=schedule,
            scheduler=scheduler,
            cost=cost,
            pad_to=pad_to,
        )
        self._opener = Opener(
            tokenizer=tokenizer,
            text_key=text_key,
            append_eos=append_eos,
            packed=packed,
            cache_dir=cache_dir,
            num_workers=num_workers,
        )
        self.empty, self.vocab_size = empty, vocab_size
        self.num_workers, self.prefetch_factor, self.pin_memory = num_workers, prefetch_factor, pin_memory
        self._stream = _as_stream(train)
        if self._stream is not None:
            train = None
        given = {"train": train, "val": val, "test": test, "predict": predict}
        self._sources = _named({stage: source for stage, source in given.items() if source is not None})
        for stage in ("val", "test", "predict"):
            if given[stage] is None:  # a loader that is there makes Lightning ask for its step
                hook = f"{stage}_dataloader"
                setattr(self, hook, MethodType(getattr(L.LightningDataModule, hook), self))
        self._attached = link.Host()
        self._sets: dict[str, DataSet] = {}
        self._planners: dict[tuple[object, ...], PackPlanner] = {}

    def attach(
        self,
        *,
        rank: int = 0,
        ranks: int = 1,
        accumulate: int = 1,
        model: nn.Module | None = None,
        alignment: Alignment | None = None,
    ) -> None:
        """Say who loads, in a loop without a Lightning Trainer; call it before ``setup``.

        Args:
            rank: data-parallel rank of this process.
            ranks: number of data-parallel ranks.
            accumulate: batches a rank runs between two optimizer steps, as a Trainer's
                ``accumulate_grad_batches``; 1 with ``Sequences(n)``.
            model: the module that is trained: its FLOPs balance the ranks, its vocabulary checks the ids.
            alignment: what lengths and totals must be multiples of; by default what the model asks for.

        Raises:
            MisconfigurationException: when ``global_batch`` contradicts them.
        """
        link.check_packs(self.global_batch, ranks=ranks, accumulate=accumulate)
        self._attached = link.Host(
            rank=rank,
            ranks=ranks,
            accumulate=accumulate,
            is_first=rank == 0,
            model=model,
            alignment=link.model_alignment(model) if alignment is None else alignment,
        )

    @property
    def _host(self) -> link.Host:
        return self._attached if self.trainer is None else link.host_of(self.trainer)

    def prepare_data(self) -> None:
        """Tokenise, count and cache what can be cached; Lightning calls this on one process a node."""
        for name, source in self._sources.items():
            if is_known(source):
                self._open(name)

    def setup(self, stage: str) -> None:
        """Open and count the sets of a stage, and check the Trainer against ``global_batch``."""
        stages = _STAGES.get(stage, (stage,))
        if "train" in stages:
            link.check_trainer(self.trainer, self.global_batch)
        for name in self._sources:
            if name.partition("/")[0] in stages:
                self._open(name)

    def _open(self, name: str) -> None:
        if name not in self._sets:
            opener = replace(self._opener, progress=self._host.is_first)
            self._sets[name] = open_set(name, self._sources[name], opener, empty=self.empty)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Of every opened set, the sequences empty, dropped, truncated, split, and the tokens lost."""
        return {name: dict(self._planner(name).entries.counts) for name in self._sets}

    def train_dataloader(self) -> THDLoader | StreamLoader:
        """Return this rank's training batches: ``THDBatch``, or ``THDStep`` with ``Sequences(n)``."""
        if self._stream is not None:
            kind: Literal["pack", "step"] = "step" if isinstance(self.global_batch, Sequences) else "pack"
            return self._streamed(self._stream, kind)
        return self._loader(
            "train",
            kind="step" if isinstance(self.global_batch, Sequences) or self._host.whole_steps else "pack",
            fixed_order=getattr(self.trainer, "overfit_batches", 0) > 0,
            progress=link.Progress(self.trainer) if self.trainer is not None else None,
        )

    def train_steps(self) -> THDLoader | StreamLoader:
        """Return this rank's training steps as ``THDStep``, for a loop without a Trainer: see ``attach``."""
        if self._stream is not None:
            return self._streamed(self._stream, "step")
        return self._loader("train", kind="step", fixed_order=False)

    def val_dataloader(self) -> THDLoader | list[THDLoader]:
        """Return this rank's validation batches; a loader for each source where ``val`` names several."""
        return self._evaluation("val")

    def test_dataloader(self) -> THDLoader | list[THDLoader]:
        """Return this rank's test batches, as ``val_dataloader``."""
        return self._evaluation("test")

    def predict_dataloader(self) -> THDLoader | list[THDLoader]:
        """Return this rank's prediction batches, as ``val_dataloader``."""
        return self._evaluation("predict")

    def _streamed(self, stream: Stream, kind: Literal["pack", "step"]) -> StreamLoader:
        """Make the loader of a stream; every rank of the job calls this."""
        if getattr(self.trainer, "overfit_batches", 0) > 0:
            raise MisconfigurationException(
                "overfit_batches repeats the first batches of data that can be asked for them, and a stream "
                "cannot. Pass a dataset with a length, or overfit_batches=0."
            )
        plans, opener = self._plans, self._opener
        if plans.schedule is not None:
            raise MisconfigurationException(
                "A schedule numbers the sequences of a dataset with a length. Leave it out for a stream."
            )
        progress = link.Progress(self.trainer) if self.trainer is not None else None
        policies = StreamPolicies(
            capacity=plans.capacity,
            global_batch=plans.global_batch,
            tokenizer=partial(load_tokenizer, opener.tokenizer),
            text_key=opener.text_key,
            append_eos=opener.append_eos,
            oversize=plans.oversize,
            drop_empty=self.empty == "drop",
            tail=plans.tail,
            seed=plans.seed,
            cost=plans.cost,
            scheduler=plans.scheduler,
            pad_to=plans.pad_to,
            vocab_size=self.vocab_size,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )
        return stream_loader(
            stream,
            policies,
            self._host,
            kind=kind,
            consumed=progress.consumed if progress is not None else None,
            on_load=progress.match if progress is not None else None,
        )

    def _evaluation(self, stage: str) -> THDLoader | list[THDLoader]:
        several = [name for name in self._sources if name.startswith(f"{stage}/")]
        loaders = [self._loader(name, kind="eval", fixed_order=True) for name in several or [stage]]
        return loaders if several else loaders[0]

    def _loader(
        self, name: str, *, kind: Kind, fixed_order: bool, progress: link.Progress | None = None
    ) -> THDLoader:
        if name not in self._sets:
            raise MisconfigurationException(
                f"THDDataModule has no data for {name!r}. Pass THDDataModule(..., {name}=...)"
                + (", and call setup() first." if name in self._sources else ".")
            )
        host, planner, data = self._host, self._planner(name), self._sets[name]
        maker = BatchMaker(
            dataset=data.dataset,
            index=data.index,
            align=host.alignment,
            pad_to=self._plans.pad_to,
            vocab_size=self.vocab_size or link.vocab_size(host.model),
            windows=link.model_windows(host.model),
        )
        return THDLoader(
            planner,
            maker,
            rank=host.rank,
            dp=host.ranks,
            per_step=1 if kind == "step" else planner.global_batch.n // host.ranks,
            kind=kind,
            fixed_order=fixed_order,
            consumed=progress.consumed if progress is not None else None,
            limit=progress.limit if progress is not None else None,
            on_load=progress.match if progress is not None else None,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor,
            pin_memory=host.on_gpu if self.pin_memory is None else self.pin_memory,
        )

    def _planner(self, name: str) -> PackPlanner:
        """Plan a set when it is first asked for: by then a model built in ``configure_model`` is there."""
        # The same data module may serve Trainers of other ranks or accumulation, one after the other.
        host = self._host
        key = (name, self._plans.step(host), host.ranks, host.alignment, host.sharing)
        if key not in self._planners:
            self._planners = {other: plan for other, plan in self._planners.items() if other[0] != name}
            self._planners[key] = make_planner(
                self._sets[name],
                self._plans,
                host,
                training=name == "train",
                cache_dir=self._opener.cache_dir,
            )
            _announce(self._sets[name], self._planners[key], host)
        return self._planners[key]


def _named(sources: Mapping[str, Any]) -> dict[str, Source]:
    """Give each source of an evaluation stage that has several a name of its own: ``val/code``."""
    return dict(sources)


def _as_stream(train: object) -> Stream | None:
    """Wrap training data that can only be iterated; None for data with a length."""
    if isinstance(train, Stream):
        return train
    return None if train is None or not is_stream(train) else Stream(source=train)


def _announce(data: DataSet, planner: PackPlanner, host: link.Host) -> None:
    """Say, and log, how large a set is and what its policies leave out or change."""
    lengths, name = data.index.lengths, data.name
    changed = {key: count for key, count in planner.entries.counts.items() if count}
    rank_zero_info(
        f"{name}: {len(lengths):,} sequences, {int(lengths.sum()):,} tokens"
        + "".join(f", {key.replace('_', ' ')} {count:,}" for key, count in changed.items())
    )
    for logger in host.loggers if changed else ():
        logger.log_metrics({f"data/{name}_{key}": count for key, count in changed.items()}, step=0)
