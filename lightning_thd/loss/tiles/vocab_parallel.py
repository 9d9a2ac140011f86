"""Statistics of each rank's columns -> statistics of the whole vocabulary, in one collective.

R rows, P ranks of the tensor-parallel group. Rank k holds columns k * V/P to (k + 1) * V/P.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd._static import shapes_are_static
from lightning_thd.loss.tiles.softmax import LOWEST, MAX, SUM, TARGET, TOTAL, WEIGHTED, without_infinity
from lightning_thd.parallel.exchange import stacked

# Groups whose shards were seen to be equal; accelerators read the sizes back once, the CPU every time.
_EQUAL_SHARDS: set[tuple[int, int]] = set()


def merge_statistics(
    stats: Tensor, others: Tensor, columns: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Combine every rank's statistics; one all-gather of ``[5 + n, R + 1]``.

    Args:
        stats: ``[5, R]``, see ``softmax``.
        others: ``[n, R]`` of the same dtype, which the caller merges.
        columns: V of this rank's shard; travels along, so that unequal shards are found without a collective.
        group: the tensor-parallel group.

    Returns:
        ``[5, R]`` and ``[P, n, R]``, the same on every rank.

    Raises:
        ValueError: when the shards differ in size.
    """
    ranks = dist.get_world_size(group)
    sent = torch.cat([stats, others])
    sent = torch.cat([sent, sent.new_full((len(sent), 1), float(columns))], dim=1)
    every = stacked(sent, group).view(ranks, *sent.shape)
    _check_equal(every[:, 0, -1], group)
    return merge_ranks(every[:, : len(stats), :-1]), every[:, len(stats) :, :-1]


def _check_equal(columns: Tensor, group: dist.ProcessGroup) -> None:
    # Keyed by object: a set entry of a dead group can only skip a check for a group of the same id and size.
    key = (id(group), dist.get_world_size(group))
    if shapes_are_static() or (columns.is_cuda and key in _EQUAL_SHARDS):
        return
    sizes = [int(size) for size in columns.tolist()]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"The ranks of tp_group hold {sizes} rows of the head's weight, wanted the same number on each. "
            "Pad the vocabulary to a multiple of the group (model.resize_token_embeddings(pad_to_multiple_of="
            f"{len(sizes)})) and pass valid_vocab_size."
        )
    _EQUAL_SHARDS.add(key)


def merge_ranks(every: Tensor) -> Tensor:
    """Merge the statistics ``[P, 5, R]`` of all ranks into ``[5, R]``."""
    largest = every[:, MAX].amax(0)
    shift = (every[:, MAX] - without_infinity(largest)).clamp_min(LOWEST)  # padding alone has maximum -inf
    decay = shift.exp()
    sums = every[:, SUM]
    moved = sums * shift
    merged = torch.empty_like(every[0])
    merged[MAX] = largest
    merged[SUM] = (sums * decay).sum(0)
    merged[WEIGHTED] = (decay * (every[:, WEIGHTED] + moved)).sum(0)
    merged[TARGET] = every[:, TARGET].sum(0)
    merged[TOTAL] = every[:, TOTAL].sum(0)
    return merged


def sum_over_ranks(parts: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Sum gradients ``[R, H_i]`` of one dtype over ranks in place, in one all-reduce."""
    if len(parts) == 1:
        dist.all_reduce(parts[0], group=group)
        return parts
    joined = torch.cat(parts, dim=1)
    dist.all_reduce(joined, group=group)
    return list(torch.split(joined, [part.shape[1] for part in parts], dim=1))
