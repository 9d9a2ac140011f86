"""Sizes of a layer and the needs of a batch -> what each way of communicating costs, in bytes and seconds.

Every rank computes the same costs from values on the host, so all ranks of a group make the same choice.

Legend: N slots of a shard, H query heads, G key-value heads, D head size, E value head size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

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
        gathered_bytes: most bytes of other ranks' keys and values that a rank may hold at once. If every
            other exchange needs more, attention uses the ring. None sets no limit.
    """

    bandwidth_bytes_per_s: float = 450e9
    latency_s: float = 20e-6
    flops_per_s: float = 500e12
    gathered_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("bandwidth_bytes_per_s", "flops_per_s"):
            real_number(getattr(self, name), name, above=0)
        real_number(self.latency_s, "latency_s", least=0)
        if self.gathered_bytes is not None:
            real_number(self.gathered_bytes, "gathered_bytes", above=0)

    def seconds(self, received_bytes: float, *, messages: int) -> float:
        """Return the seconds of exchanges by bandwidth and latency: 1,000 bytes at 1 GB/s take 1 us."""
        return messages * self.latency_s + received_bytes / self.bandwidth_bytes_per_s

    @classmethod
    def measure(
        cls, group: dist.ProcessGroup, device: torch.device, *, clock: Clock | None = None
    ) -> CommCosts:
        """Time a small and a 16 MiB all-to-all of the group; a collective of the whole job."""
        read = time.perf_counter if clock is None else clock
        small, large = (_time_exchange(group, device, size, read) for size in (_SMALL_BYTES, _LARGE_BYTES))
        slowest = torch.tensor([small, large], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        latency, total = slowest.tolist()
        moved = (_LARGE_BYTES - _SMALL_BYTES) * (group.size() - 1) / group.size()
        return cls(latency_s=latency, bandwidth_bytes_per_s=moved / max(total - latency, moved / _FASTEST))


Clock = Callable[[], float]

_SMALL_BYTES, _LARGE_BYTES = 1 << 12, 1 << 24
_FASTEST = 1e13  # bytes/s: no link is faster, but a clock may be too coarse to see any time pass
_ROUNDS = 5


def _time_exchange(group: dist.ProcessGroup, device: torch.device, size: int, clock: Clock) -> float:
    sent = torch.zeros(size // group.size() * group.size(), dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    taken = []
    for _ in range(_ROUNDS):
        _finish(device)
        begin = clock()
        dist.all_to_all_single(received, sent, group=group)
        _finish(device)
        taken.append(clock() - begin)
    return min(taken)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """The heads, head sizes and dtype of a layer, which decide how many bytes it exchanges.

    Attributes:
        heads: query heads H.
        kv_heads: key-value heads G.
        head_size: D.
        value_size: E.
        element_bytes: of one number.
    """

    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    element_bytes: int

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A way of communicating, with its cost for one layer's forward pass.

    Attributes:
        name: ``ulysses``, ``needed``, ``all_gather`` or ``ring``.
        received_bytes: bytes of the rank that receives or sends most.
        exchange_s: seconds of the exchange.
        kernel_s: seconds of the rank whose kernel has most work.
        held_bytes: bytes of other ranks' keys and values that a rank holds at once.
    """

    name: str
    received_bytes: int
    exchange_s: float
    kernel_s: float
    held_bytes: int

    @property
    def seconds(self) -> float:
        """Return the seconds of the layer's attention; a ring's exchange overlaps its kernel."""
        if self.name == "ring":
            return max(self.exchange_s, self.kernel_s)
        return self.exchange_s + self.kernel_s


def compare_ways(
    sizes: LayerSizes,
    costs: CommCosts,
    *,
    cp: int,
    slots: int,
    needed_rows: int,
    pairs: float,
    most_pairs: float,
    ulysses: bool,
    ring: bool,
) -> list[Choice]:
    """Compute the cost of each way of communicating that a layer may use, cheapest first."""
    needed = needed_rows * sizes.key_bytes
    gathered, traded = sizes.gather_bytes(slots, cp), sizes.ulysses_bytes(slots, cp) if ulysses else 0
    even, most = (x * sizes.pair_flops / costs.flops_per_s for x in (pairs / cp, most_pairs))

    def way(name: str, received: int, messages: int, kernel_s: float, held: int) -> Choice:
        exchange_s = costs.seconds(received, messages=messages)
        return Choice(
            name=name, received_bytes=received, exchange_s=exchange_s, kernel_s=kernel_s, held_bytes=held
        )

    ways = [way("ulysses", traded, 4, even, traded)] if ulysses else []
    ways.append(way("needed", needed, 1 if needed else 0, most, needed))
    ways.append(way("all_gather", gathered, 1, most, gathered))
    limit = costs.gathered_bytes
    fitting = [one for one in ways if limit is None or one.held_bytes <= limit]
    if ring and not fitting:
        fitting.append(way("ring", needed, cp - 1, most, 2 * min(needed, slots * sizes.key_bytes)))
    if fitting:
        return sorted(fitting, key=lambda one: one.seconds)
    return sorted(ways, key=lambda one: one.held_bytes)
