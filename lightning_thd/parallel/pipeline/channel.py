"""Activations of one pipeline stage -> the next stage, and their gradients back.

One process group a direction, so that what goes down never waits for what goes up. Sends do not wait;
receives may be posted ahead. A message needs no tag and no shape: both sides know what comes next.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

Direction: TypeAlias = Literal["down", "up"]

# The order is part of the protocol: the index travels once when a pipeline first runs.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(slots=True)
class Traffic:
    """The number and bytes of messages that this rank has sent.

    Attributes:
        messages: number of activations and gradients.
        bytes: their size.
    """

    messages: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Channel:
    """Point-to-point messages between a rank and its neighbours in the pipeline.

    Attributes:
        down: group of the pipeline's ranks for activations.
        up: another group of the same ranks for gradients.
        wraps: a third and a fourth, for what goes from the last rank to the first with several stages a rank,
            down and up: of two ranks, messages both ways on one NCCL communicator would wait for each other.
        traffic: what was sent so far.
        waited_s: seconds this rank has waited for messages; 0 on devices that do not wait on the host.
    """

    down: dist.ProcessGroup
    up: dist.ProcessGroup
    wraps: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    traffic: Traffic = field(default_factory=Traffic)
    waited_s: float = 0.0
    _dtype: torch.dtype | None = None
    _sent: deque[tuple[Any, Tensor]] = field(default_factory=deque)
    _posted: dict[Direction, deque[tuple[Any, Tensor]]] = field(
        default_factory=lambda: {"down": deque(), "up": deque()}
    )

    @property
    def rank(self) -> int:
        """Return this rank's place in the pipeline, from 0."""
        return self.down.rank()

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the pipeline."""
        return self.down.size()

    def send(self, tensor: Tensor, direction: Direction) -> None:
        """Send a tensor to the next rank in a direction without waiting, and keep it until it is sent."""
        if direction == "down":
            self._tell_dtype(tensor)
        data = tensor.detach().contiguous()
        self.traffic.messages += 1
        self.traffic.bytes += data.numel() * data.element_size()
        group = self._group(direction, wraps=self.rank == self._end(direction))
        self._sent.append((dist.isend(data, self._peer(direction, 1), group=group), data))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def post(self, shape: torch.Size, device: torch.device, direction: Direction) -> None:
        """Begin to receive the next message from a direction without waiting for it."""
        buffer = torch.empty(shape, dtype=self.dtype(device), device=device)
        first = self.ranks - 1 - self._end(direction)
        group = self._group(direction, wraps=self.rank == first)
        work = dist.irecv(buffer, self._peer(direction, -1), group=group)
        self._posted[direction].append((work, buffer))

    def receive(self, shape: torch.Size, device: torch.device, direction: Direction) -> Tensor:
        """Wait for the next message: ``down`` of the stage before, ``up`` (gradients) of the one behind."""
        if not self._posted[direction]:
            self.post(shape, device, direction)
        work, buffer = self._posted[direction].popleft()
        started = time.perf_counter()
        work.wait()
        self.waited_s += time.perf_counter() - started
        assert buffer.shape == shape, f"expected {tuple(shape)} {direction}, posted {tuple(buffer.shape)}"
        return buffer

    def fix_dtype(self, dtype: torch.dtype) -> None:
        """Set the dtype of messages on all ranks, instead of learning it from the first message."""
        self._dtype = dtype

    def finish(self) -> None:
        """Wait until every message of this rank has been sent."""
        while self._sent:
            self._sent.popleft()[0].wait()
        assert not any(self._posted.values()), "a message was expected and not taken"

    @property
    def is_busy(self) -> bool:
        """Return whether messages are under way, as in the middle of a step."""
        return bool(self._sent) or any(self._posted.values())

    def dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype of hidden states; a rank's first call waits for the stage before to send it."""
        if self._dtype is None:
            code = torch.empty(1, dtype=torch.int64, device=device)
            dist.recv(code, self._peer("down", -1), group=self.down)
            self._dtype = _DTYPES[int(code)]
            if self.rank + 1 < self.ranks:
                dist.send(code, self._peer("down", 1), group=self.down)
        return self._dtype

    def _tell_dtype(self, tensor: Tensor) -> None:
        """Send the dtype of hidden states to later ranks, ahead of the first message."""
        if self._dtype is None:
            self._dtype = tensor.dtype
            code = torch.tensor([_DTYPES.index(tensor.dtype)], device=tensor.device)
            dist.send(code, self._peer("down", 1), group=self.down)
        elif tensor.dtype != self._dtype:
            raise ValueError(
                f"A pipeline stage ends in {tensor.dtype}, but the first one ended in {self._dtype}. Use one "
                "precision for all layers, or pipeline_parallel_size=1."
            )

    def _group(self, direction: Direction, *, wraps: bool) -> dist.ProcessGroup:
        if wraps and self.wraps is not None:
            return self.wraps[direction == "up"]
        return self.down if direction == "down" else self.up

    def _end(self, direction: Direction) -> int:
        """Return the last rank of the pipeline in a direction."""
        return self.ranks - 1 if direction == "down" else 0

    def _peer(self, direction: Direction, step: int) -> int:
        """Return the global rank that lies ``step`` places further in a direction."""
        along = step if direction == "down" else -step
        return dist.get_global_rank(self.down, (self.rank + along) % self.ranks)


class Receive(torch.autograd.Function):
    """Receives hidden states of the stage before, and sends their gradient back."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, channel: Channel, shape: torch.Size) -> Tensor:
        """Receive the hidden states; ``anchor`` only ties them to the autograd graph."""
        ctx.channel = channel
        return channel.receive(shape, anchor.device, "down")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        """Send the gradient of the hidden states to the stage before."""
        ctx.channel.send(grads[0], "up")
        return None, None, None


class Send(torch.autograd.Function):
    """Sends hidden states on and returns NaN for the loss; its gradient comes from the next stage.

    Only the last stage has the loss: whatever is made of this one, a metric say, is seen not to be a number.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor, channel: Channel) -> Tensor:
        """Send hidden states to the next stage; ``anchor`` lets the loss have a gradient in any case."""
        ctx.channel, ctx.shape, ctx.device = channel, hidden.shape, hidden.device
        channel.send(hidden, "down")
        # Anomaly detection would look for what made the gradient of a loss of it NaN, which nobody uses.
        value = 0.0 if torch.is_anomaly_enabled() else torch.nan
        return hidden.new_full((), value, dtype=torch.promote_types(hidden.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        """Receive the gradient of the hidden states, ignoring that of the NaN."""
        return None, ctx.channel.receive(ctx.shape, ctx.device, "up"), None
