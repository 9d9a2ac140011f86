"""Activations of one pipeline stage -> the next stage, and their gradients back.

Each direction has a separate process group, so that activations never wait for gradients. Sends do not wait,
and receives may be posted ahead. Messages need no tag, because they arrive in the order of the schedule, and
no shape, because every stage knows the slots of each microbatch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_thd.parallel.exchange import local

Direction: TypeAlias = Literal["down", "up"]

# The dtypes of hidden states. Before its first message, a rank sends the next one the index of their dtype in
# this tuple, and the length of the tuples that layers return.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FAILED = -1  # in place of an index: there will be no message


class StageBeforeFailed(RuntimeError):
    """An earlier stage of the pipeline raised before its first message."""


@dataclass(slots=True)
class Channel:
    """Point-to-point messages between a rank and its neighbours in the pipeline."""

    down: dist.ProcessGroup  # the pipeline's ranks, for activations
    up: dist.ProcessGroup  # another group of the same ranks, for gradients
    # With several stages per rank, two more such groups, for messages between the last rank and the first. On
    # one NCCL communicator, messages in opposite directions would wait for each other.
    wraps: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    fixed_dtype: torch.dtype | None = None  # the messages' dtype; None until this rank knows it
    # Length of the tuples that layers return; 0 for no tuple. None until this rank knows it: the first rank
    # learns it from its first layer, the others with the dtype.
    tuple_length: int | None = None
    owes_form: bool = field(init=False)  # whether the next rank still waits for dtype and length
    waited_s: float = 0.0  # the CPU's wait for messages; about 0 under CUDA, where only the GPU waits
    _sent: deque[tuple[Any, Tensor]] = field(default_factory=deque)  # sends under way, and their data
    _posted: dict[Direction, deque[tuple[Any, Tensor]]] = field(
        default_factory=lambda: {"down": deque(), "up": deque()}
    )

    def __post_init__(self) -> None:
        self.owes_form = self.fixed_dtype is None

    @property
    def rank(self) -> int:
        """Return this rank's index in the pipeline, from 0."""
        return self.down.rank()

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the pipeline."""
        return self.down.size()

    def meet(self, device: torch.device) -> None:
        """Create all communicators in one order on all ranks, because NCCL's first use waits for the peer."""
        if device.type == "cpu":
            return
        token = torch.zeros(1, device=device)
        before = self._peer("down", -1)
        behind = self._peer("down", 1)
        wraps = self.wraps or ()
        for group in (self.down, self.up, *wraps):
            dist.all_reduce(token, group=group)

        # NCCL has a communicator of its own for each pair of ranks. The token goes from rank to rank.
        for group in (self.down, self.up):
            if self.rank > 0:
                dist.recv(token, before, group=group)
            if self.rank < self.ranks - 1:
                dist.send(token, behind, group=group)
        for group in wraps:
            if self.rank == self.ranks - 1:
                dist.send(token, behind, group=group)
            elif self.rank == 0:
                dist.recv(token, before, group=group)

    def send(self, tensor: Tensor, direction: Direction) -> None:
        """Send a tensor to the next rank in a direction without waiting, and keep it until it is sent."""
        if direction == "down":
            self._check_dtype(tensor)
            self._send_form(_DTYPES.index(tensor.dtype), tensor.device)
        data = tensor.detach().contiguous()
        group = self._group(direction, wraps=self.rank == self._end(direction))
        work = dist.isend(data, self._peer(direction, 1), group=group)
        self._sent.append((work, data))
        while self._sent:
            oldest, _ = self._sent[0]
            if not oldest.is_completed():
                break
            self._sent.popleft()

    def post(self, shape: torch.Size, device: torch.device, direction: Direction) -> None:
        """Begin to receive the next message of a direction without waiting for it."""
        buffer = torch.empty(shape, dtype=self.dtype(device), device=device)
        first = self.ranks - 1 - self._end(direction)
        group = self._group(direction, wraps=self.rank == first)
        work = dist.irecv(buffer, self._peer(direction, -1), group=group)
        self._posted[direction].append((work, buffer))

    def receive(self, shape: torch.Size, device: torch.device, direction: Direction) -> Tensor:
        """Wait for the next message: ``down`` from the stage before, ``up`` (gradients) from the next."""
        if not self._posted[direction]:
            self.post(shape, device, direction)
        work, buffer = self._posted[direction].popleft()
        started = time.perf_counter()
        work.wait()
        self.waited_s += time.perf_counter() - started
        assert buffer.shape == shape, f"expected {tuple(shape)} {direction}, posted {tuple(buffer.shape)}"
        return buffer

    def finish(self) -> None:
        """Wait until every message of this rank has been sent."""
        while self._sent:
            work, _ = self._sent.popleft()
            work.wait()
        assert not any(self._posted.values()), "a posted message was not received"

    @property
    def is_busy(self) -> bool:
        """Return whether messages are under way, as in the middle of a step."""
        return bool(self._sent) or any(self._posted.values())

    def dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype of messages; if unknown, receive it with what layers return."""
        if self.fixed_dtype is None:
            form = torch.empty(2, dtype=torch.int64, device=device)
            dist.recv(form, self._peer("down", -1), group=self.down)
            index, length = form.tolist()
            if index == _FAILED:
                raise StageBeforeFailed("An earlier pipeline stage failed in the first forward pass.")
            self.fixed_dtype = _DTYPES[index]
            self.tuple_length = length
        return self.fixed_dtype

    def fail(self, device: torch.device) -> None:
        """Tell the next rank that no message will come, if it waits for the first one."""
        self._send_form(_FAILED, device)

    def _check_dtype(self, tensor: Tensor) -> None:
        """Refuse hidden states in another dtype than those of the first message."""
        if self.fixed_dtype is None:
            self.fixed_dtype = tensor.dtype
        if tensor.dtype != self.fixed_dtype:
            raise ValueError(
                f"A pipeline stage ends in {tensor.dtype}, but the first stage ended in {self.fixed_dtype}. "
                "Use one precision for all layers, or pipeline_parallel_size=1."
            )

    def _send_form(self, index: int, device: torch.device) -> None:
        """Send the next rank the index of a dtype and what layers return, once, without waiting."""
        if not self.owes_form:
            return
        self.owes_form = False
        if self.rank + 1 < self.ranks:
            form = torch.tensor([index, self.tuple_length or 0], device=device)
            work = dist.isend(form, self._peer("down", 1), group=self.down)
            self._sent.append((work, form))

    def _group(self, direction: Direction, *, wraps: bool) -> dist.ProcessGroup:
        """Return the group of messages in a direction, ``wraps`` saying whether last and first rank talk."""
        if wraps and self.wraps is not None:
            down, up = self.wraps
        else:
            down = self.down
            up = self.up
        return down if direction == "down" else up

    def _end(self, direction: Direction) -> int:
        """Return the rank of the pipeline that messages of a direction reach last."""
        return self.ranks - 1 if direction == "down" else 0

    def _peer(self, direction: Direction, step: int) -> int:
        """Return the global rank that is ``step`` ranks further in a direction."""
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
    """Sends hidden states on and returns NaN instead of the loss, which only the last stage computes."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor, channel: Channel) -> Tensor:
        """Send hidden states to the next stage; ``anchor`` makes the result need a gradient."""
        ctx.channel = channel
        ctx.shape = hidden.shape
        ctx.device = hidden.device
        channel.send(hidden, "down")
        # A NaN can make gradients NaN. Nothing uses them, but anomaly detection would report them.
        value = 0.0 if torch.is_anomaly_enabled() else torch.nan
        return hidden.new_full((), value, dtype=torch.promote_types(hidden.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        """Receive the gradient of the hidden states, and ignore the gradient of the NaN."""
        return None, ctx.channel.receive(ctx.shape, ctx.device, "up"), None


def copy_tied(weight: nn.Parameter, channel: Channel) -> None:
    """Copy the first stage's tied weight, whole or sharded, to the last stage; both stages call this."""
    data = local(weight.detach())
    if channel.rank == 0:
        dist.send(data.contiguous(), _other_end(channel), group=channel.down)
    else:
        received = torch.empty_like(data)
        dist.recv(received, _other_end(channel), group=channel.down)
        data.copy_(received)


def sum_tied(weight: nn.Parameter, channel: Channel) -> None:
    """Sum the gradients of a tied weight's two copies, each reduced over its stage; both stages call this."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    grad = local(weight.grad)
    grad_of_other = torch.empty_like(grad)
    peer = _other_end(channel)
    exchange = [
        dist.P2POp(dist.isend, grad.contiguous(), peer, group=channel.up),
        dist.P2POp(dist.irecv, grad_of_other, peer, group=channel.up),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    grad.add_(grad_of_other)


def require_same_ends(weight: nn.Parameter | None, optimizers: Sequence[Optimizer], channel: Channel) -> None:
    """Refuse optimizers that treat the two copies of a tied weight differently; all stages call this."""
    treatments: list[Any] = [None] * channel.ranks
    dist.all_gather_object(treatments, _treatment(weight, optimizers), group=channel.down)
    first = treatments[0]
    last = treatments[-1]
    if first != last:
        raise ValueError(
            "The weight that embedding and head share is treated as (optimizer, group, options, trained) "
            f"{first} on the first pipeline stage and {last} on the last. Treat both the same."
        )


def _treatment(weight: nn.Parameter | None, optimizers: Sequence[Optimizer]) -> Any:
    """Return a weight's optimizer and group by index, the group's options and whether it is trained."""
    for i, optimizer in enumerate(optimizers):
        for k, group in enumerate(optimizer.param_groups):
            if not any(parameter is weight for parameter in group["params"]):
                continue
            options = {}
            for name, value in group.items():
                if name != "params":
                    # As text: tensors, such as a learning rate, would compare to a tensor.
                    options[name] = repr(value.tolist() if isinstance(value, Tensor) else value)
            return i, k, options, weight is not None and weight.requires_grad
    return None


def _other_end(channel: Channel) -> int:
    """Return the global rank at the other end of the pipeline; only its first and last rank call this."""
    end = channel.ranks - 1 if channel.rank == 0 else 0
    return dist.get_global_rank(channel.down, end)
