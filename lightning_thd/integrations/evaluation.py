"""A model and its packs of an evaluation set -> the mean loss over all loss tokens, of all ranks together."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_thd._checks import choice
from lightning_thd.batch import THDBatch
from lightning_thd.loss import causal_lm_loss
from lightning_thd.loss.router_balance import RouterBalance
from lightning_thd.parallel.across_ranks import communication_device

LossFn: TypeAlias = Callable[[nn.Module, THDBatch], Tensor]


def balancing(loss_fn: LossFn, router_balance: RouterBalance) -> LossFn:
    """Return ``causal_lm_loss`` with a ``router_balance``; refuse the argument beside another loss."""
    choice(router_balance, "router_balance", *get_args(RouterBalance))
    if router_balance == "microbatch":
        return loss_fn
    if loss_fn is not causal_lm_loss:
        raise ValueError(
            f"router_balance={router_balance!r} beside a loss_fn: it is an argument of causal_lm_loss. Leave "
            "loss_fn out, or pass router_balance to causal_lm_loss in it."
        )
    return functools.partial(causal_lm_loss, router_balance=router_balance)


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Switch a model to evaluation without gradients inside this context; each part gets its mode back."""
    was_training = model.training
    modes = [(child, child.training) for child in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)  # which some modules do more in than set a flag
        for child, mode in modes:  # what a user froze with eval() stays so
            child.training = mode


def mean_loss(
    loss_fn: LossFn,
    model: nn.Module,
    batches: Iterable[THDBatch],  # this rank's, with every sequence once over all ranks
    *,
    device: torch.device,
    group: Any = None,
    seen: Callable[[THDBatch], None] = lambda batch: None,  # called with a batch before it runs
    cut: Callable[[THDBatch], THDBatch] = lambda batch: batch,  # keeps this rank's part of a batch
) -> tuple[float, int]:
    """Return the mean loss over all loss tokens of a set, by weight, and their number; a collective."""
    # A loss that is not linear in batch.loss_scale, as with reduction="sequences", raises. Without a loss
    # token the mean is NaN: 0 would be the best loss.
    total = torch.zeros(3, dtype=torch.float64)
    with evaluating(model):
        for batch in batches:
            moved = batch.to(device)
            seen(moved)
            weights = batch.weights
            weight = batch.loss_tokens if weights is None else float(weights.sum(dtype=torch.float64))
            # A batch's mean: the balance of experts, which is not scaled, then weighs like the rest.
            scaled = moved.replace(loss_scale=1 / (weight or 1.0), sequence_scale=None, token_scale=0.0)
            total[0] += float(loss_fn(model, cut(scaled))) * weight
            total[1] += weight
            total[2] += batch.loss_tokens
    if dist.is_initialized():
        total = total.to(communication_device(group, device))
        dist.all_reduce(total, group=group)
    return float(total[0] / total[1]) if total[1] else math.nan, int(total[2])
