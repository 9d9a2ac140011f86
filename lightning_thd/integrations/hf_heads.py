"""A transformers model with a head -> the loss of a pack: next tokens, labelled tokens or sequences."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from lightning_thd._find import unwrapped
from lightning_thd.batch import IGNORE_INDEX, THDBatch

Head = Literal["causal", "token", "sequence"]

_SEQUENCE = ("ForSequenceClassification",)
_TOKEN = ("ForTokenClassification", "ForMaskedLM")  # labels belong to their own tokens, not to the next
_REFUSED = ("ForQuestionAnswering", "ForMultipleChoice", "ForNextSentencePrediction", "ForPreTraining")


def head_of(model: nn.Module) -> Head:
    """Return what the labels of a model's rows belong to, by the name of its class."""
    name = type(unwrapped(model)).__name__
    if name.endswith(_SEQUENCE):
        return "sequence"
    if name.endswith(_TOKEN):
        return "token"
    return "causal"


def refuse_head(model: Any, *, label_smoothing: float, split: bool, streamed: bool) -> None:
    """Refuse a model whose loss packs do not compute, and settings under which its labels would be wrong."""
    name = type(unwrapped(model)).__name__
    if name.endswith(_REFUSED):
        raise ValueError(
            f"packed_trainer got a {name}, whose labels are places or pairs of rows. It trains causal "
            "models, sequence and token classifiers and masked language models. Use transformers' Trainer "
            "on padded rows."
        )

    head = head_of(model)
    if head == "token" and split:
        raise ValueError(
            f"oversize='split' with a {name}: the first label of each piece would be lost. Set "
            "data_kwargs={'oversize': 'truncate'} or 'drop'."
        )
    if head == "token" and streamed:
        raise ValueError(
            f"train_dataset is a stream, whose rows are not checked for the labels of a {name}. Pass a "
            "dataset of known length, or use Lightning with THDDataModule."
        )
    if label_smoothing and head != "causal":
        raise ValueError(
            f"label_smoothing_factor={label_smoothing} with a {name}: packs smooth only the loss of causal "
            "models. Set it to 0."
        )


def head_loss(model: nn.Module, batch: THDBatch, head: Head) -> Tensor:
    """Return the loss of a pack of labelled sequences or tokens, scaled for a mean over the whole step."""
    if head == "sequence":
        _check_sequences(batch)
        mean: Tensor = model(**batch.hf_kwargs()).loss
        scale = batch.sequence_scale
        assert scale is not None  # loaders and evaluation set it
        return mean * len(batch) * scale

    inputs = batch.hf_kwargs()
    inputs.pop("labels", None)
    logits = model(**inputs).logits[0]
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    labels = batch.targets.roll(1)  # targets are shifted by one token; the first of a sequence has no label
    losses = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    if batch.weights is not None:
        losses = losses * batch.weights.roll(1)
    return losses.sum() * batch.loss_scale


def _check_sequences(batch: THDBatch) -> None:
    """Refuse rows of a sequence classifier whose mean loss the step's scale cannot make exact."""
    if "labels" not in batch.extras:
        raise ValueError("A row has no label. Give every row a 'label': a class, or a float for a reward.")
    if batch.weights is not None:
        raise ValueError("A classifier's own loss reads no weights. Remove the rows' 'weights'.")
    if min(batch.lengths, default=2) < 2:
        raise ValueError(
            "A row of a classifier has one token, which the mean over sequences does not count. Give every "
            "row two tokens or more, such as [CLS] before the text."
        )
