"""Segment ids and positions -> sequence lengths and offsets, without a T x T mask.

Legend: T slots in a row (Tq of queries, Tkv of keys), M = max_segments. Ids count from 1, and 0 is padding.

Every slot gets an order number. A query sees a key of its id if the query's number is at least the key's.
So a query sees some key if its number is at least the lowest number of the id's keys. A key is seen if its
number is at most the highest number of the id's queries. One minimum and one maximum per id replace the T x T
mask. An id may have several runs of slots. Ids may be in any order, with padding between them, among the
queries or keys only, or cut for context parallelism (striped, dual-chunk, contiguous).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_thd._checks import choice, int_tensor, whole_number
from lightning_thd.seqlens import host_values

Ints = Tensor | npt.NDArray[np.integer] | Sequence[Any]
MaskFamily = Literal["causal", "causal_bottom_right", "padding"]


class SegmentLayout(NamedTuple):
    """Lengths and offsets of the segments of every row; int32, on the device of the ids."""

    q_lengths: Tensor  # ``[..., M]`` number of queries of id ``i + 1`` that see a key
    kv_lengths: Tensor  # ``[..., M]`` number of keys of id ``i + 1`` that a query sees
    q_offsets: Tensor  # ``[..., M + 1]`` first slots of the first M + 1 runs of queries that see a key, or -1
    kv_offsets: Tensor  # ``[..., M + 1]`` first slots of the first M + 1 runs of keys that are seen, or -1
    q_starts: Tensor  # ``[..., M]`` slot of the first query of id ``i + 1`` that sees a key, or -1
    kv_starts: Tensor  # ``[..., M]`` slot of the first key of id ``i + 1`` that is seen, or -1


@torch.no_grad()
def seqlens_offsets(
    ids_q: Ints, ids_kv: Ints, pos_q: Ints | None, pos_kv: Ints | None, *, mask: MaskFamily, max_segments: int
) -> SegmentLayout:
    """Compute lengths and offsets of the segments that attention visits, without reading the device.

    Args:
        ids_q: int32 or int64 ``[..., Tq]``, in ``[0, max_segments]``.
        ids_kv: the same for keys, ``[..., Tkv]``. If the ids and positions of both sides are the same
            objects, they are processed once.
        pos_q: positions inside the segments, in the shape of ``ids_q``; not used with "padding".
        pos_kv: the same for keys.
        mask: "causal" lets a query see the keys of its id up to its position; "causal_bottom_right" does
            too, but counts positions from the end of each run; "padding" lets it see all keys of its id.
        max_segments: the highest id M, known on the host.

    Returns:
        For ids ``[1, 1, 1, 2, 2, 0, 3, 3]`` on both sides and M = 4: lengths ``[3, 2, 2, 0]``, offsets
        ``[0, 3, 6, -1, -1]`` and starts ``[0, 3, 6, -1]``. Ids above M raise ValueError on the CPU, and fail
        in the kernel's index check on other devices.
    """
    choice(mask, "mask", *get_args(MaskFamily))
    most = 2**31 - 2  # ids and counts are int32
    max_segments = whole_number(
        max_segments, "max_segments", least=1, most=most, advice="Pass the highest id."
    )

    same = ids_q is ids_kv and pos_q is pos_kv
    ids_q, pos_q = _check_side(ids_q, pos_q, mask, max_segments, "q")
    if same:
        # Every slot sees itself, so all queries see a key, and all keys are seen.
        lengths, offsets, starts = _describe(ids_q, max_segments)
        return SegmentLayout(lengths, lengths, offsets, offsets, starts, starts)
    ids_kv, pos_kv = _check_side(ids_kv, pos_kv, mask, max_segments, "kv")
    if ids_q.shape[:-1] != ids_kv.shape[:-1] or ids_q.device != ids_kv.device:
        raise ValueError(
            f"ids_q is {list(ids_q.shape)} on {ids_q.device} and ids_kv {list(ids_kv.shape)} on "
            f"{ids_kv.device}; wanted the same batch dimensions and device. Expand or move one of them."
        )

    order_q = _order_numbers(ids_q, pos_q, mask)
    order_kv = _order_numbers(ids_kv, pos_kv, mask)
    lowest_kv = _reduce(ids_kv, order_kv, max_segments, "amin")
    highest_q = _reduce(ids_q, order_q, max_segments, "amax")
    # Slots that see nothing, or that nobody sees, count as padding.
    sees_a_key = order_q >= lowest_kv.gather(-1, ids_q.long())
    is_seen = order_kv <= highest_q.gather(-1, ids_kv.long())
    q_lengths, q_offsets, q_starts = _describe(ids_q.where(sees_a_key, 0), max_segments)
    kv_lengths, kv_offsets, kv_starts = _describe(ids_kv.where(is_seen, 0), max_segments)
    return SegmentLayout(q_lengths, kv_lengths, q_offsets, kv_offsets, q_starts, kv_starts)


def _order_numbers(ids: Tensor, pos: Tensor | None, mask: MaskFamily) -> Tensor:
    """Return the order number of every slot; a query sees the keys of its id up to its own number."""
    if mask == "padding" or pos is None:
        return ids.new_zeros(()).expand(ids.shape)
    if mask == "causal":
        return pos
    return pos - _run_lengths(ids)  # counted from the end of each run


def _run_lengths(ids: Tensor) -> Tensor:
    """Return the length of the run of equal ids that each slot is in; int32."""
    run = torch.cumsum(_run_starts(ids), -1, dtype=torch.int64).sub_(1)
    counts = torch.zeros(ids.shape, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(-1, run, torch.ones((), dtype=torch.int32, device=ids.device).expand(ids.shape))
    return counts.gather(-1, run)


def _run_starts(ids: Tensor) -> Tensor:
    """Mark the first slot, and every slot whose id differs from the id of the slot before."""
    starts = torch.ones(ids.shape, dtype=torch.bool, device=ids.device)
    starts[..., 1:] = ids[..., 1:] != ids[..., :-1]
    return starts


def _reduce(ids: Tensor, order: Tensor, max_segments: int, reduce: Literal["amin", "amax"]) -> Tensor:
    """Return the lowest or highest order number per id; for absent ids and id 0, the dtype's limit."""
    limits = torch.iinfo(order.dtype)
    unreachable = limits.max if reduce == "amin" else limits.min
    bounds = order.new_full((*ids.shape[:-1], max_segments + 1), unreachable)
    bounds.scatter_reduce_(-1, ids.long(), order, reduce)
    bounds[..., 0] = unreachable
    return bounds


def _describe(ids: Tensor, max_segments: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return lengths per id, starts of runs in order, and the first slot per id, without id 0."""
    total = ids.shape[-1]
    device = ids.device
    by_id = (*ids.shape[:-1], max_segments + 1)  # the shape of one number per id, 0 included
    index = ids.long()

    one = torch.ones((), dtype=torch.int32, device=device)
    lengths = torch.zeros(by_id, dtype=torch.int32, device=device)
    lengths.scatter_add_(-1, index, one.expand(ids.shape))
    lengths = lengths[..., 1:]

    slots = torch.arange(total, dtype=torch.int32, device=device)
    starts = torch.full(by_id, total, dtype=torch.int32, device=device)
    starts.scatter_reduce_(-1, index, slots.expand(ids.shape), "amin")
    starts = starts[..., 1:]
    del index, slots  # 12 bytes per slot, before the next tensors are made

    # ``count`` grows by one at the start of each run, so run k starts at the first slot with the count k.
    count = torch.cumsum(_run_starts(ids) & (ids != 0), -1, dtype=torch.int32)
    runs = torch.arange(1, max_segments + 2, dtype=torch.int32, device=device).expand(by_id)
    offsets = torch.searchsorted(count.contiguous(), runs.contiguous(), out_int32=True)
    return lengths, offsets.where(offsets < total, -1), starts.where(starts < total, -1)


def _check_side(
    ids: Ints, pos: Ints | None, mask: MaskFamily, max_segments: int, side: str
) -> tuple[Tensor, Tensor | None]:
    """Return the ids and positions of one side, "q" or "kv", as tensors; raise if they do not fit."""
    ids = int_tensor(ids, f"ids_{side}")
    pos = None if pos is None else int_tensor(pos, f"pos_{side}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"ids_{side} is {ids.dtype}; wanted int32 or int64. Call ids_{side}.to(torch.int32)."
        )
    if ids.ndim == 0:
        raise ValueError(f"ids_{side} is a scalar; wanted [..., T]. Pass one id per slot.")
    if pos is None:
        if mask != "padding":
            raise ValueError(
                f"mask={mask!r} needs pos_{side}, but it is None. Pass the positions inside the segments."
            )
    elif pos.shape != ids.shape or pos.device != ids.device or pos.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"pos_{side} is {pos.dtype} {list(pos.shape)} on {pos.device}; wanted int32 or int64 "
            f"{list(ids.shape)} on {ids.device}, as ids_{side}. Pass one position per slot."
        )

    host = host_values(ids)
    if host is None or not host.size:
        return ids, pos
    low = int(host.min())
    high = int(host.max())
    if low < 0 or high > max_segments:
        raise ValueError(
            f"ids_{side} holds ids from {low} to {high}, but max_segments={max_segments}; wanted 0 for "
            f"padding and 1 to {max_segments}. Pass max_segments={max(high, 1)}, or number the segments "
            "from 1."
        )
    return ids, pos
