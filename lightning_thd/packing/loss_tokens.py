"""Loss tokens of each sequence, spans -> the loss tokens of a step, or None where they cannot be known."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from lightning_thd.packing.entries import Lengths, OpenLengths, open_lengths, read_lengths
from lightning_thd.packing.plan import Spans

LossTokens = Lengths | Literal["all"]


def open_loss_tokens(loss_tokens: LossTokens | None, count: int) -> OpenLengths | Literal["all"] | None:
    """Check that there is one count a sequence; memory maps and virtual counts stay where they are."""
    if loss_tokens is None:
        return None
    if isinstance(loss_tokens, str):
        if loss_tokens == "all":
            return "all"
        raise ValueError(f"loss_tokens={loss_tokens!r}: pass one count a sequence, 'all', or None.")
    opened = open_lengths(loss_tokens)
    if len(opened) != count:
        raise ValueError(
            f"loss_tokens has {len(opened)} counts but there are {count} sequences. Pass one count a "
            f"sequence."
        )
    return opened


def count_loss_tokens(
    loss_tokens: OpenLengths | Literal["all"] | None, spans: Spans, lengths: npt.NDArray[np.int64]
) -> int | None:
    """Sum the loss tokens of the spans of a step.

    A whole sequence has its count. Of a part of one we know only what follows when all its tokens are loss
    tokens: a piece that goes on keeps a target for each of its tokens, a truncated or last one for all but
        the last.

    Returns:
        Their number, or None when no counts were given or a part of a partly masked sequence is among them.
    """
    if loss_tokens is None:
        return None
    targets = spans.lengths - ~spans.continued
    if isinstance(loss_tokens, str):
        return int(targets.sum())
    counts = read_lengths(loss_tokens, spans.index)
    wrong = (counts < 0) | (counts >= lengths)
    if wrong.any():
        first = int(wrong.argmax())
        raise ValueError(
            f"Sequence {spans.index[first]} has {lengths[first]} tokens but {counts[first]} loss tokens. "
            f"The first "
            "token of a sequence is no target, so it has fewer. Count the labels from the second token on."
        )
    whole = _together(spans) == lengths
    full = counts == lengths - 1
    none = counts == 0
    if not (whole | full | none).all():
        return None
    first_piece = spans.start == 0
    return int(np.where(whole, counts * first_piece, np.where(full, targets, 0)).sum())


def _together(spans: Spans) -> npt.NDArray[np.int64]:
    """Return for each span how many real tokens of its sequence are present in all spans."""
    _, owner = np.unique(spans.index, return_inverse=True)
    return np.bincount(owner, weights=spans.lengths, minlength=1).astype(np.int64)[owner]
