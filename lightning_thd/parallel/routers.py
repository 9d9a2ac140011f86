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
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_thd.parallel.pipeline.channel import Channel, Receive, Send

if TYPE_CHECKING:
    from lightning_thd.parallel.pipeline.stage import Stage

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
    wide = torch.promote_types(logits[0].dtype, torch.float32) if logits else torch.float32
    total = logits[0].shape[0] if logits else groups.numel()
    rows = torch.zeros(total, 2 * experts + 1, dtype=wide, device=groups.device)
    for layer in logits:
        values = layer.to(groups.device, wide)
        if scores == "softmax":
            probabilities = values.softmax(-1)
        else:
            probabilities = values.sigmoid()
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        best = probabilities.topk(top_k, dim=-1).indices
        chosen = torch.zeros_like(probabilities).scatter_(1, best, 1.0)
        rows = rows + torch.cat([probabilities, chosen, values.logsumexp(-1, keepdim=True).square()], dim=1)
    rows = rows if slots is None else rows.index_select(0, slots)
    return rows.new_zeros(size, rows.shape[1]).index_add(0, groups, rows)


def balance_of(probabilities: Tensor, chosen: Tensor, top_k: int) -> Tensor:
    """Compute the balancing loss ``[G]`` of groups from their sums ``[G, E]``; 0 for an empty group."""
    rows = (chosen.sum(1) / top_k).clamp_min(1.0)
    return (chosen * probabilities).sum(1) / rows.square() * chosen.shape[1]


def module_of_loss(inner: Any) -> Any:
    """Return the Python module in which a model's forward looks up its balancing-loss function, or None."""
    modules = (sys.modules.get(kind.__module__) for kind in type(inner).__mro__)
    return next((module for module in modules if hasattr(module, FUNCTION)), None)


def routers_of(inner: nn.Module) -> list[tuple[type[nn.Module], int]]:
    """Return the classes of layers that return router logits, each with the logits' index in its output."""
    recorded = (getattr(type(part), "_can_record_outputs", None) or {} for part in inner.modules())
    found = [spec for table in recorded if (spec := table.get("router_logits")) is not None]
    flat = [one for spec in found for one in (spec if isinstance(spec, list) else [spec])]
    classes = [(getattr(one, "target_class", one), getattr(one, "index", 0)) for one in flat]
    return [(kind, index) for kind, index in dict.fromkeys(classes) if isinstance(kind, type)]


def require_gradients(inner: nn.Module, logits: Sequence[Tensor]) -> None:
    """Raise ValueError if routers are trained, but gave logits through which no gradient flows back."""
    attached = sum(layer.requires_grad for layer in logits)
    if attached == len(logits) or not torch.is_grad_enabled():
        return
    kinds = tuple(kind for kind, _ in routers_of(inner))
    routers = (module for module in inner.modules() if isinstance(module, kinds))
    if attached < sum(any(p.requires_grad for p in router.parameters()) for router in routers):
        raise ValueError(
            f"{type(inner).__name__} returns router logits without a gradient, as activation checkpoints "
            "with use_reentrant=True do: its routers would not be balanced. Set use_reentrant=False. See "
            "docs/reference/messages.md#experts."
        )


def wants_balance(inner: Any) -> bool:
    """Return whether a model's config asks for a balancing loss over the routers of its layers."""
    return bool(getattr(inner.config.get_text_config(decoder=True), "output_router_logits", None))


def scores_of(inner: Any) -> Scores | None:
    """Return how a model's balancing loss turns logits into probabilities; None if its formula is unknown."""
    module = module_of_loss(inner)
    if module is not None:
        return "softmax" if _is_switch(getattr(module, FUNCTION)) else None
    kinds = {_scores_in(kind) if not index else None for kind, index in routers_of(inner)}
    return kinds.pop() if len(kinds) == 1 else None


@functools.lru_cache(maxsize=32)
def _is_switch(function: Callable[..., Any]) -> bool:
    """Return whether a family's balancing function computes the formula of ``balance_of``."""
    kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults
    logits = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0), **kind).unbind()
    try:
        theirs = function(logits, 5, 2, None)
    except (TypeError, ValueError, RuntimeError, IndexError):  # the function has another signature
        return False
    sums = router_sums(logits, torch.zeros(7, dtype=torch.int64, device="cpu"), 1, experts=5, top_k=2)
    ours = balance_of(sums[:, :5], sums[:, 5:10], 2)
    return math.isclose(float(ours), float(theirs), rel_tol=1e-5)


def _scores_in(kind: type[nn.Module]) -> Scores | None:
    """Read from a router's source whether it applies a sigmoid or a softmax to the logits that it returns."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return None
    found: list[Scores] = [name for name in ("softmax", "sigmoid") if name in source]
    return found[0] if len(found) == 1 and "return router_logits," in source else None


class RouterRelay:
    """Adds up router sums from the first stage of a pipeline to the last."""

    def __init__(self, channel: Channel, stage: Stage, group: dist.ProcessGroup | None = None) -> None:
        self.channel = channel  # sends sums to later stages and their gradients back, in fp64
        self.stage = stage
        self.group = group  # the ranks that hold the same layers; None is the world
        self.received: Tensor | None = None  # the sums of the stages before, in the running pass

    def add(self, own: Tensor) -> Tensor:
        """Return all stages' sums; in training, stages without the head get NaN that depends on ``own``."""
        own, stage = own.to(self.channel.dtype(own.device)), self.stage
        if not torch.is_grad_enabled():
            own = own.clone()
            dist.all_reduce(own, group=self.channel.down)
            return own
        anchor = torch.zeros((), device=own.device, requires_grad=True)
        if stage.has_stage_before:
            if self.received is None:  # a repeated call has received the sums already
                self.received = Receive.apply(anchor, self.channel, own.shape)  # type: ignore[no-untyped-call]
            own = own + self.received
        send: Any = Send.apply
        return own if stage.holds_head else send(anchor, own, self.channel)


def leave_to_losses(inner: Any) -> None:
    """Patch a stage's forward to skip the balancing loss; our losses compute it over all stages' layers."""
    forward = inner.forward

    def stage_forward(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **{"output_router_logits": False, **kwargs})

    inner.forward = stage_forward
