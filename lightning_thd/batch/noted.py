"""A batch -> the same batch, which notes what a step asks of it; a step that asks no boundaries is refused.

Tokens of a pack see other documents unless the model asks where these begin. Only the first pack of a run is
noted, so later steps cost nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from lightning_thd._pages import see
from lightning_thd._static import RUN
from lightning_thd.batch.thd_batch import NOTHING_AROUND, THDBatch, THDStep
from lightning_thd.warnings import THDWarning, warn

# Attributes that say where sequences begin. Positions count: some kernels find the boundaries by them.
_PLACES = (
    *("boundaries", "cu_seqlens", "cu_seqlens_padded", "lengths", "padded_lengths", "position_ids"),
    "token_offsets",
)
_NOTED_IF_ANY = frozenset({"prefixes"})  # None says nothing of the sequences
_ASKING = frozenset({*_PLACES, *_NOTED_IF_ANY, "hf_kwargs", "token_sequences", "unpack"})
_INPUTS = frozenset({"extras", "input_ids"})
_OF_LOSSES = ("prediction_rows", "predictions", "token_slots", "token_targets")
SCALES = frozenset({"loss_scale", "sequence_scale"})  # they decide how a loss is averaged
_NOTED = frozenset({*_PLACES, *_INPUTS, *SCALES})


# A hand-written loop that takes so many batches without a step of an optimizer trains nothing.
_MOST_UNTRAINED = 256


# What an own model calls, in messages.
_CALL = (
    "call varlen_attention(q, k, v, batch.boundaries), with q, k and v [T, H, D] (slots, heads, head size; "
    "from lightning_thd import varlen_attention)"
)


class UnreadBoundariesError(ValueError):
    """A model ran on a pack of several sequences and did not ask, or not use, where they begin."""


@dataclass(slots=True)
class Reads:
    """What was read of a noted batch and its copies, which share this object."""

    names: set[str] = field(default_factory=set)
    batches: list[THDBatch] = field(default_factory=list)  # the batch as it is, and its copies on devices


class NotedBatch(THDBatch):
    """A batch that notes which inputs, boundaries and loss scales are read; copies note in the same set.

    Reads by methods that copy, print or count, and by ``pool``, which works on outputs, are no use of the
    boundaries.
    """

    __slots__ = ("_plain", "_read")

    _plain: THDBatch
    _read: Reads

    @classmethod
    def of(cls, batch: THDBatch, read: Reads | None = None) -> NotedBatch:
        """Return a noted copy of a batch, which shares its tensors."""
        noted = object.__new__(cls)
        for name in THDBatch.__slots__:
            if name not in _NOTED:
                THDBatch.__dict__[name].__set__(noted, getattr(batch, name))
        reads = Reads() if read is None else read
        reads.batches.append(batch)
        noted._set(**NOTHING_AROUND, _plain=batch, _read=reads)
        noted._set(watcher=batch.watcher)
        return noted

    @property
    def read(self) -> frozenset[str]:
        """Return the names that were read."""
        return frozenset(self._read.names)

    def note(self, name: str) -> None:
        """Note that a name was read."""
        self._read.names.add(name)

    def hf_kwargs(self) -> dict[str, Any]:
        """Return the arguments of a transformers model, and note it."""
        self._read.names.update(("hf_kwargs", "input_ids"))
        return self._plain.hf_kwargs()

    def unpack(self, x: Tensor) -> list[Tensor]:
        """Split a per-token tensor by sequence, and note it."""
        self._read.names.add("unpack")
        return self._plain.unpack(x)

    def token_sequences(self) -> Tensor:
        """Return the sequence of each of ``token_targets``, and note it."""
        self._read.names.add("token_sequences")
        return self._plain.token_sequences()

    def pool(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Reduce a per-token tensor to one row per sequence."""
        return self._plain.pool(x, *args, **kwargs)

    def to(self, device: torch.device | str, *, non_blocking: bool | None = None) -> NotedBatch:
        """Move the tensors to a device."""
        return NotedBatch.of(self._plain.to(device, non_blocking=non_blocking), self._read)

    def pin_memory(self) -> NotedBatch:
        """Return a copy that also has its tensors in one page-locked buffer."""
        return NotedBatch.of(self._plain.pin_memory(), self._read)

    def replace(self, **changes: Any) -> NotedBatch:
        """Return a copy with some fields changed."""
        return NotedBatch.of(self._plain.replace(**changes), self._read)

    def __reduce__(self) -> tuple[Any, ...]:
        return NotedBatch.of, (self._plain, self._read)

    def __len__(self) -> int:
        return len(self._plain)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._plain)

    def __repr__(self) -> str:
        return repr(self._plain)


def _property(name: str) -> property:
    """Make a property that reads the plain batch, and notes the name if it is an input or a boundary."""

    def read(self: NotedBatch) -> Any:
        value = getattr(self._plain, name)
        if name in _NOTED or (name in _NOTED_IF_ANY and value is not None):
            self._read.names.add(name)
        return value

    return property(read, doc=f"Return the batch's ``{name}``.")


# What a batch computes from boundaries for outputs and losses is read from the plain batch, and not noted.
for _name in (*_NOTED, *_NOTED_IF_ANY, *_OF_LOSSES, "max_seqlen", "step"):
    setattr(NotedBatch, _name, _property(_name))


class NotedStep(THDStep):
    """A step whose microbatches note what is read of them; copies note in the same sets."""

    __slots__ = ("_plain",)

    microbatches: tuple[NotedBatch, ...]
    _plain: THDStep  # held here, because microbatches refer to their step weakly

    @classmethod
    def of(cls, step: THDStep, reads: Iterable[Reads | None] | None = None) -> NotedStep:
        """Return a noted copy of a step, which shares its tensors."""
        pairs = zip(step.microbatches, reads or [None] * len(step), strict=True)
        noted = object.__new__(cls)
        noted._set(microbatches=tuple(NotedBatch.of(batch, read) for batch, read in pairs), _plain=step)
        return noted

    def _reads(self) -> list[Reads]:
        return [batch._read for batch in self.microbatches]

    def each(self, function: Callable[[THDBatch], THDBatch]) -> Self:
        """Return a noted step with the results of a function of the plain microbatches."""
        return cast("Self", NotedStep.of(self._plain.each(function), self._reads()))

    def __reduce__(self) -> tuple[Any, ...]:
        return NotedStep.of, (self._plain, self._reads())


def unnoted(batch: THDBatch) -> THDBatch:
    """Return a batch without notes, for a loss, whose reads of boundaries are not the model's."""
    plain: THDBatch = getattr(batch, "_plain", batch)
    return plain


def note_mean_of_sequences(batch: THDBatch) -> None:
    """Note that a loss is a mean over sequences or queries, so that loops weigh it by their number."""
    batch.note("sequence_scale")


def refuse_unread(batch: NotedBatch, what: str, option: str) -> None:
    """Raise UnreadBoundariesError if a step ran on several sequences and asked for none of their boundaries.

    Args:
        batch: the batch that the step was given.
        what: the name of what ran, for the message, such as ``"MyModule.training_step"``.
        option: the code that says that a model needs no boundaries.
    """
    if len(batch) < 2 or batch.read & _ASKING or not batch.read & _INPUTS:
        return
    raise UnreadBoundariesError(
        f"{what} ran on a pack of {len(batch)} sequences and did not ask where they begin, so their tokens "
        f"see each other. In your own model, {_CALL}, and take positions from batch.position_ids. Run a "
        "transformers model with attn_implementation='thd' by causal_lm_loss(model, batch) or "
        "model(**batch.hf_kwargs()). If no token of the model sees another one, as without attention, set "
        f"{option}. {see('boundaries')}"
    )


class _CallsSeen(TorchFunctionMode):
    """Notes over how long rows torch's attention runs without a mask, and what its losses take as labels."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: set[int] = set()
        self.labels: list[tuple[Tensor, int]] = []  # with the label that is ignored

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.slots.add(slots_of_unmasked_row(*args, **kwargs))
        elif func is F.cross_entropy:
            self._note_labels(*args, **kwargs)
        return func(*args, **kwargs)

    def _note_labels(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        *_: Any,
        **__: Any,
    ) -> None:
        """Note the labels of a loss, unless they may be masked after it, or by its weights."""
        if reduction != "none" and reduce is not False and weight is None and type(target) is Tensor:
            self.labels.append((target.detach().flatten(), ignore_index))


def slots_of_unmasked_row(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> int:
    """Return the slots of the one row over which ``scaled_dot_product_attention`` runs unmasked, or 0.

    A mask may keep sequences apart, and nested tensors do. Heads that attend to each other are no row.
    """
    if attn_mask is not None or query.is_nested or query.dim() < 2:
        return 0
    is_one_row = math.prod(query.shape[:-3]) == 1
    return int(query.shape[-2]) if is_one_row and query.shape[-2] == key.shape[-2] else 0


def refuse_whole_rows(batch: NotedBatch, slots: set[int], what: str, option: str) -> None:
    """Raise UnreadBoundariesError if torch's attention ran over a pack of several sequences as one row.

    Args:
        batch: the batch that the step was given.
        slots: the lengths of the rows over which attention ran without a mask.
        what: the name of what ran, for the message, such as ``"MyModule.training_step"``.
        option: the code that says that a model needs no boundaries.
    """
    plain = unnoted(batch)
    # Patches of an image are another row, which may be as long as the pack by chance.
    if len(batch) < 2 or plain.extras or plain.input_ids.numel() not in slots:
        return
    raise UnreadBoundariesError(
        f"{what} ran scaled_dot_product_attention over all {plain.input_ids.numel()} slots of a pack of "
        f"{len(batch)} sequences without a mask, so their tokens see each other. Positions do not keep them "
        f"apart. In its place, {_CALL}. If sequences are meant to see each other, set {option}. "
        f"{see('boundaries')}"
    )


def warn_of_labels(batch: NotedBatch, labels: list[tuple[Tensor, int]], what: str) -> None:
    """Warn if a loss takes labels that are not the next tokens of the same document.

    Args:
        batch: the batch that the step was given.
        labels: int ``[N]`` each, what ``cross_entropy`` took as labels, with the label that it ignores.
        what: the name of what ran, for the message, such as ``"MyModule.training_step"``.
    """
    plain = unnoted(batch)
    for taken, ignored in labels:
        fault = _fault_of_labels(plain, taken, ignored)
        if fault is None:
            continue
        warn(
            f"The loss of {what} {fault}. Take batch.targets as labels of all logits: they are shifted "
            "already, inside each document. The callback PackingCheck measures what a loss scores. "
            f"{see('losses')}",
            THDWarning,
        )
        return


def _fault_of_labels(plain: THDBatch, labels: Tensor, ignored: int) -> str | None:
    """Return what is wrong with labels that are a batch's ids or targets, or None."""
    ids = plain.input_ids
    targets = plain._targets
    if len(plain) < 2 or labels.device != ids.device or _is_captured(labels):
        return None
    if _are_equal(labels, ids):
        return "takes batch.input_ids as labels, so every token is scored with its own logits"
    if targets is not None and _are_equal(labels, targets[1:]):
        return "takes batch.targets[1:] as labels, which are shifted twice"
    if _are_equal(labels, ids[1:]):
        starts = ids[1:]
        if plain.boundaries.own_slots:
            starts = ids[plain.boundaries.offsets[1:-1].long()]
        if bool((starts != ignored).any()):  # a loss that ignores the first token of documents is right
            return "takes batch.input_ids[1:] as labels, so the end of a document learns the next one's start"
    return None


def _are_equal(labels: Tensor, others: Tensor) -> bool:
    """Return whether labels are others' values."""
    return labels.shape == others.shape and bool((labels == others).all())


def _is_captured(x: Tensor) -> bool:
    """Return whether a CUDA graph is being captured, in which no value can be read."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def warn_of_scale(batch: NotedBatch, what: str) -> None:
    """Warn if a loss was computed without a scale, by which microbatches of a step weigh what they hold.

    Args:
        batch: the batch that the loss was given.
        what: the name of what computed it, such as ``"loss_fn"``.
    """
    if batch.read & SCALES or not batch.read & _INPUTS:  # without inputs, nothing was computed
        return
    warn(
        f"{what} read no scale of the batch, so every microbatch weighs the same, whatever it holds. "
        "Multiply a sum over tokens by batch.loss_scale, or a mean over sequences by "
        f"len(batch) * batch.sequence_scale. {see('steps')}",
        THDWarning,
    )


@contextmanager
def _running(notes: list[NotedBatch]) -> Iterator[None]:
    """Let ``sequences_in`` know the batches of a step while it runs."""
    running: list[NotedBatch] = RUN.__dict__.setdefault("notes", [])
    running.extend(notes)
    try:
        yield
    finally:
        for batch in notes:
            place = next(i for i, other in enumerate(running) if other is batch)
            del running[place]


def sequences_in(x: Any, name: Literal["input_ids", "targets"]) -> int:
    """Return the sequences of a running step's noted batch whose ids or targets ``x`` holds; 0 for none.

    Only the first steps of a run are noted. ``x`` may be a view, such as ``batch.input_ids[None]``.
    """
    if type(x) is not Tensor or x.device.type == "meta":  # a subclass may have no address
        return 0
    for noted in getattr(RUN, "notes", ()):
        for batch in noted._read.batches:
            of_batch = batch.input_ids if name == "input_ids" else batch._targets
            if of_batch is not None and _same_values(of_batch, x):
                return len(batch)
    return 0


def _same_values(of_batch: Tensor, x: Tensor) -> bool:
    """Return whether a tensor is one of a batch, a view of it, or on a CPU, has its values."""
    if of_batch.device != x.device or of_batch.numel() != x.numel() or of_batch.dtype != x.dtype:
        return False
    if of_batch.data_ptr() == x.data_ptr():
        return True
    return of_batch.is_cpu and torch.equal(of_batch, x.flatten())  # values on a device are not read


class FirstStep:
    """Runs a function on noted batches until one pack of several sequences has passed ``refuse_unread``.

    Args:
        step: the function. Batches are found among its arguments, also in dicts, lists and tuples.
        what: the function's name in messages.
        option: the code that says that a model needs no boundaries; None judges nothing.
        passed: is called once, when there is nothing left to check.
        look: is called with the first noted batch after the step.
        sees_calls: look at calls of torch's attention and losses too. Code of torch.compile would compile
            once more.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        what: str,
        option: str | None,
        passed: Callable[[], None] = lambda: None,
        look: Callable[[NotedBatch], None] | None = None,
        sees_calls: bool = True,
    ) -> None:
        self.step = step
        self._sees_calls = sees_calls and option is not None
        self._what = what
        self._option = option
        self._passed = passed
        self._look = look
        self._done = False
        functools.update_wrapper(self, step, updated=())  # Lightning reads the signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on noted batches, or on the batches as they are once a pack has passed."""
        if self._done:
            return self.step(*args, **kwargs)
        notes: list[THDBatch] = []
        args = _with_notes(args, notes)
        kwargs = _with_notes(kwargs, notes)
        calls = _CallsSeen()
        several = any(len(batch) > 1 for batch in notes)
        watch = calls if self._sees_calls and several else nullcontext()
        with _running([batch for batch in notes if isinstance(batch, NotedBatch)]), watch:
            try:
                output = self.step(*args, **kwargs)
            except ValueError as error:
                self._explain(error, notes)
                raise
        self._judge(notes, calls)
        return output

    def _explain(self, error: ValueError, notes: list[THDBatch]) -> None:
        """Raise with what to write, if a step took a batch apart before it read anything of it."""
        is_unread = any(isinstance(batch, NotedBatch) and not batch.read for batch in notes)
        if is_unread and str(error).startswith("not enough values to unpack"):
            raise ValueError(
                f"{self._what} takes its batch apart, as in x, y = batch ({error}). A THDBatch is no pair. "
                "Write batch.input_ids for x, which is [T], one row without a batch dimension, and "
                "batch.targets, which are shifted already, for y. A model of your own also asks "
                f"where documents begin. {see('boundaries')}"
            ) from error

    def _judge(self, notes: list[THDBatch], calls: _CallsSeen) -> None:
        """Look at the first noted batch, refuse unread boundaries, and stop noting once a pack has passed."""
        ended = self._option is None or not notes  # without packs, there is nothing to judge in this run
        for batch in notes:
            if not isinstance(batch, NotedBatch):
                continue
            if self._look is not None:
                self._look(batch)
                self._look = None
            if self._option is not None:
                refuse_unread(batch, self._what, self._option)
                refuse_whole_rows(batch, calls.slots, self._what, self._option)
                warn_of_labels(batch, calls.labels, self._what)
                ended = ended or (len(batch) > 1 and bool(batch.read & _INPUTS))
        if ended:
            self._done = True
            self._passed()


class FirstUpdate:
    """Hands noted batches to a hand-written loop, until an optimizer has stepped on a pack that passed.

    No code of this package runs the loop's model. So the batches are judged when any optimizer of the process
    begins a step while the loop holds one of them; a loop that only looks at batches is not judged.
    """

    def __init__(self) -> None:
        self._since_update: list[NotedBatch] = []
        self._done = False

    @contextmanager
    def handing_out(self, batch: THDBatch | THDStep) -> Iterator[THDBatch | THDStep]:
        """Return a batch or step as it is handed out, noted unless nothing is left to check."""
        if self._done:
            yield batch
            return
        noted: Any = NotedStep.of(batch) if isinstance(batch, THDStep) else NotedBatch.of(batch)
        notes: list[NotedBatch] = list(noted.packs)
        self._since_update += notes
        hooks = (
            register_optimizer_step_pre_hook(lambda *_: self._judge()),
            register_optimizer_step_post_hook(lambda *_: self._judge()),  # closures run inside the step
        )
        try:
            with _running(notes):
                yield noted
        finally:
            for hook in hooks:
                hook.remove()
            self._done = self._done or len(self._since_update) >= _MOST_UNTRAINED
            if self._done:
                self._since_update = []

    def _judge(self) -> None:
        """Refuse the first update of weights by packs whose boundaries nobody asked for."""
        judged = [batch for batch in self._since_update if batch.read & _INPUTS]
        self._since_update = [batch for batch in self._since_update if not batch.read & _INPUTS]
        for batch in judged:
            refuse_unread(batch, "Your loop over THDDataModule", "THDDataModule(needs_boundaries=False)")
            self._done = self._done or len(batch) > 1


def _with_notes(value: Any, notes: list[THDBatch]) -> Any:
    """Replace the plain batches in a value by noted ones, and list all batches."""
    if isinstance(value, THDBatch):
        noted = NotedBatch.of(value) if type(value) is THDBatch else value
        notes.append(noted)
        return noted
    if type(value) is dict:
        return {key: _with_notes(item, notes) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_notes(item, notes) for item in value)
    return value
