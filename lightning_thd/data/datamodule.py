"""Datasets or paths -> packed, planned, resumable loaders for every stage of a Lightning Trainer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, cast

import lightning.pytorch as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import Dataset

from lightning_thd.alignment import Alignment
from lightning_thd.data.index import Empty, MapDataset, SequenceIndex, build_index
from lightning_thd.data.loader import BatchMaker, Kind, THDLoader
from lightning_thd.data.sources import Tokenizer, open_source
from lightning_thd.packing import PackPlanner, Packs, Sequences
from lightning_thd.packing.entries import Oversize
from lightning_thd.packing.planner import Tail

Source = MapDataset | Dataset | str | Path  # type: ignore[type-arg]  # jsonargparse wants it bare


class THDDataModule(L.LightningDataModule):
    """Packs sequences of any length into batches of at most ``capacity`` tokens, in the batch.

    ``THDDataModule(dataset, capacity=8_192)`` works under any Lightning strategy.

    Args:
        train: a map-style dataset giving ``{"input_ids": ints[, "labels": ints]}`` (labels unshifted, -100
            where ignored), or the path of a ``.jsonl`` file, a ``.parquet`` or ``.arrow`` file with a column
            ``input_ids``, a text file, or a folder of text files.
        capacity: most tokens of a pack.
        global_batch: ``Packs(n)``, n packs to an optimizer step, or ``Sequences(n)``, exactly n sequences
            to a step in as many microbatches as they need (needs a strategy of ours). Default: one pack a
            rank a batch, ``Packs(ranks * accumulate_grad_batches)``.
        val: as ``train``; every sequence is used once, in packs of the dataset's own order.
        test: as ``val``.
        predict: as ``val``; ``batch.unpack(output)`` and ``batch.sequence_ids`` give predictions a sequence.
        tokenizer: ``str -> ids`` for text, or the name of a Hugging Face tokenizer; UTF-8 bytes by default.
        text_key: the key of the text in a JSONL object.
        oversize: what becomes of a training sequence longer than ``capacity``: ``error``, ``drop``,
            ``truncate``, ``split`` or ``own_pack``. Validation, test and prediction use ``own_pack`` in place
            of ``error``, so that nothing is lost there.
        empty: what becomes of a sequence without tokens: ``error`` or ``drop``.
        tail: the last, incomplete step of an epoch: ``pad`` with emptier packs, or ``drop``.
        window: sequences that are packed together; larger packs better, smaller shuffles better.
        seed: decides the order of every epoch.
        pad_to: fill every pack to this many slots; by default packs differ in size.
        vocab_size: ids are checked against it; found in the model's config when absent.
        num_workers: processes that read and collate.
        prefetch_factor: batches prepared ahead by each worker.
        pin_memory: page-lock batches; by default when training on a GPU.
        cache_dir: where tokenised text is kept.

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
        oversize: Oversize = "error",
        empty: Empty = "error",
        tail: Tail = "pad",
        window: int = 4096,
        seed: int = 0,
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
        self._open = partial(open_source, tokenizer=tokenizer, text_key=text_key, cache_dir=cache_dir)
        self.num_workers, self.prefetch_factor, self.pin_memory = num_workers, prefetch_factor, pin_memory
        for name in ("val", "test", "predict"):
            if self._sources[name] is None:  # a loader that is there makes Lightning ask for its step
                hook = f"{name}_dataloader"
                setattr(self, hook, MethodType(getattr(L.LightningDataModule, hook), self))
        self._datasets: dict[str, MapDataset] = {}
        self._indices: dict[str, SequenceIndex] = {}
        self._planners: dict[str, PackPlanner] = {}

    def prepare_data(self) -> None:
        """Tokenise what is text and cache it; Lightning calls this on one process a node."""
        for source in self._sources.values():
            if isinstance(source, str | Path):
                self._open(source)

    def setup(self, stage: str) -> None:
        """Open and count the datasets of a stage, and check the Trainer against ``global_batch``."""
        names = {"fit": ("train", "val"), "validate": ("val",)}.get(stage, (stage,))
        if "train" in names:
            self._check_trainer()
        for name in names:
            source = self._sources[name]
            if source is None or name in self._indices:
                continue
            opened = self._open(source) if isinstance(source, str | Path) else source
            dataset = cast("MapDataset", opened)
            self._datasets[name] = dataset
            self._indices[name] = build_index(
                dataset,
                empty=self.empty,
                num_workers=self.num_workers,
                progress=len(dataset) > 10_000 and self._is_first,
            )
            self._planners[name] = self._plan(name)
            self._announce(name)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Of every opened set, the sequences empty, dropped, truncated, split, and the tokens lost."""
        return {name: dict(planner.entries.counts) for name, planner in self._planners.items()}

    def train_dataloader(self) -> THDLoader:
        """Return this rank's training batches: ``THDBatch``, or ``THDStep`` with ``Sequences(n)``."""
        trainer = self.trainer
        return self._loader(
            "train",
            kind="step" if isinstance(self._step, Sequences) else "pack",
            fixed_order=getattr(trainer, "overfit_batches", 0) > 0,
            consumed=self._consumed if trainer is not None else None,
            limit=self._limit if trainer is not None else None,
            on_load=self._match_progress if trainer is not None else None,
        )

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
        consumed: Callable[[], int] | None = None,
        limit: Callable[[], int | None] | None = None,
        on_load: Callable[[int], None] | None = None,
    ) -> THDLoader:
        if name not in self._indices:
            raise MisconfigurationException(
                f"THDDataModule has no data for {name!r}. Pass THDDataModule(..., {name}=...)"
                + (", and call setup() first." if self._sources[name] is not None else ".")
            )
        (rank, dp), planner = self._data_rank, self._planners[name]
        maker = BatchMaker(
            dataset=self._datasets[name],
            index=self._indices[name],
            align=self._align,
            pad_to=self.pad_to,
            vocab_size=self.vocab_size or self._model_vocab_size(),
        )
        return THDLoader(
            planner,
            maker,
            rank=rank,
            dp=dp,
            per_step=planner.global_batch.n // dp if isinstance(planner.global_batch, Packs) else 1,
            kind=kind,
            fixed_order=fixed_order,
            consumed=consumed,
            limit=limit,
            on_load=on_load,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor,
            pin_memory=self._pin,
        )

    @property
    def _step(self) -> Packs | Sequences:
        return self.global_batch or Packs(self._data_rank[1] * self._accumulate)

    @property
    def _accumulate(self) -> int:
        return self.trainer.accumulate_grad_batches if self.trainer is not None else 1

    @property
    def _data_rank(self) -> tuple[int, int]:
        """Rank and number of those that read different data, as the strategy tells distributed samplers."""
        strategy = self.trainer.strategy if self.trainer is not None else None
        sampler = getattr(strategy, "distributed_sampler_kwargs", None) or {}
        return sampler.get("rank", 0), sampler.get("num_replicas", 1)

    @property
    def _is_first(self) -> bool:
        return self.trainer is None or self.trainer.is_global_zero

    @property
    def _pin(self) -> bool:
        if self.pin_memory is not None:
            return self.pin_memory
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    def _plan(self, name: str) -> PackPlanner:
        """Plan a set: training as asked for, the others one pack a rank, with nothing lost."""
        training = name == "train"
        oversize: Oversize = "own_pack" if not training and self.oversize == "error" else self.oversize
        return PackPlanner(
            self._indices[name].lengths,
            self.capacity,
            global_batch=self._step if training else Packs(self._data_rank[1]),
            align=self._align,
            window=self.window,
            oversize=oversize,
            tail=self.tail if training else "pad",
            seed=self.seed,
        )

    @property
    def _align(self) -> Alignment | None:
        strategy = self.trainer.strategy if self.trainer is not None else None
        return getattr(strategy, "alignment", None)

    def _model_vocab_size(self) -> int | None:
        module = self.trainer.lightning_module if self.trainer is not None else None
        for child in module.modules() if module is not None else ():
            config = getattr(child, "config", None)
            if config is not None and hasattr(config, "get_text_config"):
                return getattr(config.get_text_config(), "vocab_size", None)
        return None

    def _announce(self, name: str) -> None:
        lengths = self._indices[name].lengths
        lost = {key: count for key, count in self._planners[name].entries.counts.items() if count}
        rank_zero_info(
            f"{name}: {len(lengths):,} sequences, {int(lengths.sum()):,} tokens"
            + "".join(f", {key.replace('_', ' ')} {count:,}" for key, count in lost.items())
        )
        for logger in (self.trainer.loggers if self.trainer is not None else []) if lost else []:
            logger.log_metrics({f"data/{name}_{key}": count for key, count in lost.items()}, step=0)

    def _check_trainer(self) -> None:
        if self.trainer is None:
            return
        accumulate, (_, dp) = self._accumulate, self._data_rank
        callbacks = cast("list[L.Callback]", self.trainer.callbacks)  # type: ignore[attr-defined]
        if any(
            isinstance(callback, GradientAccumulationScheduler)
            and callback.going_to_accumulate_grad_batches()
            for callback in callbacks
        ):
            raise MisconfigurationException(
                "GradientAccumulationScheduler changes the packs of a step between epochs, which would "
                "change the loss. Use a fixed Trainer(accumulate_grad_batches=...)."
            )
        step = self.global_batch
        if isinstance(step, Packs) and step.n != dp * accumulate:
            raise MisconfigurationException(
                f"global_batch={step} but {dp} data-parallel ranks x accumulate_grad_batches={accumulate} "
                f"make {dp * accumulate} packs a step. Set Packs({dp * accumulate}), or "
                + (
                    f"accumulate_grad_batches={step.n // dp}."
                    if step.n % dp == 0
                    else f"a number of packs that {dp} ranks divide."
                )
            )
        if isinstance(step, Sequences):
            if not getattr(self.trainer.strategy, "runs_thd_steps", False):
                raise MisconfigurationException(
                    f"global_batch={step} needs a strategy that runs all microbatches of a step: 'thd' on "
                    f"one device, 'thd_ddp' or 'thd_model_parallel', not "
                    f"{type(self.trainer.strategy).__name__}. Or use Packs(n)."
                )
            if accumulate != 1:
                raise MisconfigurationException(
                    f"global_batch={step} decides by itself how many microbatches a step has, but "
                    f"accumulate_grad_batches={accumulate}. Set it to 1."
                )

    def _consumed(self) -> int:
        # `processed` counts a batch once its update is done and before on_train_batch_end, where checkpoints
        # are written; a batch that raised is not counted and comes again.
        return int(self._progress.current.processed)

    @property
    def _progress(self) -> Any:
        return cast("L.Trainer", self.trainer).fit_loop.epoch_loop.batch_progress

    def _limit(self) -> int | None:
        batches = cast("L.Trainer", self.trainer).num_training_batches
        return int(batches) if batches != float("inf") else None

    def _match_progress(self, start: int) -> None:
        """Put Lightning's batch counter where the loader goes on, after a change of ranks or in a step."""
        progress = self._progress
        shift = start - progress.current.processed
        if shift:
            for counter in (progress.current, progress.total):
                for name in ("ready", "started", "processed", "completed"):
                    setattr(counter, name, max(0, getattr(counter, name) + shift))
            progress.current.ready = progress.current.started = start
