"""A user's dataloader -> the same, checked for each rank's data, or read by one rank for its peers."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import IterableDataset

_HEADER = 16  # bytes: length of the message, whether it is the last, both little-endian int64


def set_data_rank(dataloader: object, rank: int, size: int, peers: int) -> None:
    """Set which part of the data an iterable dataset reads on this rank.

    A dataset with the attributes ``data_rank`` and ``data_size`` is given them. Where ranks share data and
    must read the same, one cut by ``datasets.distributed.split_dataset_by_node`` is checked, and any other
    refused.

    Raises:
        MisconfigurationException: when the dataset can be told nothing.
    """
    dataset: Any = getattr(dataloader, "dataset", None)
    if not isinstance(dataset, IterableDataset):
        return
    if hasattr(dataset, "data_rank") and hasattr(dataset, "data_size"):
        dataset.data_rank, dataset.data_size = rank, size
        return
    if peers == 1:  # each rank its own, as under any strategy
        return
    split = getattr(dataset, "_distributed", None)  # datasets.IterableDataset
    if split is not None and (split.rank, split.world_size) == (rank, size):
        return
    found = "" if split is None else f" It reads part {split.rank} of {split.world_size}."
    raise MisconfigurationException(
        f"{type(dataset).__name__} is iterable and does not say which part of the data it reads, but "
        f"{peers} ranks share each pack and must read the same.{found} Give it attributes data_rank and "
        f"data_size (set to {rank} and {size} here before it is read), split it by "
        "strategy.distributed_sampler_kwargs, or let one rank read for its peers with broadcast_data=True."
    )


class BroadcastLoader:
    """Iterates a dataloader on the first rank of a group and hands every batch to the others.

    One message a batch, tokens and all metadata, into a buffer that grows to the largest batch so far; only
    a batch that grows it takes a second message.

    Args:
        dataloader: iterated on the first rank of ``group`` alone.
        group: ranks that share data.
        device: where the group's backend communicates.
    """

    def __init__(self, dataloader: Any, group: dist.ProcessGroup, device: torch.device) -> None:
        self._dataloader, self._group, self._device = dataloader, group, device
        self._source = dist.get_global_rank(group, 0)
        self._buffer = torch.zeros(1 << 16, dtype=torch.uint8, device=device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dataloader":
            raise AttributeError(name)
        return getattr(self._dataloader, name)

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator[Any]:
        if self._group.rank() != 0:
            while True:
                last, batch = self._receive()
                if last:
                    return
                yield batch
        for batch in self._dataloader:
            self._send(batch, last=False)
            yield batch
        self._send(None, last=True)

    def _send(self, batch: Any, *, last: bool) -> None:
        payload = pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL)
        header = len(payload).to_bytes(8, "little") + int(last).to_bytes(8, "little")
        message = torch.frombuffer(bytearray(header + payload), dtype=torch.uint8).to(self._device)
        room = len(self._buffer)
        head = message[:room]
        self._buffer[: len(head)] = head
        dist.broadcast(self._buffer, self._source, group=self._group)
        if len(message) > room:
            dist.broadcast(message, self._source, group=self._group)
            self._buffer = torch.zeros_like(message)

    def _receive(self) -> tuple[bool, Any]:
        dist.broadcast(self._buffer, self._source, group=self._group)
        header = self._bytes(self._buffer[:_HEADER])
        length, last = int.from_bytes(header[:8], "little"), bool(int.from_bytes(header[8:], "little"))
        message = self._buffer[: _HEADER + length]
        if _HEADER + length > len(self._buffer):
            message = torch.empty(_HEADER + length, dtype=torch.uint8, device=self._device)
            dist.broadcast(message, self._source, group=self._group)
            self._buffer = torch.zeros_like(message)
        return last, pickle.loads(self._bytes(message[_HEADER:]))

    @staticmethod
    def _bytes(tensor: Tensor) -> bytes:
        return tensor.cpu().numpy().tobytes()
