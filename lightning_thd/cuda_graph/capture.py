"""A step and a bucket -> graphs of the step's forward and backward, called through an autograd.Function.

``torch.cuda.make_graphed_callables`` returns its gradient buffers themselves, so that a later replay
overwrites the gradients accumulated in them (pytorch#181723). Here outputs are copies, and gradients are
copies or, if nothing but the optimizer may see them, the graph's own tensors; those are moved out of the way
before a replay that has to add to them.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_thd._private import private, private_getter
from lightning_thd._static import static_shapes
from lightning_thd._trees import tree_flatten, tree_leaves, tree_unflatten
from lightning_thd.batch import THDBatch
from lightning_thd.cuda_graph.backend import Backend
from lightning_thd.cuda_graph.buckets import Bucket, StaticBatch, StaticInputs
from lightning_thd.cuda_graph.compiled import is_compiled, uncompiled, with_dynamic_length
from lightning_thd.cuda_graph.errors import CaptureError
from lightning_thd.cuda_graph.fingerprint import Uses, watched
from lightning_thd.cuda_graph.guards import (
    HostValue,
    LoggedValue,
    RandomUse,
    check_numbers,
    guarded,
    host_state,
    refuse_fp8,
    refuse_host_changes,
    refuse_sums_over_slots,
    restored,
    without_saved_states,
)
from lightning_thd.loss.watch import Recorder, SlotLosses, show, watch


def differentiable(output: Any) -> list[Tensor]:
    """List the tensors in a step's output that require gradients; raise if there are none."""
    outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not outputs:
        raise CaptureError(
            "no output of the step requires a gradient. Return the loss, not detached, or train something "
            "that the loss depends on."
        )
    return outputs


def differentiate(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], grad_outputs: Sequence[Tensor] | None = None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of leaves; None for leaves that no output depends on."""
    if grad_outputs is None:
        grad_outputs = [torch.ones_like(x) for x in outputs]
    # Autocast would cast the backward of fp32 operators. It is off, as around a usual loss.backward().
    with torch.autocast(outputs[0].device.type, enabled=False):
        return torch.autograd.grad(outputs, leaves, grad_outputs, allow_unused=True)


# Hooks of a parameter, which wait for its gradient. A gradient that is handed over would not run them.
_HOOKS = ("torch.Tensor._backward_hooks", "torch.Tensor._post_accumulate_grad_hooks")


def _wait_for_gradients(leaves: Sequence[Tensor]) -> bool:
    """Return whether a hook of a parameter waits for its gradient."""
    return any(any(map(hooks, leaves)) for hooks in map(private_getter, _HOOKS))


class _Token:
    """Held only by the autograd node of a replay, and so alive while the backward may still run."""


class Turn:
    """A lock on the memory that graphs share, locked from a forward replay until its backward."""

    def __init__(self) -> None:
        self._holder: weakref.ref[_Token] | None = None

    @property
    def pending(self) -> bool:
        """Return whether the backward of a replayed forward may still run."""
        return self._holder is not None and self._holder() is not None

    def take(self) -> _Token:
        """Lock the shared memory for a forward replay."""
        assert not self.pending
        token = _Token()
        self._holder = weakref.ref(token)
        return token

    def give_back(self, token: _Token) -> None:
        """Release the shared memory, at the backward replay."""
        if self._holder is None or self._holder() is not token:
            raise RuntimeError(
                "backward() ran a second time through a replayed step, whose intermediate results are gone. "
                "A captured step has one backward (no retain_graph): sum the losses inside the step instead."
            )
        self._holder = None


class GraphPair:
    """The forward and backward graphs of a call on static tensors; pairs share ``turn`` and ``buffers``."""

    def __init__(
        self,
        backend: Backend,
        function: Callable[[], Any],
        leaves: Sequence[Tensor],
        turn: Turn,
        buffers: GradientBuffers,
        others: Sequence[Tensor] = (),  # the module's buffers
    ) -> None:
        self.turn = turn
        self.forward, outputs = backend.capture(function)
        flat, self._spec = tree_flatten(outputs)
        self.is_differentiable = [isinstance(x, Tensor) and x.requires_grad for x in flat]

        losses = differentiable(flat)
        self.grad_outputs = [torch.zeros_like(x) for x in losses]
        with buffers.collecting(leaves, [*self.grad_outputs, *others]):
            self.backward, self.gradients = backend.capture(
                lambda: differentiate(losses, leaves, self.grad_outputs)
            )
        self.buffers = buffers
        self._all_serve = buffers.hold(leaves, self.gradients)

        # Outputs are detached to free what autograd saved, so that the next capture can reuse the memory.
        self.outputs = [x.detach() if isinstance(x, Tensor) else x for x in flat]

    def __call__(self, leaves: Sequence[Tensor], *, hand_over: bool = False) -> Any:
        """Replay the call on the current content of the static tensors; the result is differentiable.

        With ``hand_over``, the backward pass makes the graph's gradients those of the leaves, without copies
        and without autograd's nodes of the leaves. So ``torch.autograd.grad`` does not reach the leaves.
        """
        self.buffers.move_sums(leaves)
        if hand_over and self._all_serve and not _wait_for_gradients(leaves):
            start = self.buffers.start_of(self.outputs)
            tensors = _HandOver.apply(self, leaves, start)  # type: ignore[no-untyped-call]
        else:
            tensors = _Replay.apply(self, *leaves)  # type: ignore[no-untyped-call]

        replayed = iter(tensors)
        outputs = [next(replayed) if isinstance(x, Tensor) else x for x in self.outputs]
        return tree_unflatten(outputs, self._spec)


def _replay_forward(ctx: Any, pair: GraphPair) -> tuple[Tensor, ...]:
    """Replay the forward graph, and return copies of its output tensors."""
    ctx.token = pair.turn.take()
    ctx.pair = pair
    ctx.set_materialize_grads(False)  # outputs that nobody uses, such as losses of slots, would get zeros
    pair.forward.replay()

    outputs = zip(pair.outputs, pair.is_differentiable, strict=True)
    tensors = [(x, is_differentiable) for x, is_differentiable in outputs if isinstance(x, Tensor)]
    ctx.is_differentiable = [is_differentiable for _, is_differentiable in tensors]
    copied = copies([x for x, _ in tensors])
    constants = [
        x for x, is_differentiable in zip(copied, ctx.is_differentiable, strict=True) if not is_differentiable
    ]
    ctx.mark_non_differentiable(*constants)
    return tuple(copied)


def _replay_backward(ctx: Any, grads: tuple[Tensor | None, ...]) -> GraphPair:
    """Replay the backward graph on the gradients of the outputs; return the pair, which has its results."""
    pair: GraphPair = ctx.pair
    of_outputs = [
        grad
        for grad, is_differentiable in zip(grads, ctx.is_differentiable, strict=True)
        if is_differentiable
    ]
    for static, grad in zip(pair.grad_outputs, of_outputs, strict=True):
        if grad is None:
            static.zero_()
        else:
            static.copy_(grad)
    pair.backward.replay()
    return pair


class _HandOver(torch.autograd.Function):
    """A replay whose backward pass sets the gradients of the leaves, which autograd does not see."""

    @staticmethod
    def forward(ctx: Any, pair: GraphPair, leaves: Sequence[Tensor], start: Tensor) -> tuple[Tensor, ...]:
        ctx.leaves = leaves
        return _replay_forward(ctx, pair)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        ctx.pair.turn.give_back(ctx.token)
        _replay_backward(ctx, grads)

        sums = []
        parts = []
        for leaf, gradient in zip(ctx.leaves, ctx.pair.gradients, strict=True):
            if gradient is None:
                continue
            if leaf.grad is None or leaf.grad is gradient:
                leaf.grad = gradient
            else:
                sums.append(leaf.grad)
                parts.append(gradient)
        if sums:
            private("torch._foreach_add_")(sums, parts)
        return None, None, None


class _Replay(torch.autograd.Function):
    """A replay whose backward pass returns copies of the gradients to autograd."""

    @staticmethod
    def forward(ctx: Any, pair: GraphPair, *leaves: Tensor) -> tuple[Tensor, ...]:
        return _replay_forward(ctx, pair)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.pair.turn.give_back(ctx.token)
        pair = _replay_backward(ctx, grads)
        copied = iter(copies([x for x in pair.gradients if x is not None]))
        return None, *(None if x is None else next(copied) for x in pair.gradients)


def _refuse_foreign_leaves(
    outputs: Sequence[Tensor], used: Iterable[Tensor], leaves: Sequence[Tensor]
) -> None:
    """Refuse a step that trains another leaf than those that a replay gives gradients to."""
    ids_of_leaves = {id(leaf) for leaf in leaves}
    foreign = [leaf for leaf in used if id(leaf) not in ids_of_leaves]
    if not foreign or not outputs:
        return
    starts = [torch.ones_like(x) for x in outputs]
    with torch.autocast(outputs[0].device.type, enabled=False):
        gradients = torch.autograd.grad(outputs, foreign, starts, allow_unused=True, retain_graph=True)
    for variable, gradient in zip(foreign, gradients, strict=True):
        if gradient is not None:
            raise CaptureError(
                f"the step trains a tensor of shape {tuple(variable.shape)} that is not a parameter of the "
                "module, or is one that the step reached through a reference outside of the module. A replay "
                "would give it no gradient. Make it a Parameter of the module, and use it from there."
            )


# Bytes of all gradients up to which the graph of every bucket keeps its own. Beyond it, all graphs but the
# first copy theirs into those of the first: three sets of a large model's gradients would not fit.
_SMALL = 2**29


class GradientBuffers:
    """Tensors with fixed addresses for the gradients of parameters, which graphs write and optimizers read.

    A graph's own gradients serve as they are, without a copy. Gradients that could not be the ``.grad`` of a
    parameter, such as views and expanded tensors, are copied into buffers inside the graph.
    """

    def __init__(self, count: int) -> None:
        self._first: list[Tensor | None] = [None] * count  # what the first graph writes
        self._sums: list[Tensor | None] = [None] * count  # sums of earlier microbatches
        self._written: dict[int, Tensor] = {}  # by id: all tensors that a replay overwrites
        self._start: Tensor | None = None

    @contextlib.contextmanager
    def collecting(self, leaves: Sequence[Tensor], others: Sequence[Tensor]) -> Iterator[None]:
        """Copy gradients that cannot serve as they are as soon as they are complete, inside this context.

        ``others`` are tensors that live longer than a replay, in whose memory a gradient could be.
        """
        taken = {x.untyped_storage().data_ptr() for x in (*leaves, *others) if is_plain(x)}
        small = sum(leaf.numel() * leaf.itemsize for leaf in leaves) <= _SMALL
        handles: list[Any] = []
        for i, leaf in enumerate(leaves):
            complete = functools.partial(self._complete, i, leaf, taken=taken, small=small)
            handles.append(leaf.register_hook(complete))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _complete(
        self, index: int, leaf: Tensor, gradient: Tensor, *, taken: set[int], small: bool
    ) -> Tensor:
        """Return what serves as the gradient of a leaf: the gradient, or a copy of it."""
        if not _fits(leaf, gradient):
            return gradient

        first = self._first[index]
        storage = gradient.untyped_storage()
        alone = storage.nbytes() == gradient.nbytes and storage.data_ptr() not in taken
        if alone and gradient.stride() == leaf.stride() and (first is None or small):
            taken.add(storage.data_ptr())
            return gradient

        if first is None:
            first = torch.empty_like(leaf, requires_grad=False)
            self._first[index] = first
        return first.copy_(gradient)

    def hold(self, leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> bool:
        """Keep a graph's gradients; return whether all of them can be the ``.grad`` of their leaves."""
        serve = True
        for i, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
            if gradient is None:
                continue
            if self._first[i] is None:
                self._first[i] = gradient
            self._written[id(gradient)] = gradient
            serve = serve and _fits(leaf, gradient) and gradient.stride() == leaf.stride()
        return serve

    def own(self, gradients: Sequence[Tensor | None]) -> bool:
        """Return whether all gradients, at least one, have addresses that stay."""
        ids = {id(gradient) for gradient in gradients if gradient is not None}
        stay = self._written.keys() | {id(x) for x in self._sums if x is not None}
        return bool(ids) and ids <= stay

    def move_sums(self, leaves: Sequence[Tensor]) -> None:
        """Move gradients of earlier microbatches out of the memory that the next replay overwrites."""
        gradients = [*map(_GRADIENT, leaves)]
        to_move = [i for i, gradient in enumerate(gradients) if id(gradient) in self._written]
        if not to_move:
            return

        sums: list[Tensor] = []
        for i in to_move:
            total = self._sums[i]
            if total is None:
                total = torch.empty_like(gradients[i])
                self._sums[i] = total
            sums.append(total)
        private("torch._foreach_copy_")(sums, [gradients[i] for i in to_move])
        for i, total in zip(to_move, sums, strict=True):
            leaves[i].grad = total

    def start_of(self, outputs: Sequence[Any]) -> Tensor:
        """Return the one tensor through which autograd reaches a replay that hands its gradients over."""
        if self._start is None:
            device = next(x.device for x in outputs if isinstance(x, Tensor))
            self._start = torch.zeros((), device=device, requires_grad=True)
        return self._start


_GRADIENT: Any = attrgetter("grad")


def _fits(leaf: Tensor, gradient: Tensor) -> bool:
    """Return whether a dense, plain gradient has the shape and dtype of its dense, plain leaf."""
    dense = gradient.layout is torch.strided and is_plain(leaf) and is_plain(gradient)
    return dense and gradient.shape == leaf.shape and gradient.dtype == leaf.dtype


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors; all plain ones are copied together, in a few kernel launches."""
    made: list[Tensor] = [torch.empty_like(x) if is_plain(x) else x.clone() for x in tensors]
    plain = [i for i, x in enumerate(tensors) if is_plain(x)]
    if plain:
        private("torch._foreach_copy_")([made[i] for i in plain], [tensors[i] for i in plain])
    return made


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is a Tensor or Parameter, not a subclass such as DTensor that wraps others."""
    return type(tensor) in (Tensor, nn.Parameter)


class StandIns:
    """Leaf tensors that share the memory of a module's parameters, one for each of ``parameters``.

    With DDP, parameters have autograd nodes that accumulate gradients on another stream, so that a capture
    fails. The parameters' hooks would run at capture and again at every replay. Stand-ins have neither.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[Tensor]) -> None:
        self.leaves: list[Tensor] = []
        leaf_of: dict[int, Tensor] = {}
        for parameter in parameters:
            leaf = nn.Parameter(parameter.detach())
            leaf.__dict__.update(parameter.__dict__)  # attributes that libraries set on parameters
            self.leaves.append(leaf)
            leaf_of[id(parameter)] = leaf

        # Tied parameters have several places: the dictionary of a child, and the name in it.
        self._places: list[tuple[dict[str, Any], str, Tensor]] = [
            (child._parameters, name, leaf_of[id(parameter)])
            for child in module.modules()
            for name, parameter in child._parameters.items()
            if parameter is not None and id(parameter) in leaf_of
        ]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the stand-ins into the module inside this context."""
        originals = [(owner, name, owner[name]) for owner, name, _ in self._places]
        for owner, name, leaf in self._places:
            owner[name] = leaf
        try:
            yield
        finally:
            for owner, name, parameter in originals:
                owner[name] = parameter


StepFunction = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A step ``function(module, batch, *rest)``, the module it trains, and the backend that captures it."""

    function: StepFunction
    module: nn.Module
    backend: Backend

    def __call__(self, batch: Any, *rest: Any) -> Any:
        """Run the step eagerly."""
        return self.function(self.module, batch, *rest)


class Example(NamedTuple):
    """An example call that fixes the device, the position axes and the number of arguments to capture."""

    batch: THDBatch
    rest: tuple[Any, ...] = ()
    logged: tuple[list[LoggedValue], ...] = ()  # what an eager run of this call logged

    @property
    def device(self) -> torch.device:
        """Return the device that the step runs on."""
        return self.batch.input_ids.device


class GraphMemory:
    """State that graphs of one memory pool share: the lock on the pool, and the gradient buffers."""

    def __init__(self) -> None:
        self.turn = Turn()
        self._parameters: list[int] = []
        self._buffers = GradientBuffers(0)

    def own(self, gradients: Sequence[Tensor | None]) -> bool:
        """Return whether gradients are tensors that graphs write, or sums of these."""
        return self._buffers.own(gradients)

    def drop_buffers(self) -> None:
        """Forget the gradients of graphs that are dropped, so that new graphs write others."""
        self._parameters = []
        self._buffers = GradientBuffers(0)

    def buffers_of(self, parameters: list[Tensor]) -> GradientBuffers:
        """Return gradient buffers for these parameters; make new ones if the parameters have changed."""
        ids = [id(x) for x in parameters]
        if ids != self._parameters:
            self._parameters = ids
            self._buffers = GradientBuffers(len(ids))
        return self._buffers


class CapturedStep:
    """The captured step of one bucket; ``uses`` lists the attributes that the step reads and writes."""

    def __init__(
        self,
        inputs: StaticInputs,
        leaves: list[Tensor],
        pair: GraphPair,
        logged: list[LoggedValue],
        uses: Uses,
        module: nn.Module,
    ) -> None:
        self.inputs = inputs
        self.leaves = leaves
        self.logged = logged
        self.uses = uses
        self._pair = pair
        self._module = module

    def run(self, batch: THDBatch, *, hand_over: bool = False) -> Any:
        """Copy a batch into the buffers and replay the step, without logging."""
        self.inputs.fill(batch)
        output, slots = self._pair(self.leaves, hand_over=hand_over)
        if slots:
            losses, weights = slots
            show(batch, SlotLosses(losses.flatten(), weights.flatten(), None))
        return output

    def __call__(self, batch: THDBatch, *, hand_over: bool = False) -> Any:
        """Replay the step on a batch, and log the step's values for this batch."""
        output = self.run(batch, hand_over=hand_over)
        log: Any = getattr(self._module, "log", None)
        for name, value, args, kwargs in self.logged:
            if isinstance(value, Tensor):
                value = value.clone()  # the next replay overwrites it
            log(name, value, *args, **kwargs)
        return output


def capture_step(subject: Subject, bucket: Bucket, example: Example, memory: GraphMemory) -> CapturedStep:
    """Warm up and capture a step; the module's buffers, random states and the logs do not change."""
    module = subject.module
    refuse_sums_over_slots(module)
    refuse_fp8(module)
    parameters: list[Tensor] = [x for x in module.parameters() if x.requires_grad]
    is_float64 = any(x.dtype == torch.float64 for x in parameters)
    position_ids = example.batch.position_ids

    def make_inputs() -> StaticInputs:
        inputs = StaticInputs(
            bucket,
            example.device,
            axes=None if position_ids.ndim == 1 else position_ids.shape[0],
            scale_dtype=torch.float64 if is_float64 else torch.float32,
            longest=max([1, *example.batch.lengths]),
        )
        if is_compiled(module):
            with_dynamic_length(inputs.batch.cu_seqlens)
            with_dynamic_length(inputs.batch.cu_seqlens_padded)
        inputs.fill(inputs.dummy())
        inputs.unpack()
        return inputs

    # The arguments after the batch are numbers that change from step to step, so the step may not use them.
    hidden = [HostValue(f"argument {i} after the batch") for i in range(1, len(example.rest) + 1)]
    if hidden:
        hidden[0] = HostValue("argument 1 after the batch (such as batch_idx)")
    stand_ins = StandIns(module, parameters)

    def run(static: StaticBatch) -> Any:
        torch.clear_autocast_cache()  # a graph would not repeat a cast from before it
        with stand_ins.in_place():
            return _checked(subject(static, *hidden))

    def run_recorded() -> tuple[Any, list[Tensor]]:
        """Run the step; return its output, and the losses and weights of slots if its loss has them."""
        inputs.unpack()
        batch: StaticBatch = inputs.batch.replace()
        recorder = Recorder()
        if example.batch.watcher is not None:
            watch(batch, recorder)
        output = run(batch)
        slots = recorder.slots
        return output, [] if slots is None else [slots.losses, slots.weights]

    with restored(module), static_shapes():
        runs = _warm_up(subject.backend, run, module, make_inputs, stand_ins.leaves)
        refuse_fp8(module)
        inputs = make_inputs()
        with guarded(module) as logged, without_saved_states(), watched(module) as uses:
            buffers = memory.buffers_of(parameters)
            others = [*module.buffers()]
            pair = GraphPair(subject.backend, run_recorded, stand_ins.leaves, memory.turn, buffers, others)
    check_numbers([*example.logged, *runs, logged], {bucket.slots, bucket.sequences, bucket.max_seqlen})
    return CapturedStep(inputs, parameters, pair, logged, uses, module)


def _warm_up(
    backend: Backend,
    run: Callable[[StaticBatch], Any],
    module: nn.Module,
    make_inputs: Callable[[], StaticInputs],
    leaves: list[Tensor],
) -> list[list[LoggedValue]]:
    """Run forward and backward a few times, each with new inputs; return the values that each run logged.

    torch compiles nothing while a dispatch mode sees operators. So compiled layers run without modes first,
    which compiles them and tunes their kernels; then uncompiled, so that the modes see every operator; and at
    last again as they will be captured.
    """

    def on_new_inputs(watch: RandomUse | None = None) -> Callable[[], object]:
        inputs = make_inputs()  # new tensors, because kernels may cache results by a tensor's identity

        def forward_backward() -> object:
            outputs = differentiable(run(inputs.batch))
            if watch is not None:
                _refuse_foreign_leaves(outputs, watch.leaves, leaves)
            return differentiate(outputs, leaves)

        return forward_backward

    def as_captured() -> None:
        if is_compiled(module):
            forward_backward = on_new_inputs()
            with guarded(module), without_saved_states():
                backend.warm_up(forward_backward, last=False)

    runs = []
    state = host_state(module)
    as_captured()
    for i in range(backend.warm_ups):
        if i == 1:  # the first run may build tables and fill caches
            state = host_state(module)
        use = RandomUse()
        forward_backward = on_new_inputs(use if i == 0 else None)
        is_last = i == backend.warm_ups - 1
        with uncompiled(module), guarded(module) as logged, without_saved_states(use), use:
            backend.warm_up(forward_backward, last=is_last)
        use.refuse()
        runs.append(logged)
    as_captured()
    refuse_host_changes(module, state)
    return runs


def _checked(output: Any) -> Any:
    """Return what a step returned, or raise if a replay could not return it."""
    if output is None:
        raise CaptureError(
            "the step returned None to skip a batch, which a replay cannot decide again. Return the loss."
        )
    others = [x for x in tree_leaves(output) if x is not None and not isinstance(x, Tensor)]
    if others:
        raise CaptureError(
            f"the step returned a {type(others[0]).__name__} beside its tensors, which a replay would "
            "always return unchanged. Return only tensors."
        )
    return output
