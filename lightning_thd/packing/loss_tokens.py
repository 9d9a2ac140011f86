"""Loss tokens of each sequence -> a function that weighs spans by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_thd.packing.entries import Lengths, OpenLengths, open_lengths, read_lengths
from lightning_thd.packing.plan import FloatArray, Spans, Weigh

LossTokens = Lengths | Literal["all"] | Weigh


@dataclass(frozen=True, slots=True)
class CountedTargets:
    """Weighs spans by counted loss tokens, each target and each sequence by 1.

    Only of a whole sequence, and of one whose tokens are all or none loss tokens, the parts are known.

    Attributes:
        lengths: tokens of each sequence.
        counts: loss tokens of each; None if every token with a next one in its sequence has a target.
    """

    lengths: OpenLengths
    counts: OpenLengths | None

    def __call__(self, spans: Spans) -> FloatArray | None:
        """Return float64 ``[2, S]``, or None where a part of a partly masked sequence is among the spans."""
        lengths = read_lengths(self.lengths, spans.index)
        counts = lengths - 1 if self.counts is None else read_lengths(self.counts, spans.index)
        wrong = (counts < 0) | (counts >= lengths)
        if wrong.any():
            first = int(wrong.argmax())
            raise ValueError(
                f"Sequence {spans.index[first]} has {lengths[first]} tokens but {counts[first]} loss tokens. "
                "The first token of a sequence is no target, so it has fewer. Count the labels from the "
                "second token on."
            )
        whole, full = spans.lengths == lengths, counts == lengths - 1
        if not (whole | full | (counts == 0)).all():
            return None
        targets = spans.lengths - ~spans.continued
        own = np.where(whole, counts, np.where(full, targets, 0)).astype(np.float64)
        truncated = (spans.start == 0) & ~spans.continued  # the rest is dropped, not placed in other pieces
        of_sequence = np.where(truncated, own, counts)
        share = np.divide(own, of_sequence, out=np.zeros_like(own), where=of_sequence > 0)
        return np.stack([own, share])


def open_loss_tokens(loss_tokens: LossTokens | None, lengths: OpenLengths) -> Weigh | None:
    """Check that there is one count a sequence; memory maps and virtual counts stay where they are."""
    if loss_tokens is None or callable(loss_tokens):
        return loss_tokens
    if isinstance(loss_tokens, str):
        if loss_tokens == "all":
            return CountedTargets(lengths, None)
        raise ValueError(f"loss_tokens={loss_tokens!r}: pass one count a sequence, 'all', or None.")
    opened = open_lengths(loss_tokens)
    if len(opened) != len(lengths):
        raise ValueError(
            f"loss_tokens has {len(opened)} counts but there are {len(lengths)} sequences. Pass one count a "
            f"sequence."
        )
    return CountedTargets(lengths, opened)
