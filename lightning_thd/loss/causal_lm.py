"""A model and a ``THDBatch`` -> its share of the step's mean loss, or log-probabilities, without logits.

T slots in a pack, S sequences, V vocabulary. The work is in ``head_call``; what models do to their logits
after the head (Granite's division, Cohere's factor, Gemma's cap) is seen, not looked up: ``lazy_logits``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from lightning_thd._checks import flags, instance, real_number, whole_number
from lightning_thd.batch import THDBatch
from lightning_thd.batch.thd_step import check_batch
from lightning_thd.loss.linear_logprobs import LogProbs, linear_logprobs
from lightning_thd.loss.linear_nll import linear_nll
from lightning_thd.loss.model_head.head_call import HeadCall, Job
from lightning_thd.loss.model_head.wrapped import HeadOperands, language_model, text_config
from lightning_thd.loss.mtp import targets_after
from lightning_thd.loss.prepare import Call
from lightning_thd.loss.tiles.logit_map import LogitMap
from lightning_thd.loss.tiles.nll import Penalties
from lightning_thd.loss.tiles.top import TopTokens
from lightning_thd.loss.token_weights import Factors, Reduction, loss_weights
from lightning_thd.loss.watch import SlotLosses, recorder, watcher_of
from lightning_thd.parallel.shard import pack_value

# DeepSeek-V3 (arXiv:2412.19437, section 2.2): the mean loss of the further predictions times 0.3 at first.
_MTP_WEIGHT = 0.3


class LossParts(NamedTuple):
    """A loss and its parts, ``[]`` each, all times the same scale.

    Attributes:
        loss: what is differentiated, the others included.
        z_loss: the z-loss's part of it, detached.
    """

    loss: Tensor
    z_loss: Tensor


@overload
def causal_lm_loss(
    model: nn.Module,
    batch: THDBatch,
    *,
    reduction: Reduction = ...,
    weights: Tensor | None = ...,
    class_weights: Tensor | None = ...,
    label_smoothing: float = ...,
    z_loss: float | None = ...,
    mtp_weight: float = ...,
    return_parts: Literal[False] = ...,
) -> Tensor: ...


@overload
def causal_lm_loss(
    model: nn.Module,
    batch: THDBatch,
    *,
    reduction: Reduction = ...,
    weights: Tensor | None = ...,
    class_weights: Tensor | None = ...,
    label_smoothing: float = ...,
    z_loss: float | None = ...,
    mtp_weight: float = ...,
    return_parts: Literal[True],
) -> LossParts: ...


def causal_lm_loss(
    model: nn.Module,
    batch: THDBatch,
    *,
    reduction: Reduction = "tokens",
    weights: Tensor | None = None,
    class_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float | None = None,
    mtp_weight: float = _MTP_WEIGHT,
    return_parts: bool = False,
) -> Tensor | LossParts:
    """Sum the negative log-likelihood over a batch's loss tokens, times the batch's scale.

    The mean of this over microbatches and ranks is the loss of the step. With ``reduction="tokens"`` that is
    the sum over its loss tokens divided by their number, or with weights in the data (``batch.weights``) the
    sum of weight times loss divided by the sum of weights. With ``"sequences"`` every sequence first averages
    over its own loss tokens; sequences that have any then average, by their weights where the data gives one
    number a sequence. A mixture of experts' balancing loss, where ``config.output_router_logits`` asks for
    it, is added as the model adds it, once a microbatch; it is no sum over tokens.

    Args:
        model: a Hugging Face causal language model built with ``attn_implementation="thd"``, bare or wrapped
            (DDP, FSDP2, tensor parallel, PEFT, Accelerate, torch.compile).
        batch: the microbatch, on the model's device.
        reduction: "tokens" or "sequences".
        weights: floats ``[T]``, a further factor of each slot's loss; no part of the divisor, which the data
            alone decides. Gets no gradient.
        class_weights: floats ``[V]``, a further factor by target, likewise.
        label_smoothing: share of a target's mass spread over the vocabulary.
        z_loss: factor of the squared lse, added for each loss token; the config's ``z_loss_coefficient``
            (Bamba's) when None.
        mtp_weight: what the further predictions weigh, in mean, where the model calls its head more than
            once: call k + 1 predicts the token k places after the next.
        return_parts: give the z-loss beside the loss.

    Returns:
        fp32 ``[]`` (fp64 for an fp64 model), or ``LossParts`` of such; under context parallelism the pack's
        on every rank, with the gradient of this rank's shard. 10 loss tokens and ``loss_scale`` 0.1 give
        their mean; no loss token gives 0, with zero gradients.

    Raises:
        TypeError: for arguments of another type.
        ValueError: for another kind of model, another attention, a batch that does not fit the model, or
            ``reduction="sequences"`` where the number of the step's sequences is unknown.
        NotImplementedError: for a model that does to its logits what cannot be followed.
    """
    flags(return_parts=return_parts)
    real_number(mtp_weight, "mtp_weight", advice="It is what the further predictions weigh.")
    penalties = Penalties(label_smoothing=label_smoothing, z_loss=_z_loss(model, z_loss))
    factors = loss_weights(batch, reduction, weights, class_weights, smoothed=label_smoothing > 0)
    scale = batch.sequence_scale if reduction == "sequences" else batch.loss_scale
    parts, _ = _loss(model, batch, penalties, factors, scale, mtp_weight=mtp_weight, watched=False)
    return parts if return_parts else parts.loss


class TokenStats(NamedTuple):
    """Sums over a batch's loss tokens: entropy, right guesses and number, ``[]`` each.

    Attributes:
        entropy: of the model's distribution in front of each, in nats.
        correct: how many the model finds likelier than any other token.
        tokens: their number.
    """

    entropy: Tensor
    correct: Tensor
    tokens: Tensor


def causal_lm_loss_and_stats(
    model: nn.Module, batch: THDBatch, *, label_smoothing: float = 0.0
) -> tuple[Tensor, TokenStats]:
    """Compute ``causal_lm_loss``, and entropy and accuracy of its tokens from the same forward pass.

    Args:
        model: as for ``causal_lm_loss``.
        batch: the microbatch, on the model's device; no shard of one.
        label_smoothing: share of a target's mass spread over the vocabulary.

    Returns:
        The loss, and sums: 10 loss tokens under a uniform distribution over 8 have entropy 10 log 8.

    Raises:
        ValueError: as ``causal_lm_loss``.
    """
    penalties = Penalties(label_smoothing=label_smoothing, z_loss=_z_loss(model, None))
    factors = loss_weights(batch, "tokens", None, None, smoothed=label_smoothing > 0)
    scale = batch.loss_scale
    parts, stats = _loss(model, batch, penalties, factors, scale, mtp_weight=_MTP_WEIGHT, watched=True)
    assert stats is not None
    return parts.loss, stats


def _z_loss(model: nn.Module, given: float | None) -> float:
    if given is not None:
        return given
    config = text_config(language_model(model))
    return float(getattr(config, "z_loss_coefficient", None) or 0.0)


def _loss(
    model: nn.Module,
    batch: THDBatch,
    penalties: Penalties,
    factors: Factors,
    scale: float | None,
    *,
    mtp_weight: float,
    watched: bool,
) -> tuple[LossParts, TokenStats | None]:
    watcher, recorded, slots = watcher_of(batch), recorder(), list[SlotLosses]()

    def values(operands: HeadOperands, depth: int, logit_map: LogitMap) -> Tensor:
        targets, weight = factors(targets_after(batch, depth), depth, operands.vocabulary)
        call = operands.call(targets, logit_map)
        wanted = watcher is not None or recorded is not None
        see = slots.append if wanted and not depth else None
        found = torch.stack([*linear_nll(call, penalties, token_weights=weight, see=see)])
        return torch.cat([found, _watch(call)]) if watched else found

    inner = language_model(model)
    size = 5 if watched else 2
    found = HeadCall.of(inner).run(model, lambda: Job(batch, values, size=size))
    if watcher is not None and slots:
        watcher.see(batch, slots[-1], scale or 0.0)  # the last: a model may be called twice
    if recorded is not None:
        recorded += slots[-1:]
    loss, z_part, *sums = found["values"].unbind()
    further = [value[0] for name, value in found.items() if name.startswith("value_")]
    if further:
        loss = loss + torch.stack(further).mean() * mtp_weight
    loss = pack_value(loss + found["aux_loss"] if "aux_loss" in found else loss, batch)
    parts = LossParts(loss, pack_value(z_part.detach(), batch))
    if not watched:
        return parts, None
    return parts, TokenStats(*(value.detach() for value in sums))


@torch.no_grad()
def _watch(call: Call) -> Tensor:
    """Return the sums of entropies, right guesses and ones over the targets of a call, ``[3]``."""
    results = linear_logprobs(call, entropy=True, top_k=1)
    known = call.targets != -100
    right = (results.top.tokens[..., 0] == call.targets) & known
    entropy = results.entropy.masked_fill(~known, 0.0).sum()
    return torch.stack([entropy, right.sum().to(entropy.dtype), known.sum().to(entropy.dtype)])


def causal_lm_logprobs(
    model: nn.Module, batch: THDBatch, *, temperature: float = 1.0, entropy: bool = True, top_k: int = 0
) -> LogProbs:
    """Compute log-probability, entropy and lse of every target of a batch, differentiable.

    Args:
        model: as for ``causal_lm_loss``.
        batch: the microbatch, on the model's device.
        temperature: divides the model's logits, after its own scale and cap.
        entropy: whether it is wanted.
        top_k: number of likeliest tokens wanted in every slot with a target, ``LogProbs.top``; 1 for a token
            accuracy.

    Returns:
        Three tensors ``[T]``, 0 where there is no target; fp32 (fp64 for an fp64 model). Entry i belongs to
        ``batch.targets[i]``, the token after slot i; ``PackedRollouts`` puts it in that token's place.

    Raises:
        ValueError: as ``causal_lm_loss``, and for a temperature that is not a number above 0.
        NotImplementedError: for a model that does to its logits what cannot be followed.
    """
    LogitMap(temperature=temperature)  # checked before the model runs
    instance(model, "model", nn.Module, advice="Pass the model itself.")
    check_batch(batch)
    instance(entropy, "entropy", bool, advice="Pass True or False.")
    whole_number(top_k, "top_k", advice="0 keeps no tokens.")
    wide = 3 + 2 * top_k if entropy else 2 + 2 * top_k

    def values(operands: HeadOperands, depth: int, logit_map: LogitMap) -> Tensor:
        call = operands.call(targets_after(batch, depth), replace(logit_map, temperature=temperature))
        results = linear_logprobs(call, entropy=entropy, top_k=top_k)
        columns = [part.flatten() for part in results if part is not None]
        if top_k:  # ids travel among the floats: fp32 holds all below 2^24
            parts = (part.flatten(0, -2).to(columns[0].dtype) for part in results.top)
            columns += [column for part in parts for column in part.unbind(1)]
        return torch.cat(columns)

    inner = language_model(model)
    found = HeadCall.of(inner).run(model, lambda: Job(batch, values, size=wide * batch.targets.numel()))
    columns = list(found["values"].chunk(wide))
    results = LogProbs(columns[0], columns[1] if entropy else None, columns[2 if entropy else 1])
    if top_k:
        logp, tokens = torch.stack(columns[-2 * top_k :], dim=1).detach().chunk(2, dim=1)
        results = results.with_top(TopTokens(logp, tokens.long()))
    return results
