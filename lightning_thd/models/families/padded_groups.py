"""Lengths of a pack -> a few padded batches of sequences of similar length, and indices back to the pack.

Causal layers without a packed kernel give exact results on these batches, because padding behind a sequence
cannot change the sequence. Legend: T slots in a pack, S sequences, N rows of a group, L its longest row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_thd.batch.upload import uploaded

# Sequences of a group have at least this share of its longest, so padding is at most a third of the group.
# But sequences of up to 32 slots share one group, because another call costs more than their padding.
_SHARE = 2 / 3
_SMALL = 32
# Most places of a group of fixed size, per slot of the pack. With more, a step without graphs is faster.
_STATIC_WASTE = 32

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Groups:
    """The slots of a pack arranged as padded groups of sequences, and indices back to the pack."""

    sources: tuple[Tensor, ...]  # int64 ``[N, L]`` per group: the slot at each place; T marks padding
    back: Tensor  # int64 ``[T]``, the place of every slot among the groups laid end to end


def plan_groups(lengths: Sequence[int], device: torch.device) -> Groups:
    """Group sequences of similar length, to run as padded rows; empty sequences are skipped."""
    grids = [grid for _, grid in padded_rows(lengths)]
    *sources, back = uploaded([*grids, places_in(grids, sum(lengths))], device)
    return Groups(sources=tuple(sources), back=back)


def padded_rows(
    lengths: Sequence[int] | IntArray,
    padded: Sequence[int] | None = None,  # slots of each in the pack, if more than its length
) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield, for each group, the indices of sequences ``[N]`` and their slots ``[N, L]``; T marks padding."""
    sizes = np.asarray(lengths, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes if padded is None else padded)])
    num_slots = starts[-1]
    by_length = np.argsort(-sizes, kind="stable")
    by_length = by_length[sizes[by_length] > 0]

    while len(by_length):
        longest = int(sizes[by_length[0]])
        smallest = 1
        if longest > _SMALL:
            smallest = int(np.ceil(longest * _SHARE))
        count = int(np.count_nonzero(sizes[by_length] >= smallest))
        members = by_length[:count]
        by_length = by_length[count:]

        offsets = np.arange(longest)
        is_token = offsets < sizes[members, None]
        yield members, np.where(is_token, starts[members, None] + offsets, num_slots)


def places_in(grids: Iterable[IntArray], slots: int) -> IntArray:
    """Return the place of every slot when the rows of all groups are laid end to end, int64 ``[T]``."""
    flat = np.concatenate([*(grid.ravel() for grid in grids), np.empty(0, dtype=np.int64)])
    real = flat < slots
    back = np.empty(slots, dtype=np.int64)
    back[flat[real]] = np.flatnonzero(real)
    return back


def plan_static_group(cu_seqlens: Tensor, max_seqlen: int, slots: int) -> Groups:
    """Put all sequences into one group for graphs; its size depends only on S, T and ``max_seqlen``."""
    num_sequences = cu_seqlens.shape[0] - 1
    if num_sequences * max_seqlen > _STATIC_WASTE * slots:
        raise ValueError(
            f"A recorded step would run {num_sequences} sequences padded to {max_seqlen} for {slots} slots. "
            "Install the fused kernels of the layer (mamba-ssm, causal-conv1d, flash-linear-attention)."
        )

    starts = cu_seqlens[:-1].long()
    lengths = torch.diff(cu_seqlens)
    offsets = torch.arange(max_seqlen, device=cu_seqlens.device)
    sources = torch.where(offsets < lengths[:, None], starts[:, None] + offsets, slots)

    sequence = torch.repeat_interleave(lengths, output_size=slots)  # the sequence of each slot
    positions = torch.arange(slots, device=cu_seqlens.device) - starts.index_select(0, sequence)
    return Groups(sources=(sources,), back=sequence * max_seqlen + positions)


def run_grouped(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    groups: Groups,
    slots: int,
    *,
    several: bool = False,
) -> Any:
    """Call a causal function on each padded group and put its outputs back in the order of the pack.

    Arguments ``[1, T, ...]``, also in a tuple, are regrouped. If the function returns a tuple, only its first
    entry belongs to tokens; the others are final states of groups and become None. With ``several``, all
    entries belong to tokens.
    """
    outputs = []
    for source in groups.sources:
        regroup = of_tokens(functools.partial(_rows_of, source), slots)
        grouped = {name: regroup(value) for name, value in kwargs.items()}
        outputs.append(function(*map(regroup, args), **grouped))

    if not isinstance(outputs[0], tuple):
        return _join(outputs, groups.back)

    entries = list(zip(*outputs, strict=True))  # each holds one output of every group
    of_tokens_until = len(entries) if several else 1
    joined = [_join(entry, groups.back) for entry in entries[:of_tokens_until]]
    states = [None] * (len(entries) - of_tokens_until)
    return *joined, *states


def of_tokens(function: Callable[[Tensor], Tensor], slots: int) -> Callable[[Any], Any]:
    """Wrap a function to apply it only to tensors ``[1, slots, ...]``, also in tuples; all else passes."""

    def apply(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(apply, value))
        fits = isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, slots)
        return function(value) if fits else value

    return apply


def _rows_of(source: Tensor, value: Tensor) -> Tensor:
    """Return the values ``[1, T, ...]`` of a pack as padded rows ``[N, L, ...]``, with zeros for padding."""
    rows = torch.cat([value[0], value.new_zeros(1, *value.shape[2:])])
    return rows.index_select(0, source.flatten()).view(*source.shape, *value.shape[2:])


def _join(outputs: Sequence[Tensor], back: Tensor) -> Tensor:
    """Return outputs ``[N, L, ...]`` of all groups in the order of the pack, ``[1, T, ...]``."""
    rows = torch.cat([output.flatten(0, 1) for output in outputs])
    return rows.index_select(0, back)[None]
