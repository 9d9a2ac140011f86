"""Sizes of a layer and the needs of a batch -> what each way of communicating costs, in bytes and seconds.

Every rank computes the same costs from values on the host, so all ranks of a group make the same choice.

Legend: N slots of a shard, H query heads, G key-value heads, D head size, E value head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_thd._checks import real_number


@dataclass(frozen=True, kw_only=True, slots=True)
class CommCosts:
    """Bandwidth, latency and kernel speed, by which ``context_parallel_communication="auto"`` chooses.

    The defaults are those of eight H100 in one node: NVLink 4 moves 450 GB/s each way (NVIDIA H100 data
    sheet); a small NCCL collective takes about 20 us; bf16 flash attention runs at some 500 TFLOP/s. Between
    nodes pass the bandwidth of one GPU: 50 GB/s with 400 Gb/s InfiniBand.

    Attributes:
        bandwidth_bytes_per_s: bytes that a rank receives from its group in a second.
        latency_s: seconds of one collective.
        flops_per_s: speed of the attention kernel.
    """

    bandwidth_bytes_per_s: float = 450e9
    latency_s: float = 20e-6
    flops_per_s: float = 500e12

    def __post_init__(self) -> None:
        for name in ("bandwidth_bytes_per_s", "flops_per_s"):
            real_number(getattr(self, name), name, above=0)
        real_number(self.latency_s, "latency_s", least=0)

    def seconds(self, received_bytes: float, *, messages: int) -> float:
        """Return the seconds of exchanges by bandwidth and latency: 1,000 bytes at 1 GB/s take 1 us."""
        return messages * self.latency_s + received_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """The heads, head sizes and dtype of a layer, which decide how many bytes it exchanges."""

    heads: int  # H
    kv_heads: int  # G
    head_size: int  # D
    value_size: int  # E
    element_bytes: int  # what one number takes

    @property
    def key_bytes(self) -> int:
        """Return the bytes of the keys and values of one slot."""
        return self.kv_heads * (self.head_size + self.value_size) * self.element_bytes

    @property
    def pair_flops(self) -> int:
        """Return the FLOPs of one query on one key, forward: ``2 H (D + E)``."""
        return 2 * self.heads * (self.head_size + self.value_size)

    def gather_bytes(self, slots: int, cp: int) -> int:
        """Return the bytes a rank receives in an all-gather of N slots a rank."""
        return (cp - 1) * slots * self.key_bytes

    def ulysses_bytes(self, slots: int, cp: int) -> int:
        """Return the bytes a rank receives when rows are traded for heads; cp must divide H."""
        kv_heads = self.kv_heads
        if kv_heads % cp:  # every rank is sent the key-value heads that its query heads need
            share, own = self.heads // kv_heads, self.heads // cp
            kv_heads = self.heads if share % own else cp
        return (
            (cp - 1)
            * slots
            * (self.heads + kv_heads)
            * (self.head_size + self.value_size)
            * self.element_bytes
        ) // cp


def cheapest_way(
    sizes: LayerSizes,
    costs: CommCosts,
    *,
    cp: int,
    slots: int,
    needed_rows: int,
    pairs: float,
    most_pairs: float,
    ulysses: bool,
) -> Literal["ulysses", "needed", "all_gather"]:
    """Return the way of communicating with which a layer's exchange and kernel take the least time."""
    needed = needed_rows * sizes.key_bytes
    even, most = (x * sizes.pair_flops / costs.flops_per_s for x in (pairs / cp, most_pairs))
    seconds: dict[Literal["ulysses", "needed", "all_gather"], float] = {
        "needed": costs.seconds(needed, messages=1 if needed else 0) + most,
        "all_gather": costs.seconds(sizes.gather_bytes(slots, cp), messages=1) + most,
    }
    if ulysses:
        seconds["ulysses"] = costs.seconds(sizes.ulysses_bytes(slots, cp), messages=4) + even
    return min(seconds, key=seconds.__getitem__)
