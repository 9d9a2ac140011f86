"""The input of a causal convolution on one rank's shard -> its output, with earlier inputs from other ranks.

A convolution of width W reaches W - 1 slots back, as a window of attention does: the exchange and the
stretches are planned by the same functions.

Legend: N slots of a shard, C channels, M slots of all stretches with what comes before them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_thd.models.padded_groups import Groups, plan_groups
from lightning_thd.parallel.context import calls, partition, traffic
from lightning_thd.parallel.context.layout import ShardLayout
from lightning_thd.parallel.exchange import exchange_rows, keep_path


class _Reach(NamedTuple):
    """Stretches with the inputs before them: the slots of their rows, their groups, and this rank's rows."""

    rows: Tensor
    groups: Groups
    own: Tensor


def convolve_shard(
    original: Callable[..., Tensor],
    layout: ShardLayout,
    x_1CN: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Run a causal convolution, weight ``[C, W]``, over the stretches of a shard; a collective.

    Returns:
        ``[1, C, N]``. A rank receives at most W - 1 rows for each of its stretches.
    """
    left = weight.shape[-1] - 1
    plan = calls.exchanged(layout, causal=True, left=left)
    rows = x_1CN[0].transpose(0, 1)
    if plan.group_rows:  # the same on every rank
        assert layout.group is not None
        sent = rows.index_select(0, plan.send_rows)
        received = exchange_rows(sent, plan.send_counts, plan.receive_counts, layout.group)
        traffic.count(received.numel() * received.element_size(), "convolution")
        rows = keep_path(torch.cat([rows, received]), received)
    reach = layout.once(("convolution", left), lambda: _reach(layout, left))
    taken = torch.cat([rows.index_select(0, reach.rows), rows.new_zeros(1, rows.shape[1])])
    outputs = []
    for source in reach.groups.sources:
        grid = taken.index_select(0, source.flatten()).unflatten(0, source.shape)  # type: ignore[no-untyped-call]
        out = original(grid.transpose(1, 2).contiguous(), weight, bias, activation=activation)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    own: Tensor = torch.cat(outputs).index_select(0, reach.own)
    return own.transpose(0, 1)[None]


def _reach(layout: ShardLayout, left: int) -> _Reach:
    plan = partition.plan_keys(layout.padded_lengths, **layout.cut, rank=layout.rank, causal=True, left=left)
    groups = plan_groups(plan.kv_lengths.tolist(), torch.device("cpu"))
    ends = np.cumsum(plan.kv_lengths)
    own = partition.ranges(ends - plan.q_lengths, ends)
    sources = tuple(source.to(layout.device, non_blocking=True) for source in groups.sources)
    return _Reach(
        calls.needed_call(layout, causal=True, left=left).kv_index,
        Groups(sources=sources, back=groups.back),
        layout.put(groups.back.numpy()[own]),
    )
