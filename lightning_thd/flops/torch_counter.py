"""One step of any model -> its FLOPs, from the calls of torch's functions; no call is changed or repeated.

``StepCounter`` is a mode in which torch shows every function that Python calls, above autograd and autocast.
Kernels, dtypes and random numbers stay as they are. (torch's own ``FlopCounterMode`` sits below: composite
functions then take other paths, and half precision rounds differently.) The FLOPs of a product come from
torch's counter on tensors of the same shapes on the meta device, forward and backward.

Kernels that Python calls in another way, such as those of flash-linear-attention, are invisible here. So is
what torch.compile compiled: it runs uncompiled while a counter is on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain
from math import prod
from typing import Any, TypeAlias

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from lightning_thd._static import in_backward
from lightning_thd._trees import tree_leaves, tree_map
from lightning_thd.flops.listen import LISTENERS, AttentionCall, pair_flops
from lightning_thd.flops.pairs import visible_pairs
from lightning_thd.flops.squares import Square, Weights, note_square
from lightning_thd.flops.terms import Basis, Kind, Layer, Term
from lightning_thd.stats import SeqStats, combine
from lightning_thd.warnings import MeasureWarning, warn

_Cost: TypeAlias = tuple[int, int]  # FLOPs of the forward pass, and of the backward pass
_Passes: TypeAlias = tuple[int, int, int]  # FLOPs forward, backward, and run again by checkpointing
_Key: TypeAlias = Hashable  # what a call computes: equal for a call and its repetition

# Functions of torch that multiply matrices, by the name under which the mode shows them.
_PRODUCTS = frozenset(
    {"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_"}
    | {"addbmm", "addbmm_", "mv", "addmv", "addmv_", "dot", "vdot", "inner", "vecdot", "einsum", "tensordot"}
    | {"bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
    | {"conv_tbc", "convolution", "chain_matmul", "multi_dot", "cdist", "multi_head_attention_forward"}
    | {"linear_cross_entropy"}
)
_GROUPED = frozenset(
    {"grouped_mm", "_grouped_mm", "scaled_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"}
    | {"grouped_mm_fallback"}
)
_SCALED = frozenset({"scaled_mm", "_scaled_mm", "_scaled_mm_v2", "_int_mm"})
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_CELLS = frozenset({"lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"})
_COUNTED = _PRODUCTS | _GROUPED | _SCALED | _RECURRENT | _CELLS
_NO_FORMULA = frozenset(
    {"_sparse_mm", "sparse_mm", "_sparse_addmm", "fft_fft", "fft_rfft", "fft_ifft", "fft_irfft", "stft"}
    | {"istft", "_weight_int4pack_mm", "_weight_int8pack_mm", "flex_attention"}
)

# Custom operators of these namespaces multiply nothing, or have their count from ``listen``.
_PLAIN = frozenset(
    {"aten", "prim", "prims", "profiler", "c10d", "c10d_functional", "fsdp", "dtensor"}
    | {"symm_mem", "rngprims", "inductor", "streams", "debugprims", "quantized_decomposed"}
    | {"lightning_thd", "transformers", "higher_order"}
)


@dataclass(slots=True)
class Tally:
    """The FLOPs of one kind of call in a step."""

    forward: int = 0
    backward: int = 0
    again: int = 0  # forward FLOPs that activation checkpointing runs again

    def add(self, passes: _Passes) -> None:
        """Add the FLOPs of a call."""
        self.forward += passes[0]
        self.backward += passes[1]
        self.again += passes[2]

    @property
    def passes(self) -> _Passes:
        """Return the FLOPs forward, backward, and run again by checkpointing."""
        return self.forward, self.backward, self.again


@dataclass(frozen=True, slots=True)
class Counted:
    """The products of one step, with the step's counts; attention through ``listen`` is not part of them."""

    stats: SeqStats  # the sum over all microbatches
    slots: tuple[int, ...]  # those of each microbatch
    sequences: tuple[int, ...]  # those of each microbatch
    products: dict[tuple[str, int], Tally]  # by function and number of rows
    rows: dict[tuple[int, int], Tally]  # calls of scaled_dot_product_attention, by batch rows and row length
    unknown: frozenset[str] = field(default_factory=frozenset)
    missed_calls: bool = False  # whether some code ran compiled or from a graph: its products are missing
    squares: dict[int, Square] = field(default_factory=dict)  # by the number of rows multiplied by each other

    @property
    def flops(self) -> _Passes:
        """Return the FLOPs of all products forward, backward, and run again by checkpointing."""
        tallies = self.products.values()
        return (
            sum(each.forward for each in tallies),
            sum(each.backward for each in tallies),
            sum(each.again for each in tallies),
        )

    def other_rows(self, shards: int = 1) -> bool:
        """Return whether a product has neither a row for each slot nor one for each sequence.

        Rows of every third token, or of one expert, may grow in some other way, whatever two steps show.
        ``shards`` ranks share the slots.
        """
        expected = {*self.sequences, *(slots // shards for slots in self.slots)}
        return any(rows not in expected for _, rows in self.products)


class CallListener:
    """Collects the calls of our attention, from ``start`` to ``stop``."""

    needs_calls = False

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.missed_calls = False  # whether code ran compiled or from a graph, whose calls it cannot see
        self.repeats = False  # whether checkpointing ran a call again
        self._quiet = 0  # above 0 inside a function that reported its FLOPs
        self._repeats = _Repeats()

    def start(self) -> None:
        """Begin to listen."""
        LISTENERS.append(self)

    def stop(self) -> None:
        """Listen no more."""
        LISTENERS.remove(self)

    @contextmanager
    def attention(self, call: AttentionCall) -> Iterator[None]:
        """Keep a call of attention, and ignore the products of its kernel."""
        key = ("attention", *(tuple(x.shape) for x in (call.cu_seqlens_q, call.cu_seqlens_kv)), call.forward)
        forward, backward, again = self._of_phase((call.forward, call.backward), key)
        if (forward or backward or again) and not self._quiet:
            self.calls.append(replace(call, forward=forward, backward=backward, again=again))
        with self.ignoring():
            yield

    def heads(self, pairs: Sequence[tuple[Tensor, Tensor | None]]) -> AbstractContextManager[Any]:
        """Do nothing: products are for ``StepCounter``."""
        return nullcontext()

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Count nothing inside the context, because it is part of what was counted."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def _of_phase(self, cost: _Cost, key: _Key, weights: Sequence[Tensor] = ()) -> _Passes:
        """Return which FLOPs of a call count, by the pass in which Python runs it."""
        forward, backward = cost
        gradients = torch.is_grad_enabled()
        if not in_backward():
            self._repeats.note(key, weights, gradients=gradients)
            return forward, (backward if gradients else 0), 0
        if gradients:  # activation checkpointing runs a layer again, for HFU
            self.repeats = True
            return 0, (backward if self._repeats.is_first(key, weights) else 0), forward
        return 0, forward, 0  # the backward of an autograd.Function multiplies by itself what autograd would


class _Repeats:
    """Tells, when a checkpointed layer runs again, whether its first run had no gradients.

    It has none under torch's reentrant checkpointing, so that the gradients count in the second run. Other
    checkpointing runs a layer with gradients at once: each repeated call has one with gradients before it.
    """

    def __init__(self) -> None:
        self._before: Counter[tuple[Any, ...]] = Counter()  # calls with gradients that were not repeated yet
        self._is_first: bool | None = None  # what the last repeated product of a weight was

    def note(self, key: _Key, weights: Sequence[Tensor], *, gradients: bool) -> None:
        """Note a call of a forward pass: what it computes, and the parameters that it multiplies."""
        self._is_first = None
        if gradients:
            self._before[key, *map(id, weights)] += 1

    def is_first(self, key: _Key, weights: Sequence[Tensor]) -> bool:
        """Return whether a call of a repeated layer is the first one with gradients."""
        if not weights and self._is_first is not None:
            return self._is_first  # that of its layer: calls without weights look alike in all layers
        call = (key, *map(id, weights))
        first = self._before[call] == 0
        if not first:
            self._before[call] -= 1
        if weights:
            self._is_first = first
        return first


class StepCounter(TorchFunctionMode, CallListener):
    """Counts the products inside its context too; graphs wait in the step if ``needs_calls``.

    ``module`` is what runs; its weights are told from activations.
    """

    def __init__(self, module: nn.Module | None = None, *, needs_calls: bool = True) -> None:
        TorchFunctionMode.__init__(self)
        CallListener.__init__(self)
        self.needs_calls = needs_calls
        self.products: dict[tuple[str, int], Tally] = defaultdict(Tally)
        self.rows: dict[tuple[int, int], Tally] = defaultdict(Tally)
        self.unmasked_rows: set[int] = set()  # slots of a row all of which attend to those before
        self.unknown: set[str] = set()
        self.squares: dict[int, Square] = defaultdict(Square)
        self._weights = Weights() if module is None else Weights(chain(module.parameters(), module.buffers()))
        self._costs: dict[str, _Cost] = {}  # FLOPs of products seen before, by name and arguments
        self._uncompiled: Any = None  # torch's switch that runs compiled code uncompiled

    def start(self) -> None:
        """Begin to listen, let torch show its functions, and let compiled code run uncompiled."""
        super().start()
        self._uncompiled = torch.compiler.set_stance("force_eager")
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """End all three."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        _switch_back(self._uncompiled)
        super().stop()

    @contextmanager
    def heads(self, pairs: Sequence[tuple[Tensor, Tensor | None]]) -> Iterator[None]:
        """Count a loss's output projections, and ignore how the loss computes them."""
        if not self._quiet:
            for hidden, weight in pairs:
                if weight is not None:
                    self._add_head(hidden, weight)
        with self.ignoring():
            yield

    def _add_head(self, hidden: Tensor, weight: Tensor) -> None:
        """Count ``hidden @ weight.T``."""
        forward = 2 * hidden.numel() * weight.shape[0]
        backward = forward * (hidden.requires_grad + weight.requires_grad)
        rows = hidden.numel() // max(1, hidden.shape[-1])
        passes = self._of_phase((forward, backward), ("head", tuple(hidden.shape)), [weight])
        self.products["head", rows].add(passes)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a function of torch, then call it as if there were no mode."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # somebody lets code compile inside the counted step
            self.missed_calls = True
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if func is Tensor.backward and type(args[0]) is Tensor:
            return self._run_backward(*_of_backward(*args, **kwargs))
        if func is torch.autograd.backward:  # torch 2.13 shows it, also inside Tensor.backward
            return self._run_backward(*args, **kwargs)
        if self._quiet:
            return func(*args, **kwargs)

        call = self._see(func, name, args, kwargs)
        out = func(*args, **kwargs)
        if call is not None:  # a checkpoint stops by an error before the last product that it need not repeat
            for tally, passes in call.parts:
                tally.again += passes[2]
            forward, backward, _ = call.parts[0][1]
            of_call = (call.name, call.args, call.tensors, out, forward + backward)
            note_square(self.squares, self._weights, *of_call)
        self._weights.note(args, kwargs, out)
        return out

    def _run_backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Run a backward pass whose Python code the mode sees, such as that of checkpoints."""
        roots = [tensors] if isinstance(tensors, Tensor) else [*tensors]
        if isinstance(inputs, Mapping):
            inputs = [*inputs.values()]
        elif isinstance(inputs, Tensor):
            inputs = [inputs]
        # torch shows a call with tensors to the mode again, which is off meanwhile; edges it does not show.
        edges = [_edge_of(root) for root in roots]
        targets = None if inputs is None else [_edge_of(x) for x in inputs]
        with self:
            torch.autograd.backward(edges, grad_tensors, retain_graph, create_graph, inputs=targets)

    def _see(self, func: Any, name: str, args: Any, kwargs: Any) -> _Call | None:
        """Count a function of torch if it multiplies; note it if it does and no formula is known.

        Return it if it does, without its FLOPs that checkpointing runs again.
        """
        operator = getattr(func, "overloadpacket", func)
        is_of_ops = isinstance(operator, type(torch.ops.aten.mm))
        if is_of_ops:
            namespace, _, name = str(operator).partition(".")
            if namespace.lstrip("_") not in _PLAIN and operator not in flop_registry:
                self.unknown.add(f"{namespace}::{name}")
                return None
        if name == "scaled_dot_product_attention":
            return self._see_rows(*args, **kwargs)
        if name in _NO_FORMULA:
            self.unknown.add(name)
        elif name in _COUNTED or (is_of_ops and operator in flop_registry):
            return self._add(name, func, args, kwargs)
        return None

    def _see_rows(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
    ) -> _Call:
        """Count ``scaled_dot_product_attention`` as torch does: all pairs, also those that a mask hides."""
        heads = query.shape[-3] if query.dim() > 2 else 1
        rows = prod(query.shape[:-3])
        forward, backward = pair_flops(heads, query, key, value)
        pairs = rows * query.shape[-2] * key.shape[-2]
        shapes = ("rows", *(tuple(x.shape) for x in (query, key, value)))
        passes = self._of_phase((forward * pairs, backward * pairs), shapes)
        if attn_mask is None and rows == 1 and not query.is_nested and query.shape[-2] == key.shape[-2]:
            self.unmasked_rows.add(int(query.shape[-2]))
        tally = self.rows[rows, query.shape[-2]]
        tally.add((*passes[:2], 0))
        return _Call("scaled_dot_product_attention", [(tally, passes)])

    def _add(self, name: str, func: Any, args: Any, kwargs: Any) -> _Call | None:
        """Count a product; its FLOPs are computed once for all calls with equal shapes."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not tensors:
            return None
        # A string, because some arguments (lists, einsum's equation with tensors) have no hash.
        key = repr((name, tree_map(_key, (args, kwargs))))
        cost = self._costs.get(key)
        if cost is None:
            try:
                with saved_tensors_hooks(_unchanged, _unchanged):  # a checkpoint counts what is saved
                    cost = _cost(name, func, args, kwargs)
            except Exception:  # the meta device lacks some functions
                self.unknown.add(name)
                cost = (0, 0)
            self._costs[key] = cost

        first = tensors[0]
        rows = first.numel() // max(1, first.shape[-1]) if first.dim() else 1
        weights = [x for x in tensors if isinstance(x, nn.Parameter)]
        passes = self._of_phase(cost, key, weights)
        parts = [(self.products[name, rows], passes)]
        if name == "multi_head_attention_forward":
            parts = self._without_pairs(cost, passes, *args, **kwargs)
        for tally, of_part in parts:
            tally.add((*of_part[:2], 0))
        return _Call(name, parts, args, tensors)

    def _without_pairs(
        self, cost: _Cost, passes: _Passes, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> list[tuple[Tally, _Passes]]:
        """Divide the FLOPs of torch's whole attention layer into those of its weights and of its pairs."""
        length, size = query.shape[0], query.shape[-1]
        rows = query.shape[1] if query.dim() == 3 else 1
        forward = 4 * size * rows * length * key.shape[0]
        backward = 2 * forward if cost[1] else 0
        # The pass that runs decides which of them count, as for the whole.
        pairs_of = {0: 0, cost[0]: forward, cost[1]: backward}
        of_pairs = pairs_of[passes[0]], pairs_of[passes[1]], pairs_of[passes[2]]
        rest = passes[0] - of_pairs[0], passes[1] - of_pairs[1], passes[2] - of_pairs[2]
        tallies = self.products["multi_head_attention_forward", rows * length], self.rows[rows, length]
        return list(zip(tallies, (rest, of_pairs), strict=True))


@dataclass(frozen=True, slots=True)
class _Call:
    """A product that is about to run: where it is counted, with its FLOPs by pass."""

    name: str
    parts: list[tuple[Tally, _Passes]]
    args: Any = ()
    tensors: Sequence[Tensor] = ()


def _switch_back(uncompiled: Any) -> None:
    """Undo ``set_stance``, unless other code has called it since: then its stance stays."""
    # A switch notes which stance it replaces, so one more shows the present one. If a release of torch notes
    # it elsewhere, both are None, and the stance before the step returns.
    another: Any = torch.compiler.set_stance("force_eager")
    is_unchanged = getattr(another, "prev", None) is getattr(uncompiled, "stance", None)
    (uncompiled if is_unchanged else another).__exit__(None, None, None)


def _of_backward(
    tensor: Tensor,
    gradient: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> tuple[Any, ...]:
    """Order the arguments of ``Tensor.backward`` as those of ``torch.autograd.backward``."""
    return tensor, gradient, retain_graph, create_graph, inputs


def _edge_of(x: Any) -> Any:
    """Return the place of a tensor in autograd's graph; others, and tensors without one, as they are."""
    return get_gradient_edge(x) if isinstance(x, Tensor) and x.requires_grad else x


def _unchanged(x: Tensor) -> Tensor:
    return x


def _key(x: Any) -> Any:
    """Return what a call's FLOPs depend on in place of a tensor; other arguments as they are."""
    return (tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor) else x


def _cost(name: str, func: Any, args: Any, kwargs: Any) -> _Cost:
    """Return the FLOPs of a product, forward and for the gradients of the tensors that need one."""
    if name in _GROUPED or name in _SCALED:
        a = args[0]
        b = args[1]
        batch = a.shape[0] if name in _GROUPED and a.dim() == 3 and b.dim() == 3 else 1
        forward = 2 * batch * a.shape[-2] * a.shape[-1] * b.shape[-1]
        return forward, forward * (a.requires_grad + b.requires_grad)
    if name in _RECURRENT or name in _CELLS:
        return _recurrent(name, args)
    if name == "linear_cross_entropy":
        forward = 2 * args[0].numel() * args[1].shape[0]
        return forward, forward * (args[0].requires_grad + args[1].requires_grad)
    return _on_meta(name, func, args, kwargs)


def _recurrent(name: str, args: Any) -> _Cost:
    """Count a recurrent layer: every row is multiplied by every matrix of weights."""
    inputs: Tensor = args[0]
    matrices = [x for x in tree_leaves(args[2:]) if isinstance(x, Tensor) and x.dim() == 2]
    rows = inputs.shape[0] if name in _CELLS else inputs.numel() // inputs.shape[-1]
    forward = sum(2 * rows * matrix.numel() for matrix in matrices)
    weight_grads = sum(2 * rows * matrix.numel() for matrix in matrices if matrix.requires_grad)
    if not inputs.requires_grad and not weight_grads:
        return forward, 0

    # The gradients of hidden states are always needed, those of the inputs, by the first matrix, maybe not.
    input_grads = forward
    if not inputs.requires_grad and matrices:
        input_grads -= 2 * rows * matrices[0].numel()
    return forward, weight_grads + input_grads


def _on_meta(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> _Cost:
    """Run a function and its backward pass on the meta device under torch's counter."""
    # One dtype for all: the meta device refuses mixtures that autocast would allow, and FLOPs do not differ.
    dtypes = [x.dtype for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    dtype = torch.complex64 if any(each.is_complex for each in dtypes) else torch.float32
    leaves: list[Tensor] = []  # the copies of tensors that need gradients

    def on_meta(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("meta")
        if not isinstance(x, Tensor):
            return x
        has_gradients = x.is_floating_point() or x.is_complex()
        copy = torch.empty(tuple(x.shape), dtype=dtype if has_gradients else x.dtype, device="meta")
        if has_gradients and x.requires_grad:
            copy.requires_grad_()
            leaves.append(copy)
            copy = copy.view_as(copy)  # in-place functions refuse a leaf
        return copy

    with torch.enable_grad():
        options = {key: value for key, value in kwargs.items() if key != "out"}  # ``out`` refuses gradients
        meta_args, meta_options = tree_map(on_meta, (args, options))
        with FlopCounterMode(display=False, custom_mapping=_extra_formulas()) as counter:
            out = func(*meta_args, **meta_options)
        forward = counter.get_total_flops()
        ends = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
        if not ends or not leaves:
            return forward, 0
        if "conv" in name:  # torch counts the weights' gradient of grouped convolutions too high
            return forward, forward * sum(x.requires_grad for x in args[:2])
        with FlopCounterMode(display=False, custom_mapping=_extra_formulas()) as counter:
            torch.autograd.grad(ends, leaves, [torch.empty_like(x) for x in ends], allow_unused=True)
    return forward, counter.get_total_flops()


def _extra_formulas() -> dict[Any, Any]:
    """Return formulas of products that torch's counter lacks."""
    aten: Any = torch.ops.aten
    return {
        **dict.fromkeys((aten.mv, aten.dot, aten.vdot), lambda a, b, **_: 2 * int(prod(a))),
        aten.addmv: lambda c, a, b, **_: 2 * int(prod(a)),
        aten._cdist_forward: lambda a, b, *_, **__: 2 * int(prod(a) * b[-2]),
        aten._cdist_backward: lambda g, a, b, *_, **__: 2 * int(prod(a) * b[-2]),
    }


def call_terms(calls: Sequence[AttentionCall], stats: SeqStats) -> tuple[Term, ...]:
    """Return terms for the calls of our attention; pairs with other keys grow with the squared lengths."""
    costs: dict[tuple[Basis, int | None], _Rates] = {}
    for call in calls:
        q_lengths = call.cu_seqlens_q.diff().tolist()
        kv_lengths = call.cu_seqlens_kv.diff().tolist()

        basis: Basis = "all_pair"
        window: int | None = None
        share = Fraction(1)
        if call.right == 0 and q_lengths == kv_lengths:
            basis = "pair"
            window = call.left + 1 if call.left >= 0 else None
        else:
            pairs = visible_pairs(q_lengths, kv_lengths, left=call.left, right=call.right, convention="exact")
            share = Fraction(int(pairs), max(1, stats.sum_squares))

        rates = [call.forward * share, call.backward * share, call.again * share]
        costs[basis, window] = _sum(costs.get((basis, window), _NONE), rates)

    return tuple(
        replace(_term("counted_attention", "attention", basis, *cost), window=window)
        for (basis, window), cost in costs.items()
    )


def counted(counter: StepCounter, stats: Sequence[SeqStats], sequences: Sequence[int]) -> Counted:
    """Return the products of a step, from the counts and the number of sequences of each microbatch."""
    return Counted(
        stats=combine(stats),
        slots=tuple(of_microbatch.slots for of_microbatch in stats),
        sequences=tuple(sequences),
        # Copies, because the counter goes on counting.
        products={key: replace(tally) for key, tally in counter.products.items()},
        rows=dict(counter.rows),
        unknown=frozenset(counter.unknown),
        missed_calls=counter.missed_calls,
        squares={size: replace(square) for size, square in counter.squares.items() if square.names},
    )


def counted_layers(
    steps: Sequence[Counted], *, name: str, shards: int = 1, is_compiled: bool = False
) -> tuple[tuple[Layer, ...], bool | None]:
    """Convert the products of steps to layers that scale with slots, sequences and pairs.

    ``shards`` is the number of ranks that share the slots of a pack, of which the counter saw one share.
    Also return whether steps of different lengths agreed; None if slots and sequences do not explain them.
    Raise if then every step would have to be counted and ``is_compiled``, because it would run uncompiled.
    """
    first = steps[0]
    if any(step.missed_calls for step in steps):
        raise ValueError(
            f"a part of {name} ran compiled or from a CUDA graph in a counted step, and so showed no "
            "products. Pass flops_model=. If the step calls torch.compiler.set_stance, call it before."
        )
    total = first.flops[0]
    if not total or not first.stats.slots:
        raise ValueError(
            f"torch counted {total} FLOPs of matmuls in {name} on {first.stats.slots} slots. Run a whole "
            "step on a batch with tokens; kernels that torch cannot count need FlopsModel.register."
        )
    unknown = set().union(*(step.unknown for step in steps))
    if unknown:
        warn(
            f"FLOPs of {name} are too few: torch has no formula for {', '.join(sorted(unknown))}. "
            "Add the family with FlopsModel.register, or pass flops_model=.",
            MeasureWarning,
        )

    per_slot, per_sequence, agree = linear_fit(steps, name, is_compiled=is_compiled)
    if agree and any(step.other_rows(shards) for step in steps):
        agree = len(steps) >= TRIALS
    terms: list[Term] = []
    bases: tuple[tuple[Basis, _Rates], ...] = (("token", per_slot), ("sequence", per_sequence))
    for basis, rates in bases:
        if any(rates):
            terms.append(_term("counted", "linear", basis, *(rate * shards for rate in rates)))
    terms += _row_terms(first)
    return (Layer(path="", terms=tuple(terms)),), agree


# A few steps whose products have rows of some other number agree by chance: half of the tokens, rounded up in
# every sequence, are half of the slots whenever all lengths are even. So many steps hardly do.
TRIALS = 8

# FLOPs of a slot, of a sequence or of a pair: forward, backward, and run again by checkpointing.
_Rates: TypeAlias = tuple[Fraction, Fraction, Fraction]
_NONE: _Rates = (Fraction(0), Fraction(0), Fraction(0))
_SAME = Fraction(1, 10**9)  # two counts are equal within this share of them


def linear_fit(
    steps: Sequence[Counted], name: str, *, is_compiled: bool = False
) -> tuple[_Rates, _Rates, bool | None]:
    """Return FLOPs per slot and per sequence, and whether they explain several steps; None if they cannot.

    One step shows them by the rows of its products. If another step contradicts that, both numbers are solved
    from the two. If a third contradicts those too, a message says what is not linear; of a compiled model, an
    error says it.
    """
    points = [_Point(step) for step in steps]
    first, *others = points

    by_slot, by_sequence = _by_rows(steps[0])
    per_slot = _divided(by_slot, first.slots)
    per_sequence = _divided(by_sequence, max(1, first.sequences))
    if all(other.fits(per_slot, per_sequence) for other in others):
        return per_slot, per_sequence, bool(others)

    for other in others:
        solved = _solve(first, other)
        if solved is None:
            continue
        per_slot, per_sequence = solved
        if min(per_slot) >= 0 and all(point.fits(per_slot, per_sequence) for point in others):
            return per_slot, per_sequence, len(others) > 1

    difference = _nonlinear(steps)
    if is_compiled:
        raise ValueError(
            f"the FLOPs of {name} are not proportional to the slots: {difference}. So every step would have "
            "to be counted, and counted steps run uncompiled. Pass flops_model=, or do not compile."
        )
    rank_zero_info(
        f"The FLOPs of {name} are counted in every step, because they are not proportional to the slots: "
        f"{difference}. Counting costs some microseconds for every call of torch, and what torch.compile "
        "compiled runs uncompiled. Attention by varlen_attention or scaled_dot_product_attention is counted "
        "by lengths. To count nothing, pass flops_model=."
    )
    slots = sum(point.slots for point in points)
    sums = [sum(flops) for flops in zip(*(point.flops for point in points), strict=True)]
    # Whole numbers, because the count of every step replaces this estimate, whose sum must not be rounded.
    forward, backward, again = (Fraction(flops // slots) for flops in sums)
    return (forward, backward, again), _NONE, None


def _divided(flops: Sequence[int], number: int) -> _Rates:
    """Divide FLOPs of each pass by a number."""
    forward, backward, again = flops
    return Fraction(forward, number), Fraction(backward, number), Fraction(again, number)


def _sum(first: Sequence[Fraction | int], second: Sequence[Fraction | int]) -> _Rates:
    """Add FLOPs of each pass."""
    forward, backward, again = (Fraction(one + other) for one, other in zip(first, second, strict=True))
    return forward, backward, again


def _solve(first: _Point, other: _Point) -> tuple[_Rates, _Rates] | None:
    """Solve two steps for FLOPs per slot and per sequence; None if their lengths have one proportion."""
    # Cramer's rule for slots * per_slot + sequences * per_sequence = flops.
    determinant = first.slots * other.sequences - other.slots * first.sequences
    if determinant == 0:
        return None
    flops = list(zip(first.flops, other.flops, strict=True))  # both steps' forward, then the other passes
    of_slots = [one * other.sequences - two * first.sequences for one, two in flops]
    of_sequences = [first.slots * two - other.slots * one for one, two in flops]
    return _divided(of_slots, determinant), _divided(of_sequences, determinant)


class _Point:
    """The slots, sequences and FLOPs of a counted step."""

    def __init__(self, step: Counted) -> None:
        self.slots = step.stats.slots
        self.sequences = sum(step.sequences)
        self.flops = step.flops

    def fits(self, per_slot: _Rates, per_sequence: _Rates) -> bool:
        """Return whether FLOPs per slot and per sequence give this step's FLOPs."""
        return all(
            abs(of_slot * self.slots + of_sequence * self.sequences - flops) <= _SAME * flops
            for of_slot, of_sequence, flops in zip(per_slot, per_sequence, self.flops, strict=True)
        )


def _by_rows(step: Counted) -> tuple[_Passes, _Passes]:
    """Divide a step's FLOPs into those of slots and those of products with one row for each sequence."""
    by_slot = Tally()
    by_sequence = Tally()
    for (_, rows), tally in step.products.items():
        one_row_each = rows in step.sequences and rows not in step.slots
        part = by_sequence if one_row_each else by_slot
        part.add(tally.passes)
    return by_slot.passes, by_sequence.passes


def _nonlinear(steps: Sequence[Counted]) -> str:
    """Say which functions took other FLOPs per slot in the step that differs most from the first."""
    costs = [Fraction(sum(step.flops), step.stats.slots) for step in steps]
    other = max(range(1, len(steps)), key=lambda i: abs(costs[i] - costs[0]))
    first = _per_slot(steps[0])
    second = _per_slot(steps[other])
    functions = sorted({*first, *second})
    changed = [name for name in functions if any(map(_differ, first[name], second[name]))]

    before = float(sum(sum(first[name]) for name in changed))
    after = float(sum(sum(second[name]) for name in changed))
    return (
        f"{', '.join(changed)} took {before:.4g} FLOPs a slot, forward and backward, in a step of "
        f"{steps[0].stats.slots} slots and {after:.4g} in one of {steps[other].stats.slots}"
    )


def _differ(one: Fraction, other: Fraction) -> bool:
    return abs(float(one - other)) > float(_SAME) * float(one + other)


def _per_slot(step: Counted) -> defaultdict[str, _Rates]:
    """Return the FLOPs per slot of each function; 0 for functions that the step did not call."""
    per_slot: defaultdict[str, _Rates] = defaultdict(lambda: _NONE)
    for (function, _), tally in step.products.items():
        per_slot[function] = _sum(per_slot[function], _divided(tally.passes, step.stats.slots))
    return per_slot


def _row_terms(step: Counted) -> list[Term]:
    """Return a term for attention in padded rows, whose pairs torch counts as if no mask hid any."""
    rates = _NONE
    for (rows, length), tally in step.rows.items():
        # In a call over all slots, a slot has ``length`` keys, padding included, but at most a batch row's
        # length, which a decoder's rows may exceed. In other calls, a slot has the keys of its sequence.
        pairs = Fraction(max(step.stats.sum_squares, 1))
        if rows * length >= min(step.slots):
            pairs = min(Fraction(length), Fraction(max(step.slots), rows)) * step.stats.slots
        rates = _sum(rates, [flops / pairs for flops in tally.passes])
    if not step.rows:
        return []
    return [_term("counted_attention", "attention", "pair", *rates)]


def _term(
    name: str, kind: Kind, basis: Basis, forward: Fraction, backward: Fraction, again: Fraction
) -> Term:
    """Return a term whose backward pass is not divided into gradients of activations and of weights."""
    return Term(
        name=name,
        kind=kind,
        basis=basis,
        forward=_whole_if_possible(forward),
        input_grad=_whole_if_possible(backward),
        weight_grad=0,
        again=_whole_if_possible(again),
    )


def _whole_if_possible(cost: Fraction) -> int | Fraction:
    return int(cost) if cost.denominator == 1 else cost
