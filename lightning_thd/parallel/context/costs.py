"""Sizes of a layer and needed rows of a batch -> the faster of "needed" and "ulysses".

Legend: N slots of a shard, H query heads, G key-value heads, D head size, E value head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Eight H100 in one node: NVLink 4 moves 450 GB/s each way (NVIDIA H100 data sheet), a small NCCL collective
# takes about 20 us, and bf16 flash attention runs at some 500 TFLOP/s.
BYTES_PER_S = 450e9
LATENCY_S = 20e-6
FLOPS_PER_S = 500e12


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """The heads, head sizes and dtype of a layer, which decide how many bytes it exchanges."""

    heads: int  # H
    kv_heads: int  # G
    head_size: int  # D
    value_size: int  # E
    element_bytes: int  # bytes of one number

    @property
    def key_bytes(self) -> int:
        """Return the bytes of the keys and values of one slot."""
        return self.kv_heads * (self.head_size + self.value_size) * self.element_bytes

    @property
    def pair_flops(self) -> int:
        """Return the FLOPs of one query on one key, forward: ``2 H (D + E)``."""
        return 2 * self.heads * (self.head_size + self.value_size)

    def gather_bytes(self, slots: int, cp: int) -> int:
        """Return the bytes that a rank receives in an all-gather of N slots per rank."""
        return (cp - 1) * slots * self.key_bytes

    def ulysses_bytes(self, slots: int, cp: int) -> int:
        """Return the bytes that a rank receives when Ulysses exchanges rows for heads; cp must divide H."""
        kv_heads = self.kv_heads
        if kv_heads % cp:  # every rank receives the key-value heads that its query heads need
            per_kv_head = self.heads // kv_heads
            per_rank = self.heads // cp
            kv_heads = self.heads if per_kv_head % per_rank else cp
        row_bytes = (self.heads + kv_heads) * (self.head_size + self.value_size) * self.element_bytes
        return (cp - 1) * slots * row_bytes // cp


def cheapest_way(
    sizes: LayerSizes, *, cp: int, slots: int, needed_rows: int, pairs: float, most_pairs: float
) -> Literal["ulysses", "needed"]:
    """Return the faster exchange.

    All ranks have ``pairs`` query-key pairs together, which Ulysses shares out evenly. Under "needed", a rank
    has at most ``most_pairs`` of them, and receives at most ``needed_rows``.
    """
    if sizes.heads % cp:
        return "needed"

    kernel_s = (most_pairs - pairs / cp) * sizes.pair_flops / FLOPS_PER_S
    needed_s = needed_rows * sizes.key_bytes / BYTES_PER_S
    if needed_rows:
        needed_s += LATENCY_S
    # Ulysses makes four exchanges: queries, keys, values and the output.
    ulysses_s = sizes.ulysses_bytes(slots, cp) / BYTES_PER_S + 4 * LATENCY_S
    return "ulysses" if ulysses_s <= needed_s + kernel_s else "needed"
