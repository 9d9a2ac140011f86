"""A Trainer's evaluation set -> its packs, their mean loss, and one padded row per sequence for metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_thd._imports import require
from lightning_thd.batch import THDBatch
from lightning_thd.batch.noted import refuse_unread
from lightning_thd.data import THDDataModule
from lightning_thd.data.loader import THDLoader
from lightning_thd.data.trainer_link import check_step
from lightning_thd.integrations.hf_data import (
    OF_READING,
    TrainerBase,
    TrainerPacks,
    arguments_of,
    packed_dataset,
)
from lightning_thd.integrations.hf_heads import head_of
from lightning_thd.integrations.hf_options import refuse_unused
from lightning_thd.integrations.packed_loop import mean_loss

LOSS = "compute_loss"  # in messages
OPTION = "packed_trainer(...)(needs_boundaries=False)"
_PAD = -100  # the value with which Trainer pads predictions and labels


class EvaluationMixin(TrainerBase):  # type: ignore[misc]
    """Runs a Trainer's evaluation and prediction on packs; a base of the classes of ``packed_trainer``."""

    control: Any
    _evaluated: tuple[str, int] | None = None  # the last evaluation's metric prefix and pack count

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_unused(cls, EvaluationMixin)

    @property
    def _logs_entropy(self) -> bool:
        """Return whether to log entropy and token accuracy; TRL does, transformers does not."""
        return hasattr(self, "_metrics")

    def get_eval_dataloader(self, eval_dataset: Any = None) -> TrainerPacks:
        """Return a loader of this rank's evaluation packs; those of all ranks hold every sequence once."""
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        options = {name: value for name, value in self._data_kwargs.items() if name in OF_READING}
        own_labels = head_of(self.model) == "token"
        packed = packed_dataset(dataset, arguments_of(self.model), own_labels=own_labels)
        data = self._attached(val=packed, **options)
        with in_data_kwargs():
            data.setup("validate")
            return TrainerPacks(cast("THDLoader", data.val_dataloader()))

    def _attached(self, *, accumulate: int = 1, **options: Any) -> THDDataModule:
        args = self.args
        workers = {
            "num_workers": args.dataloader_num_workers,
            "prefetch_factor": args.dataloader_prefetch_factor,
        }
        options["needs_boundaries"] = False  # compute_loss is checked, as FirstStep and mean_loss run it
        data = THDDataModule(**{"capacity": self._capacity, **workers, **options})

        name = "gradient_accumulation_steps"
        check_step(data.global_batch, ranks=args.world_size, accumulate=accumulate, name=name)
        data.attach(
            rank=args.process_index,
            ranks=args.world_size,
            accumulate=accumulate,
            model=self.model,
            device=args.device if args.dataloader_pin_memory else "cpu",
        )
        return data

    def get_test_dataloader(self, test_dataset: Any) -> TrainerPacks:
        """Return a loader of this rank's packs of a test set."""
        return self.get_eval_dataloader(test_dataset)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as the base class does, but count each pack as a step in the steps per second."""
        output = super().predict(*args, **kwargs)
        self._count_packs(output.metrics)
        return output

    def evaluation_loop(
        self,
        dataloader: TrainerPacks,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Run an evaluation set on packs, for ``evaluate()`` and ``predict()``."""
        transformers: Any = require("transformers", feature="packed_trainer")
        if prediction_loss_only is None:
            prediction_loss_only = self.args.prediction_loss_only
        wants_inputs = "inputs" in (self.args.include_for_metrics or ())
        rows = Rows(self.preprocess_logits_for_metrics, inputs=wants_inputs)
        num_sequences = 0

        def collect(batch: THDBatch) -> None:
            nonlocal num_sequences
            num_sequences += len(batch.lengths)
            if not prediction_loss_only:
                rows.add(self.model, batch)

        def loss_fn(model: nn.Module, batch: THDBatch) -> Tensor:
            loss: Tensor = self.compute_loss(model, {"batch": batch})
            return loss

        with self._paused():
            self._prepare_for_evaluation()
            self.callback_handler.eval_dataloader = dataloader
            packs = self._with_callbacks(dataloader)
            options: Any = {"device": torch.device(self.args.device), "seen": collect}
            if self._needs_boundaries:
                options["judge"] = partial(refuse_unread, what=f"{type(self).__name__}.{LOSS}", option=OPTION)
            with self.accelerator.autocast():
                loss, tokens = mean_loss(loss_fn, self.model, packs, **options)

        predictions = None
        labels = None
        ids = None
        if not prediction_loss_only:
            predictions, labels, ids = rows.gather()
        metrics: dict[str, Any] = {}
        if self.compute_metrics is not None and predictions is not None:
            metrics = self.compute_metrics(
                transformers.EvalPrediction(predictions=predictions, label_ids=labels, inputs=ids)
            )
        if self._logs_entropy:
            metrics |= self._token_metrics("eval")
        metrics = {**metrics, "loss": loss, "loss_tokens": float(tokens)}
        self._evaluated = metric_key_prefix, len(dataloader)

        prefix = f"{metric_key_prefix}_"
        return transformers.trainer_utils.EvalLoopOutput(
            predictions=predictions,
            label_ids=labels,
            metrics={
                key if key.startswith(prefix) else prefix + key: value
                for key, value in transformers.trainer_utils.denumpify_detensorize(metrics).items()
            },
            num_samples=self._sum_over_ranks(num_sequences),
        )

    def _with_callbacks(self, dataloader: TrainerPacks) -> Iterator[THDBatch]:
        """Yield the packs, and call the callbacks after each, as Trainer does."""
        for inputs in dataloader:
            yield cast("THDBatch", inputs["batch"])
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)

    def _prepare_for_evaluation(self) -> None:
        """Prepare the model as Trainer's own evaluation does: wrappers, dtype, optimizer mode."""
        # Trainer would also call accelerator.prepare_model(model, evaluation_mode=True). Accelerate then
        # takes the model for prepared, and a later train() would run it without DDP, each rank by itself.
        if len(self.accelerator._models) == 0 and self.is_fsdp_enabled and not self.args.torch_compile:
            self.model: Any = self.accelerator.prepare(self.model)
        if not self.is_in_train:
            if self.args.fp16_full_eval:
                self.model.to(dtype=torch.float16, device=self.args.device)
            if self.args.bf16_full_eval:
                self.model.to(dtype=torch.bfloat16, device=self.args.device)

        evaluate = getattr(self.optimizer, "eval", None)  # schedule-free optimizers evaluate other weights
        if callable(evaluate):
            evaluate()

    def _count_packs(self, metrics: dict[str, float]) -> None:
        """Correct the steps per second, which Trainer computes from a batch size that packs do not have."""
        if self._evaluated is None:
            return
        prefix, num_packs = self._evaluated
        rate = f"{prefix}_steps_per_second"
        if rate in metrics:
            metrics[rate] = round(num_packs / metrics[f"{prefix}_runtime"], 3)
            self._evaluated = None


# Arguments of THDDataModule that messages name, and that ``data_kwargs`` of a packed_trainer class holds.
_IN_DATA_KWARGS = ("oversize", "empty", "tail", "on_error", "max_patches", "text_key", "global_batch")


@contextmanager
def in_data_kwargs() -> Iterator[None]:
    """Let errors of the data module name arguments where they are: ``data_kwargs={'oversize': 'drop'}``."""
    try:
        yield
    except ValueError as error:
        # Not after a letter, or where the message has the name inside a call or a dict already.
        argument = rf"(?<![\w.{{'(])({'|'.join(_IN_DATA_KWARGS)})=('[^']*')"
        message = re.sub(argument, r"data_kwargs={'\1': \2}", str(error))
        if message == str(error):
            raise
        raise type(error)(message) from None


class Rows:
    """Collects logits, labels and optionally inputs of all ranks' sequences, in the order of the dataset."""

    def __init__(self, preprocess: Callable[[Any, Tensor], Any] | None, *, inputs: bool) -> None:
        self._preprocess = preprocess
        self._inputs = inputs
        # (index in the dataset, logits, labels, inputs) of each sequence
        self._rows: list[tuple[int, Any, Any, Any]] = []

    def add(self, model: nn.Module, batch: THDBatch) -> None:
        """Run the model on a pack, and store the results of each sequence separately on the host."""
        arguments = batch.hf_kwargs()
        labels_of_sequences = arguments.pop("labels", None)
        outputs = model(**arguments).logits
        if head_of(model) == "sequence":
            self._add_sequences(batch, outputs, labels_of_sequences)
            return

        of_pack: tuple[Tensor, ...] = (outputs[0], batch.targets, batch.input_ids)
        if self._preprocess is None:  # copy whole packs to the host, not each sequence
            of_pack = tuple(x.cpu() for x in of_pack)
        sequences = zip(batch.sequence_ids, *map(batch.unpack, of_pack), strict=True)
        for number, logits, targets, ids in sequences:
            # Shift targets back to labels; the first is ignored, because no logits predict a first token.
            labels = torch.nn.functional.pad(targets[:-1], (1, 0), value=_PAD)
            self._add(number, logits[None], labels[None], ids[None])

    def _add_sequences(self, batch: THDBatch, logits: Tensor, labels: Tensor | None) -> None:
        """Store a classifier's row and label of each sequence; a pad at the end may have a row too."""
        ids = batch.unpack(batch.input_ids)
        for i, number in enumerate(batch.sequence_ids):
            row = logits[i : i + 1]
            label = torch.full((1,), _PAD) if labels is None else labels[i : i + 1]
            self._add(number, row, label, ids[i][None])

    def _add(self, number: int, logits: Tensor, labels: Tensor, ids: Tensor) -> None:
        """Store the results of a sequence, each a batch of one row."""
        predictions = logits
        if self._preprocess is not None:
            predictions = self._preprocess(logits, labels)
        inputs = _on_host(ids) if self._inputs else None
        self._rows.append((number, _on_host(predictions), _on_host(labels), inputs))

    def gather(self) -> tuple[Any, Any, Any]:
        """Return predictions, labels and inputs ``[sequences, most tokens, ...]``, padded with -100."""
        rows_of_ranks: list[Any] = [self._rows]
        if dist.is_initialized():
            rows_of_ranks *= dist.get_world_size()
            dist.all_gather_object(rows_of_ranks, self._rows)
        rows = [row for of_rank in rows_of_ranks for row in of_rank]
        rows.sort(key=lambda row: row[0])

        predictions = _stack([row[1] for row in rows])
        labels = _stack([row[2] for row in rows])
        inputs = _stack([row[3] for row in rows]) if self._inputs else None
        return predictions, labels, inputs


def _on_host(values: Any) -> Any:
    """Return the row of a batch of one row as an array; a tuple of arrays for several outputs."""
    if isinstance(values, tuple | list):
        return tuple(map(_on_host, values))
    row = values[0].detach().cpu()
    if row.dtype == torch.bfloat16:  # numpy has none
        row = row.float()
    return row.numpy()


def _stack(rows: list[Any]) -> Any:
    """Stack rows of any length, padded with -100; None without rows."""
    if not rows:
        return None
    if isinstance(rows[0], tuple):
        return tuple(_stack(list(part)) for part in zip(*rows, strict=True))
    if rows[0].ndim == 0:
        return np.stack(rows)
    tensors = [torch.from_numpy(row) for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=_PAD).numpy()
