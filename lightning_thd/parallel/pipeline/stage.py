"""A Hugging Face decoder -> the same decoder with the layers of one rank, and boundaries in place of others.

The model's own ``forward`` runs on every rank, over all of its layers: those of other ranks are boundaries
that let hidden states pass. The boundary before the first layer of a stage receives them, the one behind its
last layer sends them. What stands before the first layer is the first stage's alone; elsewhere it gives NaN,
which the boundary replaces, so that anything of it that got past the boundary would be seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_thd.parallel.pipeline.channel import Channel, Receive, Send
from lightning_thd.parallel.pipeline.schedule import Op
from lightning_thd.parallel.pipeline.split import Split
from lightning_thd.parallel.pipeline.where import user_line

if TYPE_CHECKING:
    from lightning_thd.parallel.pipeline.balance import Balance

_ATTRIBUTE = "_thd_pipeline_stage"


def stage_of(model: object) -> Stage | None:
    """Return the ``Stage`` of a model that was cut by depth, or None."""
    return getattr(model, "__dict__", {}).get(_ATTRIBUTE)


class Stage:
    """The layers that one rank holds of a model, and those that take part in the running pass.

    Args:
        split: who holds what.
        channel: to the ranks before and behind.
        whole: the model before it was cut, without memory.
        draws: whether layers drop anything, and so draw random numbers.

    Attributes:
        active: chunk of the running pass; None between steps.
        tail: what a stage without the head has sent in the running pass.
        tied: on the first and last rank, its copy of a weight that embedding and head share.
        tied_names: on the last rank, the head's name of that weight to the embedding's.
        held: the layers of this rank, by their names.
        balance: of a mixture of experts whose loss balances the routers of all layers.
        device: of the hidden states that were last seen.
        made: nodes of the running pass's graph that its loss, or what stands for it, ends in.
        in_layers: whether the running pass has come to the layers.
    """

    def __init__(
        self, split: Split, channel: Channel, whole: nn.Module | None = None, *, draws: bool = False
    ) -> None:
        self.split, self.channel = split, channel
        self.whole, self.draws = whole, draws
        self.active: int | None = None
        self.tail: Tensor | None = None
        self.tied: nn.Parameter | None = None
        self.tied_names: Mapping[str, str] = MappingProxyType({})
        self.held: Mapping[str, nn.Module] = MappingProxyType({})
        self.balance: Balance | None = None
        self.device: torch.device | None = None
        self.made: list[Any] = []
        self.in_layers = False
        self._calls: list[str] = []
        self._received: Tensor | None = None
        self._is_again = False
        self._width: int | None = None
        self._last = split.ranks * self.chunks - 1
        self._chunk_of = {
            layer: chunk for chunk in range(self.chunks) for layer in split.layers(self._stage(chunk))
        }

    @property
    def chunks(self) -> int:
        """Return the number of stages on this rank."""
        return self.split.stages // self.split.ranks

    @property
    def layers(self) -> list[int]:
        """Return the indices of the layers that this rank holds."""
        return sorted(self._chunk_of)

    @property
    def holds_embedding(self) -> bool:
        """Return whether the running pass begins with the embedding on this rank."""
        return self.channel.rank == 0 and self.active in (None, 0)

    @property
    def has_stage_before(self) -> bool:
        """Return whether the running pass begins with hidden states from another rank."""
        return self._stage(self.active or 0) > 0

    @property
    def holds_head(self) -> bool:
        """Return whether the running pass ends with the head on this rank."""
        return self.channel.rank == self.split.ranks - 1 and self.active in (None, self.chunks - 1)

    def begin(self, chunk: int | None) -> None:
        """Begin a forward pass through one chunk, or through all (None) without gradients."""
        self.active, self.tail, self._calls, self.made = chunk, None, [], []
        self._received, self._is_again, self.in_layers = None, False, False
        if self.balance is not None:
            self.balance.received = None

    def require_idle(self) -> None:
        """Raise if an earlier step was broken off, as its messages may still be under way.

        Raises:
            ValueError: saying what to do.
        """
        if self.active is not None or self.channel.is_busy:
            raise ValueError(
                "The model was cut for a pipeline and its last step was broken off, so messages between "
                "stages may be left of it. Start the job anew and resume from a checkpoint."
            )

    def again(self) -> bool:
        """Return whether this rank repeats a call whose head failed, and count both calls as one.

        With gradients only the head does, on the hidden states that it got already: messages that were
        posted ahead know of no second call. Without, all stages do.
        """
        if torch.is_grad_enabled() and not self.holds_head:
            return False
        self._calls.pop()
        self._is_again = True
        return True

    def require_one_call(self, step: str = "training_step") -> None:
        """Raise unless a step called the model exactly once, as other stages expect one message.

        Raises:
            ValueError: naming the lines of the calls.
        """
        if len(self._calls) != 1:
            lines = "".join(f"\n  {line}" for line in self._calls) or f"\n  {step}"
            raise ValueError(
                f"training_step computed {len(self._calls)} losses of the model for a microbatch; pipeline "
                "stages run one. Call causal_lm_loss(self.model, batch) exactly once, or set "
                f"pipeline_parallel_size=1.{lines}"
            )
        self._received = None

    def modules_of(self, chunk: int) -> Iterator[nn.Module]:
        """Yield all modules of a chunk's layers, the layers included."""
        for name, layer in self.held.items():
            if self._chunk_of[int(name)] == chunk:
                yield from layer.modules()

    def runs(self, layer: int) -> bool:
        """Return whether a layer takes part in the running pass on this rank."""
        chunk = self._chunk_of.get(layer)
        return chunk is not None and self.active in (None, chunk)

    def cross(self, index: int, hidden: Tensor) -> Tensor:
        """Cross a stage boundary: send one layer's output ``[1, T, H]``, receive the next one's input."""
        self.device = hidden.device
        if index and self.runs(index - 1):
            self._width = hidden.shape[-1]
            if torch.is_grad_enabled():
                self.tail = Send.apply(_anchor(hidden), hidden, self.channel)  # type: ignore[no-untyped-call]
                hidden = hidden.detach()
            else:
                self.channel.send(hidden, "down")
        if self.runs(index + 1):
            hidden = self._receive(hidden)
        return hidden

    def stand_in(self, size: int, hidden: Tensor) -> Tensor:
        """Return ``[size]`` values that a rank without the head uses in place of those the head computed.

        While gradients are wanted these are NaN that lead back through this rank's layers; without
        gradients, the values themselves, one broadcast.
        """
        self._calls.append(user_line())
        if torch.is_grad_enabled():
            assert self.tail is not None
            tail, self.tail = self.tail, None
            self.made.append(tail.grad_fn)
            return tail.expand(size)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return self.broadcast(torch.empty(size, dtype=dtype, device=hidden.device))

    def share(self, values: Tensor) -> Tensor:
        """Broadcast values ``[n]`` that the head computed and return them, when no gradients are wanted."""
        self._calls.append(user_line())
        if torch.is_grad_enabled():
            self.made.append(values.grad_fn)
            return values
        return self.broadcast(values.contiguous())

    def share_logits(self, head: nn.Module, args: tuple[Any, ...], logits: Tensor) -> None:
        """Broadcast the head's logits in prediction and evaluation; a forward hook."""
        if not torch.is_grad_enabled() and type(logits) is Tensor:  # losses make no logits, and share values
            self.broadcast(logits.contiguous())

    def broadcast(self, values: Tensor) -> Tensor:
        """Broadcast ``values`` from the last stage to every rank of the pipeline."""
        source = dist.get_global_rank(self.channel.down, self.split.ranks - 1)
        dist.broadcast(values, source, group=self.channel.down)
        self.channel.finish()
        return values

    def expect(self, op: Op, slots: int, device: torch.device) -> None:
        """Begin to receive the message that a coming pass needs, while another pass runs."""
        stage = self._stage(op.chunk)
        waits = stage > 0 if op.forward else stage < self._last
        if waits and self._width is not None:
            shape = torch.Size((1, slots, self._width))
            self.channel.post(shape, device, "down" if op.forward else "up")

    def _receive(self, like: Tensor) -> Tensor:
        self._width = like.shape[-1]
        if torch.is_grad_enabled():
            if self._received is None or not self._is_again:
                self._received = Receive.apply(_anchor(like), self.channel, like.shape)  # type: ignore[no-untyped-call]
            assert self._received is not None
            return self._received
        return self.channel.receive(like.shape, like.device, "down")

    def _stage(self, chunk: int) -> int:
        return chunk * self.split.ranks + self.channel.rank


def _anchor(like: Tensor) -> Tensor:
    return torch.zeros((), device=like.device, requires_grad=True)
