"""Terms and layers of a FLOP count, and the FLOPs of a batch by part.

A term is FLOPs per unit of a count in ``SeqStats``; a layer is a list of terms. A multiply-add is two FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, TypeAlias

from lightning_thd.stats import Blocks, SeqStats, Window

Cost: TypeAlias = int | Fraction  # FLOPs per unit; counted steps give fractions
Kind: TypeAlias = Literal["linear", "attention", "logits", "vision", "embedding", "router"]
# What a term multiplies. "pair": query-key pairs of causal attention, "all_pair": of attention both ways,
# "cross_*": of attention to other inputs.
Basis: TypeAlias = Literal[
    "token",
    "sequence",
    "pair",
    "all_pair",
    "cross_token",
    "cross_pair",
    "patch",
    "patch_pair",
    "patch_window_pair",
    "merged_patch",
]
Causal: TypeAlias = Literal["half", "exact", "full"]
Tokens: TypeAlias = Literal["real", "slots"]
Recompute: TypeAlias = Literal["none", "full", "early_stop", "selective"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """FLOPs per unit of one count."""

    name: str  # the name of the operation, for tables
    kind: Kind  # column of ``FlopsBreakdown``; "embedding" and "router" count in column "linear"
    basis: Basis  # the count of the batch that the FLOPs multiply
    forward: Cost  # FLOPs per unit in the forward pass
    input_grad: Cost  # FLOPs per unit of the gradient with respect to the activations
    weight_grad: Cost  # FLOPs per unit of the gradient with respect to the weights
    window: Window | None = None  # the attention window; with basis "patch_window_pair" its edge in patches
    last: bool = False  # the layer's last operation, which torch's checkpointing need not run again
    again: Cost | None = None  # FLOPs per unit that checkpointing runs again; None means ``forward``

    @property
    def training(self) -> Cost:
        """Return the FLOPs per unit of the forward and the backward pass."""
        return self.forward + self.input_grad + self.weight_grad


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """Terms of one module, which activation checkpointing wraps as a whole or not at all."""

    path: str  # the name in ``named_modules`` without the prefix of the decoder: ``"layers.0"``
    terms: tuple[Term, ...]
    recomputable: bool = True  # whether activation checkpointing wraps the layer when it is on


def lone(path: str, term: Term) -> Layer:
    """Return a layer of one term, which activation checkpointing does not wrap."""
    return Layer(path=path, terms=(term,), recomputable=False)


def matmul(
    name: str, macs: int, *, kind: Kind = "linear", basis: Basis = "token", last: bool = False
) -> Term:
    """Return a term for a weight applied to every unit of ``basis``, at 2 FLOPs per multiply-add."""
    cost = 2 * macs
    return Term(name=name, kind=kind, basis=basis, forward=cost, input_grad=cost, weight_grad=cost, last=last)


def scores(
    heads: int,
    qk_dim: int,
    v_dim: int,
    *,
    window: Window | None = None,
    basis: Basis = "pair",
    kind: Kind = "attention",
    name: str = "attention",
) -> Term:
    """Return a term for attention's two products, per query-key pair; ``window=None`` is full attention."""
    cost = 2 * heads * (qk_dim + v_dim)
    return Term(
        name=name, kind=kind, basis=basis, forward=cost, input_grad=2 * cost, weight_grad=0, window=window
    )


def recurrence(name: str, flops: int) -> Term:
    """Return a term for a scan over the tokens, which has no weights."""
    return Term(name=name, kind="linear", basis="token", forward=flops, input_grad=2 * flops, weight_grad=0)


def units(
    basis: Basis, window: Window | None, stats: SeqStats, *, causal: Causal, tokens: Tokens, merge: int
) -> tuple[int, int]:
    """Return the count that a term multiplies, as numerator and denominator: half a square may end in .5."""
    if basis == "token":
        return (stats.real_tokens if tokens == "real" else stats.slots), 1

    if basis == "pair":
        # Without a window, a sequence of s tokens has s (s + 1) / 2 pairs.
        twice = stats.sum_squares + stats.real_tokens if window is None else 2 * _pairs_in(stats, window)
        # Twice the pairs holds the diagonal twice, a square holds it once; ``Blocks`` have no diagonal.
        square = twice if isinstance(window, Blocks) else twice - stats.real_tokens
        return {"half": (square, 2), "exact": (twice, 2), "full": (square, 1)}[causal]

    if basis == "all_pair" and window is not None:  # the pairs of a causal window, mirrored
        return 2 * _pairs_in(stats, window) - stats.real_tokens, 1
    if basis == "patch_window_pair":
        return sum(pairs for edge, pairs in stats.vision_window_pairs if edge == window), 1
    count = int(getattr(stats, _COUNTS[basis]))
    return count, (merge if basis == "merged_patch" else 1)


def _pairs_in(stats: SeqStats, window: Window) -> int:
    """Return the pairs inside an attention window; 0 if the stats do not count it."""
    return sum(pairs for counted, pairs in stats.window_pairs if counted == window)


_COUNTS: dict[Basis, str] = {
    "sequence": "sequences",
    "all_pair": "sum_squares",
    "cross_token": "cross_tokens",
    "cross_pair": "cross_pairs",
    "patch": "vision_patches",
    "patch_pair": "vision_squares",
    "merged_patch": "vision_patches",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopsBreakdown:
    """FLOPs by part; Python integers, which do not overflow.

    Attributes:
        linear: projections, MLPs, experts, scans.
        attention: scores and their product with the values.
        logits: the output projection.
        vision: vision tower and projector.
        recompute: forward passes run again by activation checkpointing.
    """

    linear: int = 0
    attention: int = 0
    logits: int = 0
    vision: int = 0
    recompute: int = 0

    @property
    def model(self) -> int:
        """Return the FLOPs that the model needs: the numerator of MFU."""
        return self.linear + self.attention + self.logits + self.vision

    @property
    def hardware(self) -> int:
        """Return the FLOPs that the device runs, recomputation included: the numerator of HFU."""
        return self.model + self.recompute

    def __add__(self, other: FlopsBreakdown) -> FlopsBreakdown:
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in COLUMNS}
        return FlopsBreakdown(**sums)


COLUMNS = ("linear", "attention", "logits", "vision", "recompute")
