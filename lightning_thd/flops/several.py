"""FlopsModels of a policy, a reference, a teacher, ... -> one FlopsModel of all that a step runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_thd._checks import instance
from lightning_thd.flops.model import FlopsModel
from lightning_thd.flops.terms import Layer, Recompute, Term


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One of the models that a step runs, and how often tokens pass through it.

    Attributes:
        name: where it stands in the module, for ``FlopsBreakdown.models``.
        model: counts its FLOPs, with the backward pass that its own weights ask for.
        training: how often a token passes through it forward and backward.
        forward: how often a token passes through it under ``no_grad``.
    """

    name: str
    model: FlopsModel
    training: float = 1.0
    forward: float = 0.0


def join(members: Sequence[Member]) -> FlopsModel:
    """Join FLOPs models of models that run on the same batches into one that counts their sum.

    A policy of 600 training FLOPs and a reference of the same size, run under ``no_grad``, are 800. A model
    that is passed through half the tokens counts half, attention too.

    Args:
        members: the models, counted under the same conventions.

    Returns:
        A FlopsModel whose ``FlopsBreakdown.models`` names every member. One model that trains on every token
        once is returned as it is.

    Raises:
        ValueError: for no member, or members that count pairs or tokens differently.
    """
    instance(members, "members", list, tuple, advice="Pass a list of Member.")
    for one in members:
        instance(one, "A member", Member, advice="Pass Member(name=..., model=...).")
    if not members:
        raise ValueError("No model was given to count. Give one or more members.")
    first = members[0]
    if len(members) == 1 and (first.training, first.forward) == (1.0, 0.0):
        return first.model
    conventions = {
        (one.model.causal, one.model.tokens, one.model.embedding, one.model.router) for one in members
    }
    if len(conventions) > 1:
        raise ValueError(
            f"{', '.join(one.name for one in members)} count under different conventions (causal, tokens, "
            f"embedding, router): {sorted(conventions)}. Build all of them with the same."
        )
    policy = _policy(members)
    layers = [layer for one in members for layer in _scaled_layers(one, policy)]
    name = " + ".join(one.model.name for one in members)
    return replace(first.model, name=name, layers=tuple(layers), recompute=policy)


def _policy(members: Sequence[Member]) -> Recompute:
    """Return the checkpointing policy of the first trained model that has one."""
    trained = [one.model for one in members if one.training and one.model.recompute != "none"]
    return trained[0].recompute if trained else "none"


def _scaled_layers(member: Member, policy: Recompute) -> list[Layer]:
    again = bool(member.training) and member.model.recompute != "none" and policy != "none"
    return [
        replace(
            layer,
            model=member.name,
            recomputable=layer.recomputable and again,
            terms=tuple(_scaled(term, member) for term in layer.terms),
        )
        for layer in member.model.layers
    ]


def _scaled(term: Term, member: Member) -> Term:
    if term.basis == "merged_patch":  # models may merge different numbers of patches
        merge = member.model.merge
        term = replace(
            term,
            basis="patch",
            forward=term.forward // merge,
            input_grad=term.input_grad // merge,
            weight_grad=term.weight_grad // merge,
        )
    return replace(
        term,
        forward=round(term.forward * (member.training + member.forward)),
        input_grad=round(term.input_grad * member.training),
        weight_grad=round(term.weight_grad * member.training),
        again=round(term.forward * member.training),
    )
