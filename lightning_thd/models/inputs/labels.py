"""Labels handed to a transformers model together with a pack -> labels whose loss stays inside sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_thd.batch.samples import refuse_shifted
from lightning_thd.models.pack import Pack
from lightning_thd.parallel.context import layout
from lightning_thd.seqlens.checks import host_values

_SHIFTED = ("ForCausalLM", "ForConditionalGeneration")
# Losses of one token alone, and of one row a sequence.
_IN_PLACE = ("ForMaskedLM", "ForTokenClassification", "ForSequenceClassification")
_OF_A_ROW = ("start_positions", "end_positions", "next_sentence_label", "sentence_order_label")
_IGNORED = -100


def keep_labels_inside(model: Any, kwargs: dict[str, Any], pack: Pack) -> dict[str, Any]:
    """Return arguments whose labels hide the first token of every sequence from the one before.

    A causal LM's own loss shifts labels by one slot along the row; the first token of a sequence is never a
    target of its own sequence, so hiding it changes nothing else.

    Raises:
        ValueError: for a loss that is neither a causal LM's nor one of single tokens or whole sequences, and
            for labels that were shifted before, where looking at them is free.
    """
    of_a_row = next((name for name in _OF_A_ROW if kwargs.get(name) is not None), None)
    if of_a_row is not None:
        raise ValueError(
            f"{type(model).__name__} got a pack and {of_a_row}, which speaks of a whole row. Leave it out "
            "and compute the loss of every sequence from batch.unpack(), or feed it padded rows."
        )
    labels = kwargs.get("labels")
    if labels is None or kwargs.get("shift_labels") is not None:
        return kwargs
    kind = _loss_kind(model)
    if kind in _IN_PLACE:
        return kwargs
    if kind not in _SHIFTED:
        raise ValueError(
            f"{type(model).__name__} got a pack and labels, and its loss is not known to stay inside the "
            "sequences of a pack. Leave labels out and compute the loss from the logits, or feed it padded "
            "rows."
        )
    if layout.in_use and layout.layout_of(pack.cu_seqlens_q) is not None:
        raise ValueError(
            f"{type(model).__name__} got labels and one rank's shard of a pack, whose last token's target is "
            "on another rank. Leave labels out and use lightning_thd.causal_lm_loss(model, batch)."
        )
    _refuse_shifted(model, kwargs.get("input_ids"), labels)
    return {**kwargs, "labels": labels.masked_fill(_first_slots(pack), _IGNORED)}


def _refuse_shifted(model: Any, input_ids: Any, labels: Any) -> None:
    """Refuse labels that are the next tokens, as a batch's targets are: the model would shift them again."""
    rows = [host_values(x) if isinstance(x, Tensor) else None for x in (input_ids, labels)]
    if rows[0] is None or rows[1] is None or rows[0].shape != rows[1].shape:
        return  # on a device, or being traced
    ids, given = (row.reshape(-1) for row in rows if row is not None)
    try:
        refuse_shifted([(ids, given)], "labels=")
    except ValueError as err:
        raise ValueError(
            f"{type(model).__name__} got labels with a pack: the labels are the next tokens already, as "
            "batch.targets are, and the model shifts labels by itself. Pass shift_labels=labels beside them, "
            "or use lightning_thd.causal_lm_loss(model, batch)."
        ) from err


def _loss_kind(model: Any) -> str | None:
    name = type(model).__name__
    if "LMHead" in name:  # BERT, GPT-2 and others of older naming
        return "ForCausalLM"
    kind: str | None = getattr(model, "loss_type", None)
    return kind


def _first_slots(pack: Pack) -> Tensor:
    """Mark the first slot of every sequence; bool ``[T]``."""
    starts = pack.cu_seqlens_q[:-1].long()
    first = torch.zeros(pack.slots + 1, dtype=torch.bool, device=starts.device)
    return first.index_fill(0, starts, True)[:-1]  # an empty last sequence begins behind the row
