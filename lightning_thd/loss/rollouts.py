"""Padded rollouts ``[B, N]`` <-> one pack ``[T]``, by an index plan that is computed once.

B rows of N slots, T slots in the pack. A slot of the pack holds a token, and predicts the next token of its
sequence. Values of tokens (masks, rewards) go to the slot that holds the token. Values of predictions
(log-probabilities, entropies, advantages) go to the slot that predicts the token. Unpacked, ``logp[b, n]`` is
the log-probability of ``input_ids[b, n]``, so callers need not shift by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_thd._checks import choice
from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDBatch
from lightning_thd.batch.collate import padded_on_host
from lightning_thd.loss.causal_lm import causal_lm_logprobs
from lightning_thd.loss.linear_logprobs import LogProbs

Of = Literal["prediction", "token"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRollouts:
    """Padded rollouts as one pack, with the index plan that maps slots to rows.

    Attributes:
        batch: the pack; its targets are the response tokens, all others -100.
        held: int64 ``[T]``, the index of each slot's token in the flattened rows; B * N for padding.
        predicted: int64 ``[T]``, the index of the token that each slot predicts; B * N if there is none.
        row: int64 ``[T]``, the row of each slot, also of padding inside sequences; B for the trailing pad.
        counts: int64 ``[B]``, response tokens of each row, without its first token, which nothing predicts.
        shape: (B, N).
    """

    batch: THDBatch
    held: Tensor
    predicted: Tensor
    row: Tensor
    counts: Tensor
    shape: tuple[int, int]

    @classmethod
    def from_padded(
        cls,
        input_ids: Tensor,
        attention_mask: Tensor,
        *,
        response_mask: Tensor | None = None,
        align: Alignment | None = None,
        pad_to: int | None = None,
        share_prefixes: bool = False,
    ) -> PackedRollouts:
        """Pack rows by their mask, not by a pad id, with one read of the device.

        Args:
            input_ids: ints ``[B, N]``, prompt and response.
            attention_mask: ``[B, N]``, 1 for real tokens, else 0; padding anywhere. A row without tokens gets
                no sequence in the pack, but other rows keep their numbers and results have an entry for it.
            response_mask: ``[B, N]``, nonzero for tokens that the policy sampled; the default is
                ``attention_mask``.
            align: the multiples that lengths and the total must have.
            pad_to: slots of the pack.
            share_prefixes: compute the common beginning of rows once, as ``THDBatch.collate`` does. Values
                of shape ``[T]`` then have one entry for each token of all rows in order.

        Returns:
            The pack on the device of ``input_ids``. Rows ``[[5, 6, 0], [0, 7, 8]]`` with mask
            ``[[1, 1, 0], [0, 1, 1]]`` give ids ``[5, 6, 7, 8]`` and targets ``[6, -100, 8, -100]``.
        """
        response = attention_mask
        if response_mask is not None:
            response = response_mask != 0
        ids, mask, response = padded_on_host(input_ids, attention_mask, response, "response_mask")
        response = response.bool()
        if bool((response & ~mask).any()):
            raise ValueError("response_mask marks tokens that attention_mask hides. Multiply the two.")

        lengths: list[int] = mask.sum(1).tolist()
        rows = [row for row, length in enumerate(lengths) if length]
        row_lengths = [lengths[row] for row in rows]
        tokens = torch.split(ids[mask], row_lengths)
        labels = torch.split(torch.where(response[mask], ids[mask], -100), row_lengths)
        samples = [
            {"input_ids": of_row, "labels": labels_of_row}
            for of_row, labels_of_row in zip(tokens, labels, strict=True)
        ]
        batch = THDBatch.collate(
            samples, align=align, pad_to=pad_to, sequence_ids=rows, share_prefixes=share_prefixes
        )

        with torch.device("cpu"):  # whatever torch's default device is
            held, predicted, row = _index_plan(mask, batch)
            first = torch.arange(mask.shape[1]) == mask.int().argmax(1, keepdim=True)

        counts = (response & ~first).sum(1)
        shape = (mask.shape[0], mask.shape[1])
        rollouts = cls(batch=batch, held=held, predicted=predicted, row=row, counts=counts, shape=shape)
        if input_ids.is_cpu:
            return rollouts
        return rollouts.to(input_ids.device)

    def to(self, device: torch.device | str) -> PackedRollouts:
        """Move pack and index plan to a device; a move from the CPU reads nothing back."""
        plan = {name: getattr(self, name) for name in ("held", "predicted", "row", "counts")}
        extras = self.batch.extras  # the plan travels with the batch, in one upload
        moved = self.batch.replace(extras={**extras, **plan}).to(device)
        arrived: dict[str, Any] = {name: moved.extras[name] for name in plan}
        batch = moved.replace(extras={key: moved.extras[key] for key in extras})
        return replace(self, batch=batch, **arrived)

    def pack(self, values: Tensor, *, of: Of = "prediction", fill: float = 0.0) -> Tensor:
        """Gather padded values ``[B, N, ...]`` into the slots of the pack, ``[T, ...]``; differentiable.

        ``values[b, n]`` belongs to ``input_ids[b, n]``: advantages, old log-probabilities, rewards.
        ``of="prediction"`` puts it into the slot that predicts that token, ``of="token"`` into the token's
        own slot. Slots that predict or hold nothing get ``fill``. With mask ``[[1, 1, 0], [0, 1, 1]]``,
        ``[[1, 2, 0], [0, 3, 4]]`` becomes ``[2, fill, 4, fill]``, or ``[1, 2, 3, 4]`` of tokens.
        """
        rows, columns = self.shape
        if values.shape[:2] != self.shape:
            raise ValueError(f"pack() got {list(values.shape)}, wanted [{rows}, {columns}, ...], as the ids.")

        index = self._index(of)
        flat = values.flatten(0, 1)
        has_value = (index < rows * columns).view(-1, *[1] * (flat.ndim - 1))
        if not values.is_floating_point() and float(fill).is_integer():
            fill = int(fill)  # a float would turn integers into fp32, which rounds them above 2^24
        gathered = flat.index_select(0, index.clamp(max=rows * columns - 1))
        return torch.where(has_value, gathered, fill)

    def unpack(self, values: Tensor, *, of: Of = "prediction", fill: float = 0.0) -> Tensor:
        """Scatter values of slots, ``[T, ...]`` or ``[1, T, ...]``, to rows ``[B, N, ...]``; differentiable.

        ``of="prediction"`` moves a slot's value to the token that it predicts, ``of="token"`` to its own
        token. All other entries get ``fill``, such as the first token of a row. With mask
        ``[[1, 1, 0], [0, 1, 1]]``, slots ``[1, 2, 3, 4]`` become ``[[0, 1, 0], [0, 0, 3]]`` of predictions.
        """
        if values.ndim > 1 and values.shape[0] == 1 and self.held.shape[0] != 1:
            values = values[0]

        rows, columns = self.shape
        slots = self.held.shape[0]
        if values.shape[0] != slots:
            raise ValueError(f"unpack() got {list(values.shape)}, but this pack has {slots} slots.")

        # The last entry takes the values that belong to no token.
        blank = values.new_full((rows * columns + 1, *values.shape[1:]), fill)
        scattered = blank.index_copy(0, self._index(of), values)
        return scattered[:-1].view(rows, columns, *values.shape[1:])

    def sums(self, values: Tensor) -> Tensor:
        """Sum per-prediction values ``[T]`` over every row's response tokens, ``[B]``; differentiable."""
        counted = torch.where(self.batch.token_targets != -100, values, 0.0)
        return segment_sums(counted, self.row, self.shape[0])

    def means(self, values: Tensor) -> Tensor:
        """Average per-prediction values over the response tokens of every row, ``[B]``; see ``sums``."""
        return self.sums(values) / self.counts.clamp_min(1)

    def logprobs(self, model: nn.Module, *, temperature: float = 1.0, entropy: bool = True) -> LogProbs:
        """Run a model over the pack and return ``causal_lm_logprobs`` as padded rows ``[B, N]``."""
        packed = causal_lm_logprobs(model, self.batch, temperature=temperature, entropy=entropy)
        return packed.map(self.unpack)

    def sequence_logprobs(self, model: nn.Module, *, temperature: float = 1.0, mean: bool = False) -> Tensor:
        """Run a model over the pack; return each response's log-probability, or its token mean, ``[B]``."""
        logp = causal_lm_logprobs(model, self.batch, temperature=temperature, entropy=False).logp
        return self.means(logp) if mean else self.sums(logp)

    def _index(self, of: Of) -> Tensor:
        """Return the flattened entry of each slot's token, or of the token that it predicts."""
        choice(of, "of", *get_args(Of))
        return self.predicted if of == "prediction" else self.held


def _index_plan(mask: Tensor, batch: THDBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``PackedRollouts.held``, ``predicted`` and ``row`` of rows with this mask."""
    nowhere = mask.numel()
    tokens = mask.flatten().nonzero().squeeze(1)
    num_sequences = len(batch.lengths)
    lengths = torch.tensor(batch.lengths)
    slots_of = torch.tensor(batch.boundaries.token_lengths)

    padded = slots_of[:num_sequences]
    real_starts = lengths.cumsum(0) - lengths
    slot_starts = padded.cumsum(0) - padded
    slots = torch.arange(len(tokens)) + torch.repeat_interleave(slot_starts - real_starts, lengths)
    held = torch.full((int(slots_of.sum()),), nowhere)
    held[slots] = tokens

    following = torch.cat([tokens[1:], tokens.new_full((1,), nowhere)])
    following[lengths.cumsum(0) - 1] = nowhere
    predicted = torch.full_like(held, nowhere)
    predicted[slots] = following

    num_pads = len(slots_of) - num_sequences
    rows = torch.tensor([*batch.sequence_ids, *[mask.shape[0]] * num_pads])
    return held, predicted, torch.repeat_interleave(rows, slots_of)


def segment_sums(values: Tensor, segment: Tensor, num_segments: int) -> Tensor:
    """Sum values ``[T]`` by their ascending ``segment``; leave out segments from ``num_segments`` on."""
    bounds = torch.arange(num_segments + 1, device=segment.device)
    offsets = torch.searchsorted(segment.contiguous(), bounds)
    wide = torch.float32 if values.is_mps else torch.float64  # a CPU adds one by one: fp32 loses small values
    sums: Tensor = torch.segment_reduce(values.to(wide), "sum", offsets=offsets, initial=0, unsafe=True)
    return sums.to(values.dtype)
