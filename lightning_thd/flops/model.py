"""SeqStats -> FlopsBreakdown: the FLOPs of training one or several models on sequences of known lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from lightning_thd._checks import choice, flags, instance, whole_number
from lightning_thd.flops.backward import layers_of_module
from lightning_thd.flops.families.registry import read_config, register
from lightning_thd.flops.squares import hidden_pairs
from lightning_thd.flops.terms import (
    Basis,
    Causal,
    Cost,
    FlopsBreakdown,
    Kind,
    Layer,
    Recompute,
    Term,
    Tokens,
    units,
)
from lightning_thd.flops.torch_counter import StepCounter, call_terms, counted, counted_layers
from lightning_thd.stats import COUNTS, SeqStats, Vision, Window
from lightning_thd.warnings import MeasureWarning, warn

if TYPE_CHECKING:
    from torch import nn

_Table: TypeAlias = dict[tuple[str, Basis, Window | None], Cost]

# Which terms of a checkpointed layer run again, by checkpointing policy.
_RUN_AGAIN: dict[str, Callable[[Term], bool]] = {
    "none": lambda term: False,
    "full": lambda term: True,
    "early_stop": lambda term: not term.last,
    "selective": lambda term: term.kind == "attention",
}

_COLUMN: dict[Kind, Kind] = {"router": "linear", "embedding": "linear"}


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopsModel:
    """Counts a model's FLOPs: a list of layers, each a list of terms that multiply a count of the batch.

    Attributes:
        name: the name of the family, for messages.
        layers: the layers of the model with their terms.
        causal: how many query-key pairs of a causal layer count: "half" of the square (Megatron), "exact"
            (with the diagonal), or the "full" square.
        tokens: whether terms multiply "real" tokens or "slots".
        embedding: whether the embedding table counts as a matmul, as in verl.
        router: whether the routers of expert layers count.
        merge: number of patches that the vision projector merges into one.
        patch: edge of an image patch in pixels; None without a vision tower.
        recompute: what activation checkpointing runs again: "none"; "full", every layer; "early_stop", every
            layer without its last matmul (torch's non-reentrant checkpoint); "selective", attention only.
        windows: the attention windows of the layers, for ``SeqStats.from_lengths(windows=...)``.
        vision_windows: the vision tower's window edges in patches, for ``SeqStats.from_lengths``.
    """

    name: str
    layers: tuple[Layer, ...]
    causal: Causal = "half"
    tokens: Tokens = "real"
    embedding: bool = False
    router: bool = False
    merge: int = 4
    patch: int | None = None
    recompute: Recompute = "none"
    windows: tuple[Window, ...] = field(init=False, repr=False, compare=False)
    vision_windows: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _tables: dict[str, _Table] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_conventions(**{name: getattr(self, name) for name in _CHOICES})
        whole_number(self.merge, "merge", least=1, advice="It counts the patches that become one token.")
        flags(embedding=self.embedding, router=self.router)
        tables = {
            "training": _sum_terms(self, lambda layer, term: term.training),
            "forward": _sum_terms(self, lambda layer, term: term.forward),
        }
        for policy, again in _RUN_AGAIN.items():
            tables[policy] = _sum_terms(self, partial(_cost_again, again))

        # Dicts, because each window must come once and in a fixed order.
        windowed = [(basis, window) for _, basis, window in tables["forward"] if window is not None]
        of_text = dict.fromkeys(window for basis, window in windowed if basis in ("pair", "all_pair"))
        of_vision = dict.fromkeys(window for basis, window in windowed if basis == "patch_window_pair")
        object.__setattr__(self, "_tables", tables)
        object.__setattr__(self, "windows", tuple(of_text))
        object.__setattr__(self, "vision_windows", tuple(of_vision))

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        causal: Causal = "half",
        tokens: Tokens = "real",
        embedding: bool = False,
        router: bool = False,
        recompute: Recompute = "none",
    ) -> FlopsModel:
        """Build the FLOPs model of a transformers config; only an incomplete config.json needs transformers.

        ``config`` is a ``PretrainedConfig`` or the content of a ``config.json``. The other arguments are
        attributes of the class.

        Raises:
            ValueError: if the family is not known; register it, or use ``from_module``.
        """
        name, layers, merge, patch = read_config(config)
        conventions: Any = {"causal": causal, "tokens": tokens, "embedding": embedding, "router": router}
        return cls(name=name, layers=layers, merge=merge, patch=patch, recompute=recompute, **conventions)

    @staticmethod
    def from_module(module: nn.Module, run: Callable[[], object], *, stats: SeqStats) -> FlopsModel:
        """Build a FLOPs model from torch's count of one training step, for unknown configs.

        Args:
            module: the model.
            run: a function that runs a forward and a backward pass.
            stats: the counts of the batch that ``run`` uses.
        """
        name = type(module).__name__
        counter = StepCounter(module)
        counter.start()
        try:
            run()
        finally:
            counter.stop()
        step = counted(counter, [stats], [stats.sequences])
        layers, _ = counted_layers([step], name=name)
        layers = (*layers, Layer(path="", terms=call_terms(counter.calls, stats)))

        packs = [(stats, (1, stats.slots))]
        hidden = hidden_pairs(step.squares, packs, sum(step.flops[:2]), causal="half", tokens="slots")
        if hidden is not None:
            warn(f"FLOPs of {name} are {hidden.times:.2f} times too high: {hidden.reason}", MeasureWarning)
        return FlopsModel(name=name, layers=layers, tokens="slots").with_recompute("auto")

    register = staticmethod(register)

    @property
    def vision(self) -> Vision:
        """Return the sizes that a collator needs to count images, for ``THDBatch.collate(vision=...)``."""
        return Vision(windows=self.vision_windows, patch=self.patch)

    @property
    def sees_images(self) -> bool:
        """Return whether the layers include a vision tower."""
        return any("patch" in basis for _, basis, _ in self._tables["forward"])

    def training_flops(self, stats: SeqStats, *, recompute: Recompute | None = None) -> FlopsBreakdown:
        """Return the FLOPs of a forward and backward pass over ``stats``.

        Args:
            stats: the batches, counted with this model's windows.
            recompute: the policy of activation checkpointing; None uses the attribute ``recompute``.
        """
        self._check(stats)
        policy = self.recompute if recompute is None else recompute
        check_conventions(recompute=policy)
        again = self._multiply(self._tables[policy], stats)
        return FlopsBreakdown(
            **self._multiply(self._tables["training"], stats), recompute=sum(again.values())
        )

    def forward_flops(self, stats: SeqStats) -> FlopsBreakdown:
        """Return the FLOPs of a forward pass over ``stats``: validation, testing, prediction."""
        self._check(stats)
        return FlopsBreakdown(**self._multiply(self._tables["forward"], stats))

    def for_module(self, module: nn.Module) -> FlopsModel:
        """Return a copy with ``module``'s backward pass and, if ``recompute="none"``, its checkpointing."""
        layers, policy_of_module = layers_of_module(self.layers, module)
        policy = policy_of_module if self.recompute == "none" else self.recompute
        return replace(self, layers=layers, recompute=policy)

    def with_recompute(self, recompute: Recompute | Literal["auto"]) -> FlopsModel:
        """Return a copy of a counted model with a policy of checkpointing; counted repetitions replace it.

        "auto" is what the counted steps ran again. If they ran nothing again, another policy repeats whole
        forwards, because the layers are unknown.
        """
        if any(term.again for layer in self.layers for term in layer.terms):
            return replace(self, recompute="none" if recompute == "none" else "full")
        layers = tuple(
            replace(layer, terms=tuple(replace(term, again=None) for term in layer.terms))
            for layer in self.layers
        )
        return replace(self, layers=layers, recompute="none" if recompute == "auto" else recompute)

    def of_kind(self, kind: Kind) -> FlopsModel:
        """Return a copy with only the terms of one kind."""
        layers = tuple(
            replace(layer, terms=tuple(term for term in layer.terms if term.kind == kind))
            for layer in self.layers
        )
        return replace(self, layers=layers)

    def _multiply(self, table: _Table, stats: SeqStats) -> dict[str, int]:
        """Return the FLOPs of each column of ``FlopsBreakdown`` that the table has."""
        columns: dict[str, int] = {}
        for (column, basis, window), flops in table.items():
            count, parts = units(
                basis, window, stats, causal=self.causal, tokens=self.tokens, merge=self.merge
            )
            columns[column] = columns.get(column, 0) + flops * count // parts
        return columns

    def _check(self, stats: SeqStats) -> None:
        """Refuse stats that lack a window of this model, or that were counted for another model."""
        missing = [window for window in self.windows if window not in stats.windows]
        if stats.slots and missing:
            raise ValueError(
                f"The model {self.name!r} has attention windows {missing}, which the stats do not count "
                f"(windows={list(stats.windows)}). Build them with windows=flops_model.windows."
            )
        extra = [window for window in stats.windows if window not in self.windows]
        if extra:
            raise ValueError(
                f"The stats count windows {extra}, but {self.name!r} has {list(self.windows) or 'none'}. "
                "They were made for another model: build them with windows=flops_model.windows."
            )
        if stats.vision_patches and not self.sees_images:
            raise ValueError(
                f"The stats hold {stats.vision_patches} image patches, but no vision tower is known for "
                f"{self.name!r}. Register one: FlopsModel.register({self.name!r}, builder)."
            )
        counted_edges = [edge for edge, _ in stats.vision_window_pairs]
        missing_edges = [edge for edge in self.vision_windows if edge not in counted_edges]
        if stats.vision_patches and missing_edges:
            raise ValueError(
                f"The vision tower of {self.name!r} has windows of {missing_edges} patches, which the stats "
                "do not count. Build them with vision_windows=flops_model.vision_windows."
            )


_CHOICES: dict[str, tuple[str, ...]] = {
    "causal": ("half", "exact", "full"),
    "tokens": ("real", "slots"),
    "recompute": tuple(_RUN_AGAIN),
}


def _sum_terms(model: FlopsModel, cost: Callable[[Layer, Term], Cost]) -> _Table:
    """Merge terms that multiply the same count, so that a batch is counted with a few products."""
    is_counted = {"embedding": model.embedding, "router": model.router}
    table: _Table = {}
    for layer in model.layers:
        for term in layer.terms:
            if not is_counted.get(term.kind, True):
                continue
            flops = cost(layer, term)
            if flops:
                column = _COLUMN.get(term.kind, term.kind)
                key = column, term.basis, term.window
                table[key] = table.get(key, 0) + flops
    return table


def _cost_again(runs_again: Callable[[Term], bool], layer: Layer, term: Term) -> Cost:
    """Return the FLOPs per unit that checkpointing runs again."""
    if not layer.recomputable or not runs_again(term):
        return 0
    return term.forward if term.again is None else term.again


def checked_flops(flops_model: FlopsModel | None) -> FlopsModel | None:
    """Return the argument ``flops_model``, or raise TypeError if it is of another type."""
    if flops_model is not None:
        instance(flops_model, "flops_model", FlopsModel, advice="Pass FlopsModel.from_config(config).")
    return flops_model


def check_conventions(**conventions: str) -> None:
    """Refuse unknown values of ``causal``, ``tokens`` or ``recompute``."""
    for name, value in conventions.items():
        choice(value, name, *_CHOICES[name])


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One of the models that a step runs: its path, and how often a token passes through it."""

    name: str
    model: FlopsModel
    training: float = 1.0  # passes forward and backward
    forward: float = 0.0  # passes under ``no_grad``


def join(members: Sequence[Member]) -> FlopsModel:
    """Join the FLOPs models of several models that run on the same batches into one FLOPs model."""
    instance(members, "members", list, tuple, advice="Pass a list of Member.")
    if not members:
        raise ValueError("No model was given to count. Give one or more members.")
    first = members[0]
    if len(members) == 1 and (first.training, first.forward) == (1.0, 0.0):
        return first.model

    models = [member.model for member in members]
    conventions = {(model.causal, model.tokens, model.embedding, model.router) for model in models}
    if len(conventions) > 1:
        raise ValueError(
            f"{', '.join(member.name for member in members)} count under different conventions (causal, "
            f"tokens, embedding, router): {sorted(conventions)}. Build all of them with the same conventions."
        )

    # Different policies become "full": each term then says by itself what its model runs again.
    policies = {member.model.recompute for member in members if member.training} - {"none"}
    policy: Recompute = "none"
    if policies:
        policy = policies.pop() if len(policies) == 1 else "full"
    layers = [_scaled_layer(layer, member, policy) for member in members for layer in member.model.layers]
    patch = next((model.patch for model in models if model.sees_images), None)
    return replace(
        first.model,
        name=" + ".join(model.name for model in models),
        layers=tuple(layers),
        recompute=policy,
        patch=patch,
    )


def _scaled_layer(layer: Layer, member: Member, policy: Recompute) -> Layer:
    """Return a layer with its FLOPs multiplied by how often a token passes through its model."""
    is_recomputed = bool(member.training) and member.model.recompute != "none"
    return replace(
        layer,
        recomputable=layer.recomputable and is_recomputed,
        terms=tuple(_scaled_term(term, member, policy) for term in layer.terms),
    )


def _scaled_term(term: Term, member: Member, policy: Recompute) -> Term:
    if term.basis == "merged_patch":  # models may merge different numbers of patches
        names = ("forward", "input_grad", "weight_grad")
        merged: Any = {name: getattr(term, name) // member.model.merge for name in names}
        term = replace(term, basis="patch", **merged)

    again: Cost = 0
    policy_of_model = member.model.recompute
    if policy_of_model == policy or _RUN_AGAIN[policy_of_model](term):
        again = term.forward if term.again is None else term.again
    return replace(
        term,
        forward=round(term.forward * (member.training + member.forward)),
        input_grad=round(term.input_grad * member.training),
        weight_grad=round(term.weight_grad * member.training),
        again=round(again * member.training),
    )


def num_ints(model: FlopsModel | None) -> int:
    """Return the length of the list that ``to_ints`` makes for ``model``."""
    if model is None:
        return len(COUNTS)
    return len(COUNTS) + len(model.windows) + len(model.vision_windows)


def to_ints(stats: SeqStats, model: FlopsModel | None) -> list[int]:
    """Return a list that ranks can exchange: the counts in a fixed order, then the pairs of each window."""
    counts = [int(getattr(stats, name)) for name in COUNTS]
    if model is None:
        return counts
    pairs = dict(stats.window_pairs)
    vision_pairs = dict(stats.vision_window_pairs)
    return [
        *counts,
        *(pairs.get(window, 0) for window in model.windows),
        *(vision_pairs.get(edge, 0) for edge in model.vision_windows),
    ]


def from_ints(values: Sequence[int] | Sequence[float], model: FlopsModel | None) -> SeqStats:
    """Return the ``SeqStats`` that a list made by ``to_ints`` describes."""
    assert len(values) == num_ints(model), "the list was made for another model"
    integers = iter([int(value) for value in values])
    counts: dict[str, Any] = {name: next(integers) for name in COUNTS}
    if model is None:
        return SeqStats(**counts)
    pairs = tuple((window, next(integers)) for window in model.windows)
    vision_pairs = tuple((edge, next(integers)) for edge in model.vision_windows)
    return SeqStats(**counts, window_pairs=pairs, vision_window_pairs=vision_pairs)
