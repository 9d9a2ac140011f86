"""A Hugging Face decoder -> the same decoder with one rank's layers, and boundaries instead of other layers.

The model's own ``forward`` runs on every rank. The boundary before the first layer of a stage receives hidden
states ``[1, T, H]`` (T slots, width H), and the boundary after the stage's last layer sends them. On all
stages but the first, the embedding returns NaN, which the receiving boundary replaces. If layers get another
input computed from the embedding, ``require_own_inputs`` finds the NaN in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_thd._pages import see
from lightning_thd._user_code import user_line
from lightning_thd.parallel.draws import draw_from_own_stream, draw_number
from lightning_thd.parallel.pipeline.channel import Channel, Receive, Send
from lightning_thd.parallel.pipeline.schedule import Op
from lightning_thd.parallel.pipeline.seam import Seam
from lightning_thd.parallel.pipeline.split import Split

if TYPE_CHECKING:
    from lightning_thd.parallel.routers import RouterRelay

STAGE = "_thd_pipeline_stage"


def stage_of(model: object) -> Stage | None:
    """Return the ``Stage`` of a model that was cut by depth, or None."""
    return getattr(model, "__dict__", {}).get(STAGE)


class Stage:
    """The layers of a rank, in one or several stages ("chunks"), and the state of the running pass."""

    def __init__(
        self, split: Split, channel: Channel, whole: nn.Module | None = None, *, draws: bool = False
    ) -> None:
        self.split = split
        self.channel = channel
        self.whole = whole  # the whole model on the meta device, for counting FLOPs
        self.draws = draws  # whether layers draw random numbers
        self.active: int | None = None  # chunk of the running pass; None without gradients and between steps

        self.tail: Tensor | None = None  # result of ``Send`` in the running pass, on stages without the head
        self.tied: nn.Parameter | None = None  # this end's copy of a weight that embedding and head share
        self.tied_names: Mapping[str, str] = MappingProxyType({})  # the head's name -> the embedding's name
        self.stack: StageLayers | None = None  # holds this rank's layers, once the model is cut
        self.balance: RouterRelay | None = None  # for experts: adds up the router sums of all layers
        self.device: torch.device | None = None  # device of the last hidden states

        self.seam = Seam()  # between the model and training_step, in the running pass
        self.in_layers = False  # whether the running pass has reached the layers
        self.in_loss = False  # whether the running pass computes a loss in place of the logits
        self._calls: list[str] = []  # the user's lines that computed a loss in the running pass
        self._received: Tensor | None = None  # hidden states of the running pass from the stage before
        self._is_again = False  # whether the running pass calls the model a second time

        self._width: int | None = None  # H, once a pass has run
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
    def held(self) -> dict[str, nn.Module]:
        """Return this rank's layers by name, as they are now: wrappers may have replaced them."""
        return {} if self.stack is None else dict(self.stack.named_children())

    @property
    def is_on_last_rank(self) -> bool:
        """Return whether this rank is the last of the pipeline, which holds the head."""
        return self.channel.rank == self.split.ranks - 1

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
        return self.is_on_last_rank and self.active in (None, self.chunks - 1)

    def begin(self, chunk: int | None) -> None:
        """Begin a forward pass through one chunk, or through all (None) without gradients."""
        self.active = chunk
        self.in_layers = False
        self.seam = Seam()
        self.tail = None
        self._calls = []
        self._received = None
        self._is_again = False
        if self.balance is not None:
            self.balance.received = None

    def fail(self, device: torch.device) -> None:
        """Let the next stage end its pass, which waits for hidden states that this stage will not compute."""
        self.channel.fail(device)
        # Behind a rank's first stage, the next rank knows the form already, and waits for the numbers.
        is_behind = self.active is not None and self.active > 0
        if is_behind and self._received is not None and self.tail is None and not self.holds_head:
            self.channel.send(torch.full_like(self._received, torch.nan), "down")

    def require_idle(self) -> None:
        """Raise if an earlier step was interrupted, because its messages may not have arrived yet."""
        if self.active is not None or self.channel.is_busy:
            raise ValueError(
                "The model was cut for a pipeline and its last step was broken off. Start a new job, and "
                "resume from a checkpoint."
            )

    def again(self) -> bool:
        """Return whether this rank repeats a call of the model for a loss; count both calls as one."""
        # With gradients, only the rank with the head repeats it, on the hidden states that it has received.
        if torch.is_grad_enabled() and not self.holds_head:
            return False
        self._calls.pop()
        self._is_again = True
        return True

    def require_one_call(self, step: str = "training_step") -> None:
        """Raise unless the running pass computed exactly one loss: other stages expect one message."""
        if len(self._calls) != 1:
            lines = "".join(f"\n  {line}" for line in self._calls) or f"\n  {step}"
            raise ValueError(
                f"training_step computed {len(self._calls)} losses of the model for a microbatch; pipeline "
                f"stages run one. Call causal_lm_loss(self.model, batch) exactly once.{lines}"
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
        """Send hidden states ``[1, T, H]`` if layer index - 1 ran here; receive if index + 1 runs here."""
        self.device = hidden.device
        if index and self.runs(index - 1):
            self._width = hidden.shape[-1]
            if torch.is_grad_enabled():
                self.tail = Send.apply(_anchor(hidden), hidden, self.channel)  # type: ignore[no-untyped-call]
                # The way back goes through the loss, which depends on ``tail``, not through what follows.
                hidden = hidden.detach()
            else:
                self.channel.send(hidden, "down")
        if self.runs(index + 1):
            hidden = self._receive(hidden)
        return hidden

    def stand_in(self, size: int, hidden: Tensor) -> Tensor:
        """Return ``[size]`` values without the head: NaN with gradients, else the last stage's values."""
        self._calls.append(user_line())
        if torch.is_grad_enabled():
            assert self.tail is not None
            values = self.tail.expand(size)
            self.tail = None
            return values
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return self.broadcast(torch.empty(size, dtype=dtype, device=hidden.device))

    def share(self, values: Tensor) -> Tensor:
        """Return values ``[n]`` that the head computed; broadcast them first if there are no gradients."""
        self._calls.append(user_line())
        return values if torch.is_grad_enabled() else self.broadcast(values.contiguous())

    def share_logits(self, head: nn.Module, args: tuple[Any, ...], logits: Tensor) -> None:
        """Broadcast the head's logits in prediction and evaluation; a forward hook."""
        if not torch.is_grad_enabled() and not self.in_loss:  # a loss shares its values
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
        is_sent_a_message = stage > 0 if op.forward else stage < self._last
        if is_sent_a_message and self._width is not None:
            shape = torch.Size((1, slots, self._width))
            self.channel.post(shape, device, "down" if op.forward else "up")

    def _receive(self, like: Tensor) -> Tensor:
        """Return the hidden states of the stage before; a repeated call gets those of the first."""
        self._width = like.shape[-1]
        if not torch.is_grad_enabled():
            return self.channel.receive(like.shape, like.device, "down")
        if self._received is None or not self._is_again:
            self._received = Receive.apply(_anchor(like), self.channel, like.shape)  # type: ignore[no-untyped-call]
        assert self._received is not None
        return self._received

    def _stage(self, chunk: int) -> int:
        """Return the index of one of this rank's stages in the whole pipeline."""
        return chunk * self.split.ranks + self.channel.rank


def _anchor(like: Tensor) -> Tensor:
    """Return a scalar that needs a gradient, without which autograd would record no node."""
    return torch.zeros((), device=like.device, requires_grad=True)


class StageLayers(nn.ModuleList):
    """The layers of one rank under their names in the whole model, with boundaries for other layers."""

    def __init__(self, layers: nn.ModuleList, stage: Stage) -> None:
        super().__init__()
        self._stage = stage
        # In a tuple, boundaries are no submodules: ``named_modules`` lists only the layers of this rank.
        self._boundaries = tuple(Boundary(layer, i, stage) for i, layer in enumerate(layers))
        for i in stage.layers:
            self.add_module(str(i), layers[i])
            layers[i].register_forward_hook(self._require_same_form)
            if stage.draws:
                draw_from_own_stream(layers[i], i)
        stage.stack = self

    def __len__(self) -> int:
        return len(self._boundaries)

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        place = range(len(self))[index]  # an index below 0 counts from the end
        return getattr(self, str(place)) if self._stage.runs(place) else self._boundaries[place]

    def _require_same_form(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Refuse a layer's output that boundaries cannot return in its place; a forward hook."""
        self._stage.in_layers = True
        is_tuple = isinstance(output, tuple)
        first, *rest = output if is_tuple else (output,)
        if not isinstance(first, Tensor) or any(value is not None for value in rest):
            form = ", ".join(type(value).__name__ for value in (first, *rest))
            if is_tuple:
                form = f"{type(output).__name__} of {form}"
            raise ValueError(
                f"{type(layer).__name__} returns a {form}; wanted only the hidden states, because other "
                "values would not reach the next pipeline stage. Set pipeline_parallel_size=1."
            )

        channel = self._stage.channel
        length = len(output) if is_tuple else 0
        if channel.tuple_length is None:  # the first layer of the first rank
            channel.tuple_length = length
        elif length != channel.tuple_length:
            raise ValueError(
                f"{type(layer).__name__} returns {_form(length)}, but the first layer returns "
                f"{_form(channel.tuple_length)}. Pipeline stages need one form for all layers. Set "
                "pipeline_parallel_size=1."
            )


def _form(length: int) -> str:
    """Describe what a layer returns."""
    return f"a tuple of {length}" if length else "a tensor"


class Boundary(nn.Module):
    """Replaces a layer in passes in which this rank does not run it."""

    def __init__(self, layer: nn.Module, index: int, stage: Stage) -> None:
        super().__init__()
        for name, value in vars(layer).items():  # such as attention_type, which models read
            if isinstance(value, str | int | float | bool) and not name.startswith("_"):
                setattr(self, name, value)
        self._index = index
        self._stage = stage
        self._checked = False

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor | None, ...]:
        """Pass hidden states on, and exchange them with another stage if a stage begins or ends here."""
        self._stage.in_layers = True
        if self._stage.draws:
            draw_number()
        hidden = args[0] if args else kwargs.pop("hidden_states")
        if not self._checked:
            other_inputs: dict[Any, Any] = dict(enumerate(args[1:], start=1))
            other_inputs.update(kwargs)
            require_own_inputs(self._index, other_inputs)
            self._checked = True
        crossed = self._stage.cross(self._index, hidden)
        length = self._stage.channel.tuple_length
        assert length is not None, "hidden states moved before any layer or message said what layers return"
        return (crossed, *[None] * (length - 1)) if length else crossed


def require_own_inputs(index: int, inputs: dict[Any, Any]) -> None:
    """Refuse layers that need an input computed from the embedding, which is NaN on other stages."""
    for name, value in inputs.items():
        for part in value if isinstance(value, tuple | list) else (value,):
            if not isinstance(part, Tensor) or not part.is_floating_point():
                continue
            if part.requires_grad or bool(torch.isnan(part).any()):
                raise ValueError(
                    f"Layer {index} is given {name!r}, which is computed from the embedding; only the first "
                    "pipeline stage has it. Set pipeline_parallel_size=1 for this model."
                )


class NoEmbedding(nn.Module):
    """Replaces the embedding on stages without it; returns NaN of the right shape."""

    def __init__(self, embedding: nn.Module, stage: Stage) -> None:
        super().__init__()
        self.embedding_dim: int = getattr(embedding, "embedding_dim", 0)
        self._stage = stage

    @property
    def weight(self) -> Tensor:
        """Return an empty tensor on the device of this stage's layers; Llama 4 moves ids to that device."""
        weights = (weight for layer in self._stage.held.values() for weight in layer.parameters())
        one = next(weights)
        return torch.empty(0, self.embedding_dim, device=one.device, dtype=one.dtype)

    def forward(self, ids: Tensor | torch.Size, *args: Any, **kwargs: Any) -> Tensor:
        """Return NaN ``[..., T, H]`` in the dtype of hidden states, for ids or for their shape."""
        if isinstance(ids, Tensor):
            shape = ids.shape
            device = ids.device
        else:
            shape = ids
            device = self.weight.device
        dtype = self._stage.channel.dtype(device)
        return torch.full((*shape, self.embedding_dim), torch.nan, dtype=dtype, device=device)


class PassThrough(nn.Module):
    """Replaces modules after the layers, such as the last norm, on stages without them."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the hidden states unchanged."""
        return hidden


class NoHead(nn.Module):
    """Replaces the head on stages without it; losses of ``lightning_thd.loss`` recognise it."""

    def __init__(self, vocabulary: int, stage: Stage, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.out_features = vocabulary
        self._stage = stage
        self._dtype = dtype

    @property
    def weight(self) -> Tensor:
        """Return an empty tensor of the head's dtype, to which Mamba casts hidden states before the head."""
        return torch.empty(self.out_features, 0, dtype=self._dtype, device=self._stage.device)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the last stage's logits in prediction and evaluation; refuse to train on logits."""
        if not torch.is_grad_enabled():
            return self._stage.broadcast(hidden.new_empty(*hidden.shape[:-1], self.out_features))
        raise ValueError(
            "Only the last pipeline stage has logits. Compute the loss with causal_lm_loss(model, batch) or "
            f"causal_lm_logprobs(model, batch). {see('pipelines')}\n  {user_line()}"
        )
