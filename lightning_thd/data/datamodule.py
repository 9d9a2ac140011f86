"""Sources -> packed, planned, resumable loaders for every stage of a Lightning Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_thd._checks import answers, choice, flags, whole_number
from lightning_thd._trees import tree_leaves
from lightning_thd.alignment import Alignment
from lightning_thd.batch.media import ExtrasCost
from lightning_thd.data import auto_capacity, planning, sets
from lightning_thd.data import trainer_link as link
from lightning_thd.data.loader import BatchMaker, Kind, PlannedSteps, THDLoader
from lightning_thd.data.read.conversations import Records
from lightning_thd.data.read.encode import Tokenizer
from lightning_thd.data.read.sources import Opener, Packed, Source, is_known
from lightning_thd.data.source_log import LogsSources
from lightning_thd.data.store.index import Empty, OnError
from lightning_thd.data.streams.shards import is_stream
from lightning_thd.data.streams.stream import Stream, StreamedSteps, Streams
from lightning_thd.packing import Cost, Packs, Scheduler, Sequences
from lightning_thd.packing.entries import Oversize
from lightning_thd.packing.mixtures import Mixing
from lightning_thd.packing.planner import Planner, Tail

# The answer to arguments that ask for the size of a step.
_STEP = "What a step holds is global_batch=Packs(n) or global_batch=Sequences(n)"
_STAGES = {"fit": ("train", "val"), "validate": ("val",)}


class THDDataModule(LogsSources):
    """Puts sequences of any length together in packs of at most ``capacity`` tokens.

    ``THDDataModule(dataset, capacity=8_192)`` works under any Lightning strategy.

    Args:
        train: a map-style dataset giving ``{"input_ids": ints[, "labels": ints]}`` (labels unshifted,
            -100 where ignored); or a path, a glob, an address (``s3://``, ``hf://``, ...) or a list of
            them. Files are text, ``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet``, ``.arrow`` or
            ``.feather``, also compressed: ``.gz``, ``.zst``, ``.bz2`` or ``.xz``. A path may name a folder of
            such files, or a folder that ``TokenStore.save`` wrote. In place of ids, records may hold text,
            ``prompt`` and ``completion``, or a conversation. The loss then covers all text, only the
            completion, or only the assistant's turns. Records with a ``query`` (or ``anchor``), its
            ``positive`` and any ``negative``, each one text or row of ids or a list of them, train
            embeddings. A dict ``{name: (source, weight)}`` is a mixture. An ``IterableDataset``, a function
            that returns an iterator, and ``data.streams.Stream`` are streams: read once, front to back. If
            one source of a mixture is a stream, all are read as streams.
        capacity: most tokens of a pack, with padding for alignment. ``own_pack`` may exceed it, and so may a
            pack that ranks share under ``context_parallel_size="dynamic"``. ``"auto"`` finds the largest one
            that trains on the GPUs of a Trainer, before the first step; a checkpoint keeps it.
        global_batch: ``Packs(n)`` is n packs per optimizer step. ``Sequences(n)`` is exactly n sequences per
            step, in as many microbatches as needed; it requires one of our strategies. Default: one pack for
            each rank and batch, ``Packs(ranks * accumulate_grad_batches)``.
        val: as ``train``, but no stream; every sequence is used once, in one order. A dict
            ``{name: source}`` makes a loader for each source; its batches carry the name in ``set_name``.
        test: as ``val``.
        predict: as ``val``; ``batch.unpack(output)`` splits outputs in the order of ``batch.sequence_ids``.
        tokenizer: ``str -> ids`` for text, or the name of a Hugging Face tokenizer; UTF-8 bytes by default.
            Conversations need a Hugging Face tokenizer with a chat template.
        processor: the processor of Qwen2-VL, Qwen2.5-VL, Qwen3-VL or Llava, or its folder, for conversations
            with images. Images are bytes, or paths from the file's folder, in messages or under ``images``.
        text_key: the key of the text in a record.
        append_eos: end documents and completions with EOS if the tokenizer does not add it.
        records: the kind of the records, if their keys do not show it: ``"text"``, ``"ids"``, ``"prompt"``,
            ``"messages"``, ``"sharegpt"``, ``"alpaca"`` or ``"pairs"``.
        metadata_keys: keys of conversations that may be dropped, such as ``("reviewer",)``. A key that is
            not read, not well known as metadata and not listed here is refused.
        packed: how to read rows that were packed before and carry ``lengths``, ``cu_seqlens`` or
            ``position_ids``. ``"sequences"`` splits rows into sequences and packs these again. ``"packs"``
            keeps each row as a ready pack, in the order given, for ``Packs(n)``. ``"off"`` makes a row one
            sequence. ``"auto"`` is ``"sequences"`` if row 0 has such a key; else a row must be one sequence.
        oversize: what to do with a sequence longer than ``capacity``: ``error``, ``drop``, ``truncate``,
            ``split`` or ``own_pack``. Evaluation uses ``own_pack`` in place of ``error``.
        empty: what to do with a sequence without tokens: ``error`` or ``drop``.
        on_error: what to do with a record that cannot be read or tokenised, and with a row that has nulls,
            negative ids or labels that do not fit: ``raise`` or ``skip``. Skipped records are counted, and
            listed in ``skipped.jsonl`` beside the tokens in the cache. ``Stream(on_error=)`` overrides it.
        max_errors: most skipped records of a source; None sets no bound. A resumed stream counts from 0.
        tail: what to do with the last, incomplete step of an epoch: ``pad`` runs it with emptier packs,
            ``drop`` leaves it out.
        window: how many sequences ``Packs(n)`` packs together; more sequences fill packs better.
        seed: decides the order of every epoch, unless a ``schedule`` or ready packs give the order.
        schedule: a ready-made plan for training with ``Packs(n)``: each sequence's pack index, ints ``[N]``.
        scheduler: a function that replaces ``packing.balance``, for ``Sequences(n)``.
        cost: the work of a sequence by its length and images; ranks get equal work. By default it is computed
            from the model's transformers config, with its vision tower if the model has one.
        extras_cost: a function from a row to the number of its image patches, or to the frames, rows and
            columns of patches of each image, ``[N, 3]``. Rows need it if their grids or ``pixel_values`` do
            not give the patches.
        max_patches: most image patches of a pack. A sequence with more is dropped with ``oversize="drop"``,
            and gets its own pack with ``"own_pack"``. With other values of ``oversize`` it raises an error.
        pad_to: fill every pack to this many slots; by default packs differ in size.
        mixing: how the sources of a mixture make an epoch, see ``packing.mixtures.Mixing``.
        share_prefixes: compute the common prefix of sequences in a pack once. Such sequences are planned into
            one pack, in which a common prefix counts once. A group larger than ``capacity`` is cut, and its
            prefix is computed again. All ids are read before the first step.
        vocab_size: the bound of the ids; by default it comes from the model's config.
        num_workers: the number of processes that read and collate, and of those that tokenise and count.
        prefetch_factor: batches prepared ahead by each worker.
        pin_memory: page-lock batches; by default if they go to a CUDA device.
        cache_dir: where tokenised text and counts are kept, ``~/.cache/lightning_thd`` by default. Files
            (identified by content) and datasets with a ``fingerprint`` are counted once. One process fills a
            cache; if it is killed while tokenising, the next run continues there.
        needs_boundaries: refuse a module whose first step on several sequences asks the batch for no
            boundaries, so that documents would see each other. False is for a model in which no token sees
            another one, such as a model without attention.

    Raises:
        CacheError: if the cache cannot be written.
        MisconfigurationException: if the Trainer contradicts ``global_batch``.
        UnreadBoundariesError: from the first training, validation, test or prediction step of a module that
            asks for no boundaries; a ``ValueError``.
    """

    global_batch = planning.Setting[Packs | Sequences | None]()
    vocab_size = planning.Setting[int | None]()
    num_workers = planning.Setting[int]()
    prefetch_factor = planning.Setting[int | None]()
    pin_memory = planning.Setting[bool | None]()

    @answers(
        required="capacity",
        capacity="It is the most tokens of a pack, for example capacity=8_192, or 'auto' for the largest.",
        batch_size="A batch is a pack of at most capacity= tokens, however many sequences these are. For "
        "steps of exactly n sequences, pass global_batch=Sequences(n).",
        step=f"{_STEP}.",
        steps=f"{_STEP}. Trainer(max_steps=...) limits the number of steps.",
        tokens=f"A pack holds at most capacity= tokens. {_STEP}.",
        max_length="A pack holds at most capacity= tokens; oversize='truncate' cuts longer sequences.",
        shuffle="Every epoch has an order of its own, decided by seed=.",
        collate_fn="Sequences are collated into packs. Map your dataset to {'input_ids': ints} instead.",
    )
    def __init__(
        self,
        train: Mapping[str, tuple[Stream | Source, float]] | Stream | Source | None = None,
        *,
        capacity: int | Literal["auto"],
        global_batch: Packs | Sequences | None = None,
        val: Mapping[str, Source] | Source | None = None,
        test: Mapping[str, Source] | Source | None = None,
        predict: Mapping[str, Source] | Source | None = None,
        tokenizer: Tokenizer | str | None = None,
        processor: Any = None,
        text_key: str = "text",
        append_eos: bool = True,
        records: Records = "auto",
        metadata_keys: Sequence[str] = (),
        packed: Packed = "auto",
        oversize: Oversize = "error",
        empty: Empty = "error",
        on_error: OnError = "raise",
        max_errors: int | None = 1000,
        tail: Tail = "pad",
        window: int = 4096,
        seed: int = 0,
        schedule: Sequence[int] | None = None,
        scheduler: Scheduler | None = None,
        cost: Cost | None = None,
        extras_cost: ExtrasCost | None = None,
        max_patches: int | None = None,
        pad_to: int | None = None,
        mixing: Mixing | None = None,
        share_prefixes: bool = False,
        vocab_size: int | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
        cache_dir: str | Path | None = None,
        needs_boundaries: bool = True,
    ) -> None:
        arguments = dict(locals())
        super().__init__()
        self._finds_capacity = isinstance(capacity, str)
        if self._finds_capacity:
            choice(capacity, "capacity", "auto", advice="Pass the tokens of a pack, or 'auto'.")
            arguments["capacity"] = 1  # until it is found
        self._keeps_capacity = False  # whether the capacity was found, by this run or an earlier one
        flags(needs_boundaries=needs_boundaries)
        self.needs_boundaries = needs_boundaries
        self._noted_steps: list[link.ModuleStep] = []  # step methods of the module that are still checked

        opener = Opener(**_fields_among(arguments, Opener))
        self._settings = planning.DataSettings(
            **_fields_among(arguments, planning.DataSettings), opener=opener
        )

        self._streams = _as_streams(train, self._settings.mixing)
        if share_prefixes and self._streams is not None:
            raise ValueError("share_prefixes=True with a stream: it needs the whole set.")
        evaluated = {"val": val, "test": test, "predict": predict}
        self._sources = sets.named_sources({"train": None if self._streams else train, **evaluated})
        for name, source in self._sources.items():
            if name != "train" and (isinstance(source, Stream) or is_stream(source)):
                raise ValueError(f"{name} is a stream; only train may be one. Pass a dataset.")

        # Unused hooks must look absent. For each dataloader, Lightning requires a step method in the module,
        # and on_before_batch_transfer here would replace the module's.
        unused = [f"{stage}_dataloader" for stage, source in evaluated.items() if source is None]
        if not sets.is_mixture(train):
            unused.append("on_before_batch_transfer")
        link.hide_hooks(self, THDDataModule, unused)

        self._attached = link.Job()
        self._sets: dict[str, sets.DataSet] = {}
        # The settings, Trainer and loader of the last fit on a stream.
        self._last_stream: tuple[object, L.Trainer | None, THDLoader | None] = None, None, None
        self._planners: dict[tuple[object, ...], Planner] = {}

    @property
    def capacity(self) -> int | Literal["auto"]:
        """Return the capacity of packs, "auto" until it is found."""
        return "auto" if self._finds_capacity else self._settings.capacity

    @capacity.setter
    def capacity(self, value: int) -> None:
        self._settings = replace(self._settings, capacity=value)
        self._finds_capacity = False

    def _fixed_capacity(self) -> int:
        """Return the capacity; with "auto", find it at the first call, when the Trainer's model is ready."""
        if self._finds_capacity:
            train = self._sets.get("train")
            lengths = None if train is None else train.index.lengths
            self.capacity = auto_capacity.find_capacity(self.trainer, self._job, lengths, self.global_batch)
            self._keeps_capacity = True
        return self._settings.capacity

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run keeps: counts of a mixture's sources, and a capacity that was found."""
        state = super().state_dict()
        if self._keeps_capacity:
            state["capacity"] = self._settings.capacity
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the counts of a checkpoint, and its capacity unless a number was given."""
        super().load_state_dict(state_dict)
        if self._finds_capacity and "capacity" in state_dict:
            self.capacity = state_dict["capacity"]
            self._keeps_capacity = True

    def __str__(self) -> str:
        """Return the names and sizes of the data sets; None is the size before ``setup``."""
        sizes: dict[str, int | None] = dict.fromkeys(self._sources)
        for name, data in self._sets.items():
            sizes[name] = len(data.index.lengths)
        stream = "train: a stream, " if self._streams is not None else ""
        return f"THDDataModule({stream}{sizes})"

    def attach(
        self,
        *,
        rank: int = 0,
        ranks: int = 1,
        accumulate: int = 1,
        model: nn.Module | None = None,
        alignment: Alignment | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Set ranks, accumulation and model for a loop without a Trainer; call it before ``setup``.

        Args:
            rank: data-parallel rank of this process.
            ranks: number of data-parallel ranks.
            accumulate: batches that a rank runs per optimizer step; 1 with ``Sequences(n)``.
            model: the module that is trained. Its FLOPs balance the ranks, and its vocabulary bounds the ids.
            alignment: the multiples of lengths and totals; by default those that the model needs.
            device: where batches go, by default the model's device; see ``pin_memory``.
        """
        whole_number(accumulate, "accumulate", least=1)
        link.check_step(self.global_batch, ranks=ranks, accumulate=accumulate, name="accumulate")
        self._attached = link.Job(
            rank=rank,
            ranks=ranks,
            accumulate=accumulate,
            is_first=rank == 0,
            on_gpu=link.on_gpu(model, device),
            model=model,
            alignment=link.model_alignment(model) if alignment is None else alignment,
        )

    @property
    def _job(self) -> link.Job:
        """Return the job of the Trainer, or without one, of ``attach``."""
        return self._attached if self.trainer is None else link.job_of(self.trainer)

    @property
    def _progress(self) -> link.Progress | None:
        """Return the Trainer's position in its epoch; None without a Trainer."""
        return None if self.trainer is None else link.Progress(self.trainer)

    def prepare_data(self) -> None:
        """Tokenise and count the sources that can be cached; Lightning calls this on one process per node."""
        for name, source in self._sources.items():
            parts = [source]
            if name == "train" and sets.is_mixture(source):
                parts = [sets.weighted(part, entry)[0] for part, entry in source.items()]
            if all(map(is_known, parts)):
                self._open(name)

    def setup(self, stage: str) -> None:
        """Open and count the data sets of a stage, and check the Trainer against ``global_batch``."""
        stages = _STAGES.get(stage, (stage,))
        if "train" in stages:
            link.check_trainer(self.trainer, self.global_batch)
        self._end_notes()
        if self.needs_boundaries:
            self._noted_steps = link.note_first_steps(self.trainer, stage, self.global_batch)

        runs_stage = getattr(self.trainer, f"{stage}_loop", None) is not None
        if runs_stage and not is_overridden(f"{stages[0]}_dataloader", self):
            self._evaluation(stages[0])  # raises
        for name in self._sources:
            if name.partition("/")[0] in stages:
                self._open(name)

    def teardown(self, stage: str) -> None:
        """Give the module its own step methods back, and log the last steps of a mixture."""
        self._end_notes()
        super().teardown(stage)

    def on_exception(self, exception: BaseException) -> None:
        """Give the module its own step methods back."""
        self._end_notes()

    def _end_notes(self) -> None:
        """Stop checking the module's first steps."""
        for step in self._noted_steps:
            step.remove()
        self._noted_steps = []

    def _open(self, name: str) -> None:
        """Open and count a data set, unless that was done before."""
        if name in self._sets:
            return
        source = self._sources[name]
        opener = replace(self._settings.opener, progress=self._job.is_first)
        is_mixture = name == "train" and sets.is_mixture(source)
        open_source = sets.open_mixture if is_mixture else sets.open_set
        self._sets[name] = open_source(
            name, source, opener, empty=self._settings.empty, extras_cost=self._settings.extras_cost
        )
        if name == "train":
            sets.refuse_unused_processor(opener.processor, self._sets[name])

    @property
    def set_names(self) -> dict[str, tuple[str, ...]]:
        """Return the names of each evaluation stage's sources, if they are a dict, in their order."""
        names: dict[str, tuple[str, ...]] = {}
        for source in self._sources:
            stage, _, name = source.partition("/")
            if name:
                names[stage] = (*names.get(stage, ()), name)
        return names

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Return for each opened set how many sequences policies left out or changed, and the tokens lost."""
        return {name: planning.counts_of(data, self._planner(name)) for name, data in self._sets.items()}

    def train_dataloader(self) -> THDLoader:
        """Return this rank's training batches: ``THDBatch``, or ``THDStep`` if each batch is a whole step."""
        states = [] if self.trainer is None else link.settle_epoch(self.trainer)
        is_step = isinstance(self.global_batch, Sequences) or self._job.whole_steps
        kind: Kind = "step" if is_step else "pack"
        if self._streams is not None:
            loader = self._stream_of_fit(self._streams, kind, states)
        else:
            overfits = getattr(self.trainer, "overfit_batches", 0) > 0
            loader = self._loader("train", kind=kind, fixed_order=overfits, progress=self._progress)
        self._log_sources(loader)
        return loader

    def train_steps(self) -> THDLoader:
        """Return this rank's training steps as ``THDStep``, for a loop without a Trainer: see ``attach``."""
        if self._streams is not None:
            return self._streamed(self._streams, "step")
        return self._loader("train", kind="step", fixed_order=False)

    def val_dataloader(self) -> THDLoader | list[THDLoader]:
        """Return this rank's validation batches; a list of loaders if ``val`` is a dict of sources."""
        return self._evaluation("val")

    def test_dataloader(self) -> THDLoader | list[THDLoader]:
        """Return this rank's test batches; see ``val_dataloader``."""
        return self._evaluation("test")

    def predict_dataloader(self) -> THDLoader | list[THDLoader]:
        """Return this rank's prediction batches; see ``val_dataloader``."""
        return self._evaluation("predict")

    def _streamed(self, streams: Streams, kind: Kind) -> THDLoader:
        """Build the loader of a stream; all ranks must call this together."""
        if getattr(self.trainer, "overfit_batches", 0) > 0:
            raise MisconfigurationException("overfit_batches repeats batches, unlike a stream. Set it to 0.")
        if self._settings.schedule is not None:
            raise MisconfigurationException("A schedule numbers the sequences of a dataset, not of a stream.")
        capacity = self._fixed_capacity()
        steps = StreamedSteps(streams, self._settings, self._job, kind=kind)
        judges = self.needs_boundaries
        return THDLoader(steps, progress=self._progress, capacity=capacity, judges=judges)

    def _stream_of_fit(self, streams: Streams, kind: Kind, states: Sequence[Any]) -> THDLoader:
        """Return the stream loader that a running fit uses, or make one that resumes at the right step."""
        self._fixed_capacity()
        old_settings, old_trainer, old_loader = self._last_stream
        settings = self._settings, self._job.accumulate
        running = self._running_stream()
        if running is not None and old_settings == settings:
            return running

        loader = self._streamed(streams, kind)
        self._last_stream = settings, self.trainer, loader
        fits_again = old_trainer is not None and old_trainer is self.trainer and not old_trainer.ckpt_path
        if running is not None:
            states = [running.state_dict()]
        elif fits_again and old_loader is not None:
            states = [{**old_loader.state_dict(), "step": 0, "ended": True}]  # another fit begins a new epoch
        for state in states:
            if isinstance(state, Mapping) and "stream" in state:
                loader.load_state_dict(state)
                break
        return loader

    def _running_stream(self) -> THDLoader | None:
        """Return the loader of a stream that the Trainer's fit reads now, or None."""
        loaders = [] if self.trainer is None else tree_leaves(self.trainer.train_dataloader)
        for loader in loaders:
            if isinstance(loader, THDLoader) and loader.planner is None:
                return loader
        return None

    def _evaluation(self, stage: str) -> THDLoader | list[THDLoader]:
        """Return the loader of a stage, or a list of loaders if its data are a dict of sources."""
        parts = [name for name in self._sources if name.startswith(f"{stage}/")]
        if not parts:
            return self._loader(stage, kind="eval", fixed_order=True)
        return [self._loader(name, kind="eval", fixed_order=True) for name in parts]

    def _loader(
        self, name: str, *, kind: Kind, fixed_order: bool, progress: link.Progress | None = None
    ) -> THDLoader:
        """Make the loader of a data set for this rank, and check the data against the model."""
        if name not in self._sources:
            raise MisconfigurationException(
                f"THDDataModule has no data for {name!r}. Pass THDDataModule(..., {name}=...)."
            )
        if name not in self._sets:
            raise MisconfigurationException(
                f"THDDataModule was not set up for {name!r}. Pass it as datamodule=, or call setup() first."
            )
        planner = self._planner(name)
        data = self._sets[name]
        job = self._job
        settings = self._settings
        stage, _, set_name = name.partition("/")
        predicts = stage == "predict"

        vocab_size = self.vocab_size or link.vocab_size(job.model)
        data.index.check_vocabulary(vocab_size, name)
        if name == "train":
            link.say_other_attention(job.model)
        classifier = link.sequence_classifier(job.model)
        if classifier is not None and not predicts:
            sets.refuse_class_names(name, self._sources[name], settings.opener, classifier)

        collate = partial(settings.collator(job), share_prefixes=settings.share_prefixes, set_name=set_name)
        maker = BatchMaker(
            dataset=data.dataset,
            index=data.index,
            collate=collate,
            vocab_size=vocab_size,
            one_each=settings.opener.packed != "off",
        )
        steps = PlannedSteps(
            planner,
            maker,
            rank=job.rank,
            dp=job.ranks,
            per_step=1 if kind == "step" else planner.global_batch.n // job.ranks,
            kind=kind,
            fixed_order=fixed_order,
            num_workers=settings.num_workers,
            prefetch_factor=settings.prefetch_factor,
            pin_memory=settings.pins(job),
        )
        return THDLoader(
            steps,
            progress=progress,
            capacity=settings.capacity,
            predicts=predicts,
            judges=self.needs_boundaries,
        )

    def _planner(self, name: str) -> Planner:
        """Return the planner of a data set, made at first use, when ``configure_model`` has run."""
        capacity = self._fixed_capacity()
        job = self._job

        # One data module may serve several Trainers in turn, with other ranks, accumulation or models.
        key = (
            name,
            capacity,
            self._settings.step(job),
            job.ranks,
            job.alignment,
            job.sharing,
            link.model_cost(job.model, capacity),
            link.model_patch(job.model),
        )

        if key not in self._planners:
            self._planners = {other: plan for other, plan in self._planners.items() if other[0] != name}
            data = self._sets[name]
            planner = planning.make_planner(data, self._settings, job, training=name == "train")
            self._planners[key] = planner
            planning.announce(data, planner, job)
        return self._planners[key]


def _fields_among(arguments: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return the arguments that have the name of a field of a dataclass."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in arguments.items() if name in names}


def _as_streams(train: Any, mixing: Mixing | None) -> Streams | None:
    """Return the training source as streams if any part of it is a stream, else None."""
    is_mixture = sets.is_mixture(train)
    sources = {"": train}
    if is_mixture:
        sources = {
            name: entry[0] if isinstance(entry, tuple | list) and entry else entry
            for name, entry in train.items()
        }
    if not any(isinstance(source, Stream) or is_stream(source) for source in sources.values()):
        return None

    streams = {
        name: source if isinstance(source, Stream) else Stream(source=source)
        for name, source in sources.items()
    }
    if not is_mixture:
        return Streams(streams=streams, weights={"": 1.0}, mixing=Mixing(dry="rest"))
    weights = {name: sets.weighted(name, entry)[1] for name, entry in train.items()}
    return Streams(streams=streams, weights=weights, mixing=mixing or Mixing())
