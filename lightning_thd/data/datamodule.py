"""Datasets or paths -> packed, planned, resumable loaders for every stage of a Lightning Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import cast

import lightning.pytorch as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.utils.data import Dataset

from lightning_thd.data import trainer_link as link
from lightning_thd.data.loader import BatchMaker, Kind, THDLoader
from lightning_thd.data.planning import plan_counted_once
from lightning_thd.data.read.encode import Tokenizer
from lightning_thd.data.read.sources import Opened, Opener, Packed, dataset_key
from lightning_thd.data.store.index import Empty, MapDataset, SequenceIndex, build_index, refuse_cuts
from lightning_thd.packing import Cost, PackPlanner, Packs, Scheduler, Sequences
from lightning_thd.packing.entries import Oversize
from lightning_thd.packing.planner import Tail

Source = MapDataset | Dataset | str | Path  # type: ignore[type-arg]  # jsonargparse wants it bare

_BAR_FROM = 10_000  # sequences: below it counting takes less than a second
_COUNTS_FROM = 100_000  # sequences: below it counting windows takes less than opening a file


class THDDataModule(L.LightningDataModule):
    """Packs sequences of any length into batches of at most ``capacity`` tokens, in the batch.

    ``THDDataModule(dataset, capacity=8_192)`` works under any Lightning strategy.

    Args:
        train: a map-style dataset giving ``{"input_ids": ints[, "labels": ints]}`` (labels unshifted, -100
            where ignored), or the path of a ``.jsonl`` file, a ``.parquet`` or ``.arrow`` file with a column
            ``input_ids`` or a folder of them, a text file, a folder of text or ``.jsonl`` files, or a folder
            that ``datasets.Dataset.save_to_disk`` or ``TokenStore.save`` wrote. Instead of ids, rows and JSON
            objects may hold text, ``prompt`` and ``completion``, or ``messages``: these are tokenised once,
            with loss on what the assistant says alone where there is one.
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
        train: Source | None = None,
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
        if capacity < 1:
            raise ValueError(
                f"capacity={capacity}: a pack holds at least 1 token. Pass the tokens of a pack."
            )
        if pad_to is not None and pad_to < capacity:
            raise ValueError(
                f"pad_to={pad_to} is less than capacity={capacity}. Raise pad_to or leave it out."
            )
        self._sources = {"train": train, "val": val, "test": test, "predict": predict}
        self.capacity, self.global_batch = capacity, global_batch
        self.oversize, self.empty, self.tail = oversize, empty, tail
        self.window, self.seed, self.pad_to, self.vocab_size = window, seed, pad_to, vocab_size
        self.schedule, self.scheduler, self.cost = schedule, scheduler, cost
        self._opener = Opener(
            tokenizer=tokenizer,
            text_key=text_key,
            append_eos=append_eos,
            packed=packed,
            cache_dir=cache_dir,
            num_workers=num_workers,
        )
        self.num_workers, self.prefetch_factor, self.pin_memory = num_workers, prefetch_factor, pin_memory
        for name in ("val", "test", "predict"):
            if self._sources[name] is None:  # a loader that is there makes Lightning ask for its step
                hook = f"{name}_dataloader"
                setattr(self, hook, MethodType(getattr(L.LightningDataModule, hook), self))
        self._attached = (0, 1, 1)
        self._model: nn.Module | None = None
        self._opened: dict[str, Opened] = {}
        self._indices: dict[str, SequenceIndex] = {}
        self._planners: dict[tuple[object, ...], PackPlanner] = {}

    def attach(
        self, *, rank: int = 0, ranks: int = 1, accumulate: int = 1, model: nn.Module | None = None
    ) -> None:
        """Tell who loads, in a loop without a Lightning Trainer; call it before ``setup``.

        Args:
            rank: data-parallel rank of this process.
            ranks: number of data-parallel ranks.
            accumulate: batches a rank runs between two optimizer steps, as a Trainer's
                ``accumulate_grad_batches``; 1 with ``Sequences(n)``.
            model: that is trained: its FLOPs balance the ranks, its vocabulary checks the ids.

        Raises:
            MisconfigurationException: when ``global_batch`` contradicts them.
        """
        link.check_packs(self.global_batch, ranks=ranks, accumulate=accumulate)
        self._attached, self._model = (rank, ranks, accumulate), model

    @property
    def _trained(self) -> nn.Module | None:
        return self.trainer.lightning_module if self.trainer is not None else self._model

    def prepare_data(self) -> None:
        """Tokenise, count and cache what can be cached; Lightning calls this on one process a node."""
        for name, source in self._sources.items():
            if isinstance(source, str | Path) or dataset_key(source) is not None:
                self._count(name)

    def setup(self, stage: str) -> None:
        """Open and count the datasets of a stage, and check the Trainer against ``global_batch``."""
        names = {"fit": ("train", "val"), "validate": ("val",)}.get(stage, (stage,))
        if "train" in names:
            link.check_trainer(self.trainer, self.global_batch)
        for name in names:
            if self._sources[name] is not None:
                self._count(name)

    def _count(self, name: str) -> None:
        if name in self._indices:
            return
        source = cast("MapDataset | str | Path", self._sources[name])
        self._opened[name] = opened = replace(self._opener, progress=self._is_first).open(source)
        self._indices[name] = build_index(
            opened.dataset,
            empty=self.empty,
            num_workers=self.num_workers,
            progress=len(opened.dataset) > _BAR_FROM and self._is_first,
            key=opened.key,
            cache_dir=self._opener.cache_dir,
        )

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Of every opened set, the sequences empty, dropped, truncated, split, and the tokens lost."""
        return {name: dict(self._planner(name).entries.counts) for name in self._indices}

    def train_dataloader(self) -> THDLoader:
        """Return this rank's training batches: ``THDBatch``, or ``THDStep`` with ``Sequences(n)``."""
        progress = link.Progress(self.trainer) if self.trainer is not None else None
        return self._loader(
            "train",
            kind="step" if isinstance(self._step, Sequences) else "pack",
            fixed_order=getattr(self.trainer, "overfit_batches", 0) > 0,
            progress=progress,
        )

    def train_steps(self) -> THDLoader:
        """Return this rank's training steps as ``THDStep``, for a loop without a Trainer: see ``attach``."""
        return self._loader("train", kind="step", fixed_order=False)

    def val_dataloader(self) -> THDLoader:
        """Return this rank's validation batches."""
        return self._loader("val", kind="eval", fixed_order=True)

    def test_dataloader(self) -> THDLoader:
        """Return this rank's test batches."""
        return self._loader("test", kind="eval", fixed_order=True)

    def predict_dataloader(self) -> THDLoader:
        """Return this rank's prediction batches."""
        return self._loader("predict", kind="eval", fixed_order=True)

    def _loader(
        self,
        name: str,
        *,
        kind: Kind,
        fixed_order: bool,
        progress: link.Progress | None = None,
    ) -> THDLoader:
        if name not in self._indices:
            raise MisconfigurationException(
                f"THDDataModule has no data for {name!r}. Pass THDDataModule(..., {name}=...)"
                + (", and call setup() first." if self._sources[name] is not None else ".")
            )
        (rank, dp), planner = self._data_rank, self._planner(name)
        maker = BatchMaker(
            dataset=self._opened[name].dataset,
            index=self._indices[name],
            align=link.alignment(self.trainer),
            pad_to=self.pad_to,
            vocab_size=self.vocab_size or link.vocab_size(self._trained),
            windows=link.model_windows(self._trained),
        )
        return THDLoader(
            planner,
            maker,
            rank=rank,
            dp=dp,
            per_step=1 if kind == "step" else planner.global_batch.n // dp,
            kind=kind,
            fixed_order=fixed_order,
            consumed=progress.consumed if progress is not None else None,
            limit=progress.limit if progress is not None else None,
            on_load=progress.match if progress is not None else None,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor,
            pin_memory=self._pin,
        )

    @property
    def _data_rank(self) -> tuple[int, int]:
        return link.data_rank(self.trainer) if self.trainer is not None else self._attached[:2]

    @property
    def _accumulate(self) -> int:
        return link.accumulation(self.trainer) if self.trainer is not None else self._attached[2]

    @property
    def _step(self) -> Packs | Sequences:
        return self.global_batch or Packs(self._data_rank[1] * self._accumulate)

    @property
    def _is_first(self) -> bool:
        return self.trainer.is_global_zero if self.trainer is not None else self._attached[0] == 0

    @property
    def _pin(self) -> bool:
        if self.pin_memory is not None:
            return self.pin_memory
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    def _planner(self, name: str) -> PackPlanner:
        """Plan a set when it is first asked for: by then a model built in ``configure_model`` is there."""
        # The same data module may serve Trainers of other ranks or accumulation, one after the other.
        key = (name, self._step, link.data_rank(self.trainer)[1], link.alignment(self.trainer))
        if key not in self._planners:
            self._planners = {other: plan for other, plan in self._planners.items() if other[0] != name}
            self._planners[key] = self._plan(name)
            self._announce(name, self._planners[key])
        return self._planners[key]

    def _plan(self, name: str) -> PackPlanner:
        """Plan a set: training as asked for, the others one pack a rank, with nothing lost."""
        training, opened, index = name == "train", self._opened[name], self._indices[name]
        oversize: Oversize = "own_pack" if not training and self.oversize == "error" else self.oversize
        schedule = self.schedule if training and self.schedule is not None else opened.schedule
        if oversize in ("truncate", "split"):
            refuse_cuts(index, opened.dataset, self.capacity)
        plan = partial(
            PackPlanner,
            index.lengths,
            self.capacity,
            global_batch=self._step if training else Packs(self._data_rank[1]),
            align=link.alignment(self.trainer),
            cost=self.cost or link.model_cost(self._trained, self.capacity),
            window=self.window,
            oversize=oversize,
            tail=self.tail if training else "pad",
            seed=self.seed,
            scheduler=self.scheduler if training else None,
            schedule=schedule,
        )
        if opened.key is None or len(index.lengths) < _COUNTS_FROM:
            return plan()
        return plan_counted_once(plan, {**opened.key, "empty": self.empty}, self._opener.cache_dir)

    def _announce(self, name: str, planner: PackPlanner) -> None:
        lengths = self._indices[name].lengths
        lost = {key: count for key, count in planner.entries.counts.items() if count}
        rank_zero_info(
            f"{name}: {len(lengths):,} sequences, {int(lengths.sum()):,} tokens"
            + "".join(f", {key.replace('_', ' ')} {count:,}" for key, count in lost.items())
        )
        for logger in (self.trainer.loggers if self.trainer is not None else []) if lost else []:
            logger.log_metrics({f"data/{name}_{key}": count for key, count in lost.items()}, step=0)
