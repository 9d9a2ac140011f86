"""Router logits of a mixture of experts -> sums per group of tokens, over all layers and pipeline stages.

A balancing loss multiplies each expert's share of the tokens by the expert's mean probability (Switch
Transformers, arXiv:2101.03961, equations 4 to 6), both over all layers. So each stage of a pipeline adds the
sums of its layers to the sums that it received, and sends the result to the next stage.
Legend: T slots, N tokens (more than T if sequences share slots), E experts, G groups of tokens.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_thd._pages import see
from lightning_thd.parallel.pipeline.channel import Channel, Receive, Send

FUNCTION = "load_balancing_loss_func"  # the name of transformers' balancing loss in a model's Python module
Scores = Literal["softmax", "sigmoid"]


def router_sums(
    logits: Sequence[Tensor],
    groups: Tensor,
    size: int,
    *,
    experts: int,
    top_k: int,
    scores: Scores = "softmax",
    slots: Tensor | None = None,
) -> Tensor:
    """Sum router statistics over all layers and over the tokens of each group; ``size`` is G.

    The result is ``[G, 2 E + 1]``, fp32 or wider: E sums of probabilities, E counts of choices, and a sum of
    squared logsumexps. ``logits`` holds ``[T, E]`` for each layer. ``groups``, int64 ``[N]``, is the group of
    each token. ``slots``, int64 ``[N]``, is the slot of each token; None if token i is in slot i.
    """
    wide = torch.float32
    num_slots = groups.numel()
    if logits:  # a pipeline stage may have no layer with experts
        wide = torch.promote_types(logits[0].dtype, torch.float32)
        num_slots = logits[0].shape[0]
    rows = torch.zeros(num_slots, 2 * experts + 1, dtype=wide, device=groups.device)
    for layer in logits:
        values = layer.to(groups.device, wide)
        if scores == "softmax":
            probabilities = values.softmax(-1)
        else:
            probabilities = values.sigmoid()
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        best = probabilities.topk(top_k, dim=-1).indices
        chosen = torch.zeros_like(probabilities).scatter_(1, best, 1.0)
        squared_logsumexp = values.logsumexp(-1, keepdim=True).square()
        rows = rows + torch.cat([probabilities, chosen, squared_logsumexp], dim=1)

    if slots is not None:
        rows = rows.index_select(0, slots)
    return rows.new_zeros(size, rows.shape[1]).index_add(0, groups, rows)


def balance_of(probabilities: Tensor, chosen: Tensor, top_k: int) -> Tensor:
    """Compute the balancing loss ``[G]`` of groups from their sums ``[G, E]``; 0 for an empty group."""
    num_tokens = (chosen.sum(1) / top_k).clamp_min(1.0)  # [G], summed over layers
    return (chosen * probabilities).sum(1) / num_tokens.square() * chosen.shape[1]


def module_of_loss(inner: Any) -> Any:
    """Return the Python module in which a model's forward looks up its balancing-loss function, or None."""
    for kind in type(inner).__mro__:
        module = sys.modules.get(kind.__module__)
        if hasattr(module, FUNCTION):
            return module
    return None


def routers_of(inner: nn.Module) -> list[tuple[type[nn.Module], int]]:
    """Return the classes of layers that return router logits, each with the logits' index in its output."""
    recorders: list[Any] = []  # classes, or objects that name a class and an index
    part: Any
    for part in inner.modules():
        if not hasattr(type(part), "can_record_outputs"):  # a property of transformers' models only
            continue
        of_logits = part.can_record_outputs.get("router_logits")
        if isinstance(of_logits, list):
            recorders += of_logits
        elif of_logits is not None:
            recorders.append(of_logits)

    classes = [(getattr(each, "target_class", each), getattr(each, "index", 0)) for each in recorders]
    return [(kind, index) for kind, index in dict.fromkeys(classes) if isinstance(kind, type)]


def require_gradients(inner: nn.Module, logits: Sequence[Tensor]) -> None:
    """Raise ValueError if routers are trained, but gave logits through which no gradient flows back."""
    num_attached = sum(layer.requires_grad for layer in logits)
    if num_attached == len(logits) or not torch.is_grad_enabled():
        return

    kinds = tuple(kind for kind, _ in routers_of(inner))
    routers = [module for module in inner.modules() if isinstance(module, kinds)]
    num_trained = sum(any(p.requires_grad for p in router.parameters()) for router in routers)
    if num_attached < num_trained:
        raise ValueError(
            f"{type(inner).__name__} returns router logits without a gradient, as activation checkpoints "
            "with use_reentrant=True do: its routers would not be balanced. Set use_reentrant=False. See "
            f"{see('experts')}"
        )


def wants_balance(inner: Any) -> bool:
    """Return whether a model's config asks for a balancing loss over the routers of its layers."""
    return bool(getattr(inner.config.get_text_config(decoder=True), "output_router_logits", None))


def scores_of(inner: Any) -> Scores | None:
    """Return how a model's balancing loss turns logits into probabilities; None if its formula is unknown."""
    module = module_of_loss(inner)
    if module is not None:
        return "softmax" if _is_switch(getattr(module, FUNCTION)) else None
    config = inner.config.get_text_config(decoder=True)
    # Nobody knows the formula of a router that returns something else before its logits.
    scores = {None if index else _scores_in(kind, config) for kind, index in routers_of(inner)}
    return scores.pop() if len(scores) == 1 else None


@functools.lru_cache(maxsize=32)
def _is_switch(function: Callable[..., Any]) -> bool:
    """Return whether a family's balancing function computes the formula of ``balance_of``."""
    generator = torch.Generator().manual_seed(0)
    # dtype and device are given, because a user may have set other defaults.
    logits = torch.randn(2, 7, 5, generator=generator, dtype=torch.float32, device="cpu").unbind()
    try:
        theirs = function(logits, 5, 2, None)
    except (TypeError, ValueError, RuntimeError, IndexError):  # the function has another signature
        return False
    one_group = torch.zeros(7, dtype=torch.int64, device="cpu")
    sums = router_sums(logits, one_group, 1, experts=5, top_k=2)
    ours = balance_of(sums[:, :5], sums[:, 5:10], 2)
    return math.isclose(float(ours), float(theirs), rel_tol=1e-5)


@torch.no_grad()
def _scores_in(kind: type[nn.Module], config: Any) -> Scores | None:
    """Try a new router on random tokens: does it weight experts by a sigmoid or a softmax of its logits?

    The router returns its logits ``[N, E]`` first, then weights and indices of the chosen experts, ``[N, K]``
    each. Weights may be scaled or normalised for each token, so their ratios are compared.
    """
    generator = torch.Generator().manual_seed(0)
    make: Any = kind
    tokens = torch.randn(16, config.hidden_size, generator=generator, device="cpu")
    outputs: tuple[Any, ...] = ()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            router = make(config).float().eval()
            for tensor in router.parameters():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / max(tensor.shape[-1], 1) ** 0.5)
            for tensor in router.buffers():
                tensor.zero_()
            more = len(inspect.signature(kind.forward).parameters) - 2  # a bias for the choice of experts
            bias = torch.zeros(next(router.parameters()).shape[0])
            try:
                outputs = router(tokens, *[bias] * more)
            except ValueError:  # it wants rows of tokens
                outputs = router(tokens[None], *[bias] * more)
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError):
        return None  # it is built or called in another way

    logits, *others = outputs if isinstance(outputs, tuple) else (outputs,)
    chosen = [x for x in others if isinstance(x, Tensor) and x.dtype == torch.int64]
    weights = [x for x in others if isinstance(x, Tensor) and x.is_floating_point()]
    if len(chosen) != 1 or len(weights) != 1 or logits.shape[:-1].numel() != len(tokens):
        return None

    logits = logits.reshape(len(tokens), -1).float()
    if chosen[0].shape != weights[0].shape or chosen[0].ndim != 2 or chosen[0].shape[1] < 2:
        return None

    formulas: dict[Scores, Tensor] = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid()}
    return next((name for name, scores in formulas.items() if _weighs(scores, chosen[0], weights[0])), None)


def _weighs(scores: Tensor, chosen: Tensor, weights: Tensor) -> bool:
    """Return whether weights ``[N, K]`` are scores ``[N, E]`` of the chosen, up to a factor a token."""
    ratios = weights.float() / scores.gather(1, chosen)
    return torch.allclose(ratios, ratios[:, :1].expand_as(ratios), rtol=1e-4)


class Place(Protocol):
    """Where a stage stands in its pipeline."""

    @property
    def has_stage_before(self) -> bool:
        """Return whether another stage runs before this one."""

    @property
    def holds_head(self) -> bool:
        """Return whether this is the last stage."""


class RouterRelay:
    """Adds up router sums from the first stage of a pipeline to the last."""

    def __init__(self, channel: Channel, stage: Place, group: dist.ProcessGroup | None = None) -> None:
        self.channel = channel  # sends sums to later stages and their gradients back, in fp64
        self.stage = stage
        self.group = group  # the ranks that hold the same layers; None is the world
        self.received: Tensor | None = None  # the sums of the stages before, in the running pass

    def add(self, sums: Tensor) -> Tensor:
        """Return all stages' sums; in training, stages without the head get NaN that depends on ``sums``."""
        sums = sums.to(self.channel.dtype(sums.device))
        if not torch.is_grad_enabled():
            sums = sums.clone()
            dist.all_reduce(sums, group=self.channel.down)
            return sums

        anchor = torch.zeros((), device=sums.device, requires_grad=True)
        if self.stage.has_stage_before:
            if self.received is None:  # a repeated call has received the sums already
                self.received = Receive.apply(anchor, self.channel, sums.shape)  # type: ignore[no-untyped-call]
            sums = sums + self.received
        if self.stage.holds_head:
            return sums
        send: Any = Send.apply
        not_a_number: Tensor = send(anchor, sums, self.channel)
        return not_a_number


def leave_to_losses(inner: Any) -> None:
    """Patch a stage's forward to skip the balancing loss; our losses compute it over all stages' layers."""
    forward = inner.forward

    def stage_forward(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **{"output_router_logits": False, **kwargs})

    inner.forward = stage_forward
