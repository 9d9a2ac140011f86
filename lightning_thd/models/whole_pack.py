"""A state-space or convolution layer on one rank's shard -> its output, as if the rank held the whole pack.

State runs along a sequence from rank to rank. Where a layer's kernels give no state to pass on (``passing``
has the others), the inputs of all ranks are gathered, every rank runs the layer on the whole pack and keeps
its slots: exact, for any layer, at cp times its arithmetic and activations.

Legend: T slots in a pack, N = T / cp slots of a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_thd.models.pack import Pack, Scope, current_scope, scoped
from lightning_thd.parallel.context import traffic
from lightning_thd.parallel.context.layout import ShardLayout
from lightning_thd.parallel.shard import gather_pack


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_on_pack(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], layout: ShardLayout
) -> Any:
    """Call a layer on the whole pack, ``[1, N, ...]`` gathered, and keep this rank's slots of its tensors."""
    scope = current_scope()
    assert scope is not None

    def gather(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(gather, value))
        if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[:2] != (1, layout.local_slots):
            return value
        traffic.count(value.nbytes * (layout.cp - 1), "gathered")
        if value.dtype == torch.bool or not value.is_floating_point():
            return gather_pack(value[0].to(torch.int64), layout).to(value.dtype)[None]
        return gather_pack(value[0], layout)[None]

    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(cut, value))
        if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[:2] != (1, layout.slots):
            return value
        return value.index_select(1, layout.own)

    pack = layout.once("pack", lambda: _whole_pack(layout))
    whole = Scope(pack, scope.outer, module=scope.module, families=scope.families, masks=scope.masks)
    with scoped(whole):
        return cut(function(*map(gather, args), **{name: gather(value) for name, value in kwargs.items()}))


def _whole_pack(layout: ShardLayout) -> Pack:
    return Pack(
        cu_seqlens_q=layout.pack_offsets,
        max_length_q=max(1, *layout.padded_lengths),
        slots=layout.slots,
        lengths=layout.padded_lengths,
    )
