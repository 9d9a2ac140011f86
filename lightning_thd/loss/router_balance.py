"""A model's router logits and a ``THDBatch`` -> the balancing loss of its experts, and their router z-loss.

transformers balances experts over all slots of a microbatch, so its loss depends on the packing. The
formulas are in docs/guides/experts.md. Legend: S sequences, E experts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd._checks import choice, real_number
from lightning_thd._pages import see
from lightning_thd.batch import THDBatch
from lightning_thd.loss.head_call import HeadCall
from lightning_thd.models.pack import experts_are_balanced
from lightning_thd.parallel.pipeline.stage import Stage, stage_of
from lightning_thd.parallel.routers import (
    FUNCTION,
    Scores,
    balance_of,
    module_of_loss,
    require_gradients,
    router_sums,
    routers_of,
    scores_of,
    wants_balance,
)

RouterBalance = Literal["microbatch", "sequence", "step"]
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class Experts(NamedTuple):
    """The experts of a model, read from its config and classes."""

    number: int
    top_k: int
    scores: Scores


@dataclass(slots=True)
class Routers:
    """Computes the routers' loss of one model call, instead of the model's own code."""

    balance: RouterBalance | None  # the tokens to balance over; None computes the z-loss only
    coefficient: float  # factor of the balancing loss
    z_loss: float  # factor of the mean squared logsumexp of router logits
    experts: Experts  # the experts of the model
    batch: THDBatch  # the microbatch
    stage: Stage | None  # the stage of a pipeline that this rank holds
    before: Tensor | None  # how often all ranks chose each expert in the step's earlier microbatches, ``[E]``
    seen: Tensor | None = None  # the same sum with this microbatch; computed only for balance="step"

    @contextlib.contextmanager
    def requested(self, inner: Any, kwargs: dict[str, Any]) -> Generator[None]:
        """Request router logits, and switch off the model's own balancing loss, inside this context.

        ``HeadCall`` calls it inside a ``Scope`` that is ``balanced``.
        """
        kwargs["output_router_logits"] = True
        module = module_of_loss(inner)
        model_loss = getattr(module, FUNCTION, None)
        if model_loss is not None:
            setattr(module, FUNCTION, _muted(model_loss))

        try:
            yield
        finally:
            if model_loss is not None:
                setattr(module, FUNCTION, model_loss)

    def loss(self, inner: Any, outputs: Any) -> Tensor:
        """Compute a router loss, a scalar. In training, pipeline stages without the head return NaN."""
        logits: tuple[Tensor, ...] = getattr(outputs, "router_logits", None) or ()
        layers = [layer.reshape(-1, layer.shape[-1]) for layer in logits]
        count, top_k, scores = self.experts
        slots = self.batch.input_ids.shape[-1]
        shapes_fit = all(layer.shape == (slots, count) for layer in layers)
        may_have_none = self.stage is not None  # a stage of a pipeline may have no experts
        if not shapes_fit or not (layers or may_have_none):
            raise ValueError(
                f"{type(inner).__name__} returns router logits {[list(layer.shape) for layer in logits]}, "
                f"wanted [{slots}, {count}] of each. Set router_balance='microbatch' and router_z_loss=0."
            )

        require_gradients(inner, layers)

        padding = len(self.batch.lengths)  # the group of slots that belong to no sequence
        groups, slots_of_tokens = self.batch.boundaries.members(padding)
        sums = router_sums(
            layers, groups, padding + 1, experts=count, top_k=top_k, scores=scores, slots=slots_of_tokens
        )
        if self.stage is not None:
            assert self.stage.balance is not None
            sums = self.stage.balance.add(sums)

        return sums if sums.ndim == 0 else self._of_sums(sums, (groups < padding).sum())

    def _of_sums(self, sums: Tensor, tokens: Tensor) -> Tensor:
        """Compute the loss from sums of probabilities, choices and squared lse, ``[S + 1, E + E + 1]``."""
        count, top_k, _ = self.experts
        batch = self.batch
        scale = batch.token_scale
        probabilities = sums[:, :count]
        chosen = sums[:, count:-1].detach()  # how often each expert was chosen has no gradient

        total = sums.new_zeros(())
        if self.balance == "microbatch":
            total = self.coefficient * balance_of(probabilities.sum(0)[None], chosen.sum(0)[None], top_k)[0]
        if not scale:
            return total

        # What follows is about sequences only, without the last group, padding.
        probabilities = probabilities[:-1]
        chosen = chosen[:-1]
        # Sums over layers become means, as transformers computes them.
        layers = (chosen.sum() / top_k / tokens.clamp_min(1)).clamp_min(1.0)
        total = total + self.z_loss * sums[:-1, -1].sum() * (scale / layers)
        if self.balance == "sequence":
            if batch.boundaries.group is not None:
                chosen = chosen.contiguous()  # a slice, which a collective does not take
                dist.all_reduce(chosen, group=batch.boundaries.group)
            # A product and a sum, not @, which autocast would round.
            of_sequences = balance_of(probabilities, chosen, top_k) * chosen.sum(1)
            total = total + self.coefficient * of_sequences.sum() * (scale / layers / top_k)

        if self.balance == "step":
            choices = chosen.sum(0)
            if dist.is_initialized():
                relay = None if self.stage is None else self.stage.balance
                dist.all_reduce(choices, group=None if relay is None else relay.group)
            self.seen = choices if self.before is None else choices + self.before
            share = self.seen / (self.seen.sum() / top_k).clamp_min(1.0)
            total = total + self.coefficient * count * (share * probabilities.sum(0)).sum() * (scale / layers)

        return total


def checked_balance(balance: RouterBalance | None) -> RouterBalance | None:
    """Return a ``router_balance`` argument; raise ValueError for an unknown one."""
    if balance is not None:
        choice(balance, "router_balance", *get_args(RouterBalance))
    return balance


def routers_for(
    call: HeadCall, batch: THDBatch, balance: RouterBalance | None, z_loss: float | None = None
) -> Routers | None:
    """Return the object that computes a call's router loss; None leaves this loss to the model."""
    checked_balance(balance)
    if z_loss is None:
        z_loss = getattr(call.config, "router_z_loss_coef", None) or 0.0
    else:
        z_loss = real_number(z_loss, "router_z_loss", least=0, advice="It is a factor, such as 1e-3.")

    inner = call.inner
    stage = stage_of(inner)
    model_balances = wants_balance(inner) and module_of_loss(inner) is not None
    if balance is None:
        balance = "sequence" if model_balances else "microbatch"

    # What ``Routers`` computes in place of the model; None if it computes the z-loss only.
    own_balance: RouterBalance | None = balance
    if balance == "microbatch":
        if model_balances:
            _refuse_balance_of_shard(batch, inner)
        if not z_loss and not (model_balances and stage is not None):
            return None
        own_balance = "microbatch" if model_balances else None

    setting = f"router_balance={balance!r}"  # for messages
    if balance == "microbatch" and z_loss:
        setting = f"router_z_loss={z_loss}"
    if call.experts is None:
        call.experts = _experts_of(inner, call.config, setting)
    if (z_loss or balance != "microbatch") and batch.token_scale is None:
        raise ValueError(
            f"{setting} needs batch.token_scale, the weight of the step's input tokens. Use THDDataModule, "
            f"or pass token_scale to THDBatch.collate. {see('experts')}"
        )

    if balance != "microbatch" and not batch.token_scale:  # an evaluation, in which collectives could hang
        own_balance = None
    if own_balance == "microbatch":
        batch.boundaries.require("own_balance", f"A model with {setting}")

    coefficient = call.balance_coefficient
    if own_balance is not None and coefficient is None:
        raise ValueError(
            f"{setting} needs the coefficient of the balancing loss, and neither {type(inner).__name__} nor "
            "its config has router_aux_loss_coef. Set it, to 0.001 for example."
        )

    earlier_choices = call.choices if batch.microbatch else None
    return Routers(own_balance, coefficient or 0.0, z_loss, call.experts, batch, stage, earlier_choices)


def _refuse_balance_of_shard(batch: THDBatch, inner: Any) -> None:
    """Refuse a model's own balancing loss on a shard: each rank would balance only its own slots."""
    if batch.boundaries.ranks > 1:
        raise ValueError(
            f"router_balance='microbatch' got one rank's shard of a pack: {type(inner).__name__} would "
            "balance its experts over the shard's slots, and the loss would differ from that of one process. "
            "Set router_balance='sequence', or train without context parallelism."
        )


def _experts_of(inner: Any, config: Any, setting: str) -> Experts:
    """Return a model's experts; raise if it has none or if ``setting`` needs more than is known of them."""
    name = type(inner).__name__
    if not routers_of(inner):
        raise ValueError(
            f"{setting} needs the logits of routers, and {name} returns none. Leave it out. {see('experts')}"
        )

    scores = scores_of(inner)
    count = _first_int(_EXPERTS, inner, config)
    top_k = _first_int(("num_experts_per_tok",), inner, config)
    if scores is None or count is None or top_k is None:
        unknown = "balancing formula" if scores is None else "number of experts, or of experts per token,"
        raise ValueError(
            f"{setting} needs the {unknown} of {name}, which is not known. Use router_balance='microbatch', "
            "which leaves the loss to the model, and no router z-loss."
        )

    return Experts(count, top_k, scores)


def _first_int(names: tuple[str, ...], *owners: Any) -> int | None:
    """Return the first attribute with one of the names that is an integer."""
    for owner in owners:
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int):
                return value
    return None


@functools.cache
def _muted(function: Any) -> Any:
    """Return a balancing function that gives 0 in a thread whose ``Routers`` compute the loss."""
    if hasattr(function, "_thd_muted"):  # another thread has wrapped it
        return function

    def balance(logits: Any, *args: Any, **kwargs: Any) -> Any:
        if not experts_are_balanced():
            return function(logits, *args, **kwargs)
        device = logits[0].device if isinstance(logits, tuple) and logits else None
        return torch.zeros((), device=device)

    balance._thd_muted = True  # type: ignore[attr-defined]
    return balance
