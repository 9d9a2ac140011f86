"""A model and a ``THDBatch`` -> the batch's share of the step's loss, or log-probabilities, without logits.

T slots in a pack, S sequences, N tokens of all sequences (if they share prefixes), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn

from lightning_thd._checks import choice, instance, real_number, shaped, whole_number
from lightning_thd.batch import IGNORE_INDEX, THDBatch
from lightning_thd.batch.thd_batch import check_batch
from lightning_thd.batch.upload import uploaded
from lightning_thd.flops.listen import projecting
from lightning_thd.loss.arguments import LossArgs, check_rows
from lightning_thd.loss.head_call import HeadCall, HeadOperands
from lightning_thd.loss.linear_logprobs import LogProbs, linear_logprobs, row_logprobs
from lightning_thd.loss.linear_nll import linear_nll
from lightning_thd.loss.router_balance import RouterBalance, Routers, routers_for
from lightning_thd.loss.tiles.logits import LogitMap
from lightning_thd.loss.tiles.nll import Penalties
from lightning_thd.loss.watch import SlotLosses, watching
from lightning_thd.seqlens import seq_idx_from_cu_seqlens

Reduction = Literal["tokens", "sequences"]
# (targets, number of earlier head calls) -> the targets, -100 where the factor is 0, and the factors
Factors = Callable[[Tensor, int], tuple[Tensor, Tensor]]
# DeepSeek-V3 (arXiv:2412.19437, section 4.2) starts with 0.3 for predictions beyond the next token.
_MTP_WEIGHT = 0.3


def causal_lm_loss(
    model: nn.Module,
    batch: THDBatch,
    *,
    reduction: Reduction = "tokens",
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float | None = None,
    mtp_weight: float = _MTP_WEIGHT,
    router_balance: RouterBalance | None = None,
    router_z_loss: float | None = None,
) -> Tensor:
    """Sum the negative log-likelihood over a batch's loss tokens, times the batch's scale.

    The mean of this value over microbatches and ranks is the loss of the step. With ``reduction="tokens"``,
    that is the sum over the step's loss tokens divided by their number, or the weighted mean if the data has
    weights. With ``"sequences"``, each sequence averages over its loss tokens. Then the sequences that have
    loss tokens are averaged, with the data's weights if it has one per sequence. Losses of routers are added.

    Args:
        model: a Hugging Face causal language model built with ``attn_implementation="thd"``, bare or wrapped
            (DDP, FSDP2, tensor parallel, PEFT, Accelerate, torch.compile).
        batch: the microbatch, on the model's device.
        reduction: "tokens" or "sequences".
        weights: floats ``[T]``, with shared prefixes ``[N]``: factors of the slots' (tokens') losses, without
            gradient. They do not change the divisor. To weight classes: ``factors[batch.targets.clamp(0)]``.
        label_smoothing: share of a target's mass that is spread over the vocabulary.
        z_loss: factor of each loss token's squared log-sum-exp (lse); None: ``config.z_loss_coefficient``.
        mtp_weight: weight of the mean loss of predictions beyond the next token, if the model calls its head
            several times. Call k + 1 predicts the token k places after the next token.
        router_balance: the tokens over which experts are balanced. "sequence" averages the balancing losses
            of the step's sequences, weighted by input tokens, whatever the packing. "step" balances all
            tokens of the step so far, on all ranks. "microbatch" is the model's own loss over all slots of
            the microbatch, if ``config.output_router_logits`` asks for it; it depends on the packing. None
            means "sequence" if ``config.output_router_logits`` asks for a balancing loss, else no balance.
        router_z_loss: factor of the squared lse of router logits, a mean over the step's input tokens and
            the layers; None: ``config.router_z_loss_coef``.

    Returns:
        fp32 ``[]`` (fp64 for an fp64 model). Under context parallelism every rank gets the whole pack's loss,
        with the gradient of its shard. A batch of 10 loss tokens with ``loss_scale`` 0.1 gives their mean
        loss. A batch without loss tokens gives 0, plus losses of routers.

    Raises:
        ValueError: for an unsupported model or attention, for a batch that does not fit the model, or for a
            reduction or balance that batch or routers do not support.
    """
    if mtp_weight is not _MTP_WEIGHT:  # the default needs no check, which every step would pay for
        real_number(mtp_weight, "mtp_weight", advice="It is the weight of predictions beyond the next token.")

    call = HeadCall.of(model)
    if z_loss is None:
        z_loss = _z_loss(call)
    penalties = Penalties(label_smoothing=label_smoothing, z_loss=z_loss)
    factors = loss_weights(batch, reduction, weights)
    scale = batch.sequence_scale if reduction == "sequences" else batch.loss_scale

    routers = None
    has_argument = router_balance is not None or router_z_loss is not None
    settings = ("output_router_logits", "router_z_loss_coef")
    if has_argument or any(getattr(call.config, name, None) for name in settings):
        routers = routers_for(call, batch, router_balance, router_z_loss)

    loss, _ = _loss(call, model, batch, penalties, factors, scale, mtp_weight=mtp_weight, routers=routers)
    return loss


class TokenStats(NamedTuple):
    """Sums over a batch's loss tokens, ``[]`` each: entropy in nats, correct predictions, number of tokens.

    A prediction is correct if no other token is likelier than the target.
    """

    entropy: Tensor
    correct: Tensor
    tokens: Tensor


def causal_lm_loss_and_stats(
    model: nn.Module,
    batch: THDBatch,
    *,
    label_smoothing: float = 0.0,
    router_balance: RouterBalance | None = None,
) -> tuple[Tensor, TokenStats]:
    """Compute ``causal_lm_loss``, and sums for entropy and accuracy of its tokens, in one forward pass.

    The arguments are those of ``causal_lm_loss``; the batch must not be a shard. 10 loss tokens under a
    uniform distribution over 8 tokens have entropy 10 log 8.
    """
    call = HeadCall.of(model)
    penalties = Penalties(label_smoothing=label_smoothing, z_loss=_z_loss(call))
    factors = loss_weights(batch, "tokens", None)
    routers = routers_for(call, batch, router_balance)
    loss, stats = _loss(call, model, batch, penalties, factors, batch.loss_scale, stats=True, routers=routers)
    assert stats is not None
    return loss, stats


def _z_loss(call: HeadCall) -> float:
    """Return the factor of the squared log-sum-exp in the model's config, 0 without one."""
    return float(getattr(call.config, "z_loss_coefficient", None) or 0.0)


def _loss(
    call: HeadCall,
    model: nn.Module,
    batch: THDBatch,
    penalties: Penalties,
    factors: Factors | None,
    scale: float | None,
    *,
    mtp_weight: float = _MTP_WEIGHT,
    stats: bool = False,
    routers: Routers | None = None,
) -> tuple[Tensor, TokenStats | None]:
    """Compute the loss; ``factors`` is None if ``batch.loss_scale`` is the factor of every target.

    ``call`` runs the model with its head replaced by ``values``, which the model thus calls in place of its
    head: once, or once more for each further token that it predicts (``depth``).
    """
    watcher = None if batch.watcher is None else watching(batch)
    slot_losses: list[SlotLosses] = []

    def values(operands: HeadOperands, depth: int, logit_map: LogitMap) -> Tensor:
        operands, targets, most = predicting(operands, batch, depth)
        weight: Tensor | float = batch.loss_scale
        if factors is not None:
            targets, weight = factors(targets, depth)

        args = operands.loss_args(targets, logit_map, most)
        see = None if watcher is None or depth else slot_losses.append
        loss: Tensor = linear_nll(args, penalties, token_weights=weight, see=see)[None]
        if not stats:
            return loss
        return torch.cat([loss, _token_stats(args, batch)])

    results = call.run(model, batch, values, size=4 if stats else 1, routers=routers)
    if routers is not None and routers.seen is not None:  # an evaluation inside a step must not reset it
        call.choices = routers.seen
    if watcher is not None and slot_losses:  # the last call counts, if the model was called twice
        watcher.see(batch, slot_losses[-1], 0.0 if scale is None else scale)

    loss, *sums = results["values"].unbind()
    if "value_1" in results:  # the model predicts beyond the next token
        further = [value[0] for name, value in results.items() if name.startswith("value_")]
        loss = loss + torch.stack(further).mean() * mtp_weight
    if "aux_loss" in results:
        loss = loss + results["aux_loss"]
    if batch.boundaries.group is not None:
        loss = batch.boundaries.pack_value(loss)

    if not stats:
        return loss, None
    return loss, TokenStats(*(value.detach() for value in sums))


@torch.no_grad()
def _token_stats(args: LossArgs, batch: THDBatch) -> Tensor:
    """Sum entropies, correct predictions and ones over the loss tokens of a batch, ``[3]``."""
    checked = check_rows(args)
    with projecting():  # the model needs none of these products
        rows = row_logprobs(checked.operands, checked.targets, checked.settings, entropy=True, right=True)

    correct = rows.right.to(rows.entropy.dtype)
    of_rows = torch.stack([rows.entropy, correct, torch.ones_like(rows.entropy)], 1)
    sums = checked.restore(of_rows).flatten(0, -2)
    if not batch.boundaries.rows_are_tokens:
        counted = batch.token_targets != IGNORE_INDEX
        if batch.weights is not None:
            counted = batch.weights != 0
        sums = sums * batch.boundaries.of_rows(counted.long())[:, None]
    return sums.sum(0)


def causal_lm_logprobs(
    model: nn.Module, batch: THDBatch, *, temperature: float = 1.0, entropy: bool = True
) -> LogProbs:
    """Compute log-probability, entropy and lse of every target of a batch, differentiable.

    ``model``, ``batch`` and errors are those of ``causal_lm_loss``. ``temperature``, above 0, divides the
    logits after the model's own scale and cap. With ``entropy=False`` the entropy is None.

    Returns:
        Three tensors ``[T]``, 0 for slots without a target; fp32 (fp64 for an fp64 model). Entry i belongs to
        ``batch.targets[i]``, the token after slot i (``PackedRollouts.unpack`` moves it to that token). With
        shared prefixes the tensors have one entry for each token of every sequence, ``[N]``.
    """
    LogitMap(temperature=temperature)  # checks the temperature before the model runs
    instance(model, "model", nn.Module, advice="Pass the model itself.")
    check_batch(batch)
    instance(entropy, "entropy", bool, advice="Pass True or False.")
    num_columns = 3 if entropy else 2

    def values(operands: HeadOperands, depth: int, logit_map: LogitMap) -> Tensor:
        operands, targets, most = predicting(operands, batch, depth)
        args = operands.loss_args(targets, replace(logit_map, temperature=temperature), most)
        results = linear_logprobs(args, entropy=entropy)
        return torch.cat([part.flatten() for part in results if part is not None])

    boundaries = batch.boundaries
    boundaries.require("all_tokens", "causal_lm_logprobs")
    num_rows = batch.prediction_rows.targets.shape[0]
    results = HeadCall.of(model).run(model, batch, values, size=num_columns * num_rows)
    columns = [boundaries.of_tokens(column) for column in results["values"].chunk(num_columns)]
    return LogProbs(columns[0], columns[1] if entropy else None, columns[-1])


def dft_loss(logp: Tensor, batch: THDBatch) -> Tensor:
    """Compute the loss of dynamic fine-tuning: each token's loss is multiplied by its probability.

    arXiv:2508.05629, equation 9: ``-p.detach() log p``. The sum over all targets is multiplied by
    ``batch.loss_scale``, and each target by its weight, as in ``causal_lm_loss``. ``logp`` are the floats
    ``[T]`` of ``causal_lm_logprobs(model, batch).logp``. A target of probability 1/2 adds 0.347 to the sum.
    """
    has_target = batch.token_targets != IGNORE_INDEX
    shaped(logp, "logp", has_target.shape, "one per slot. Pass causal_lm_logprobs(model, batch).logp.")
    weights = torch.ones_like(logp) if batch.weights is None else batch.weights
    logp = torch.where(has_target & (weights != 0), logp, 0.0)
    return -(logp * logp.detach().exp() * weights).sum() * batch.loss_scale


def loss_weights(batch: THDBatch, reduction: Reduction, weights: Tensor | None) -> Factors | None:
    """Return a function that gives each target its factor; None if all factors are ``batch.loss_scale``."""
    if type(batch) is not THDBatch:  # a subclass, or an error; the usual batch costs no call
        check_batch(batch)
    if reduction != "tokens":
        choice(reduction, "reduction", *get_args(Reduction))

    all_weights = [part for part in (batch.weights, weights) if part is not None]
    boundaries = batch.boundaries
    if not all_weights and reduction == "tokens" and boundaries.rows_are_tokens:
        return None

    tokens = (boundaries.token_slots,)
    if weights is not None:
        shaped(weights, "weights", tokens, "one per slot. Put weights of the data into the samples.")

    scale = batch.sequence_scale if reduction == "sequences" else batch.loss_scale
    if scale is None:
        raise ValueError(
            "reduction='sequences' needs batch.sequence_scale, the weight of the step's sequences. Use "
            "THDDataModule, pass sequence_scale to THDBatch.collate, or use reduction='tokens'."
        )

    def factors(targets: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        if depth:
            raise ValueError(
                "Weights and reduction='sequences' do not apply to predictions beyond the next token. "
                "Use reduction='tokens' without weights."
            )

        wide = torch.float32 if targets.device.type == "mps" else torch.float64
        total = torch.ones(tokens, dtype=wide, device=targets.device)
        for part in all_weights:
            total = total * part.detach()
        if reduction == "sequences":
            total = total * _shares(batch, wide)
        total = boundaries.of_rows(total)
        return torch.where(total == 0, IGNORE_INDEX, targets), total * scale

    return factors


def _shares(batch: THDBatch, dtype: torch.dtype) -> Tensor:
    """Give each slot, or token of shared prefixes, its sequence's share of the loss; 0 in a trailing pad."""
    precise = np.float64 if dtype == torch.float64 else np.float32  # MPS has no fp64
    on_host = np.array([*batch.sequence_shares, 0.0], precise)
    shares: Tensor = uploaded(on_host, batch.input_ids.device).to(dtype)
    return shares.index_select(0, batch.token_sequences().clamp(0, len(shares) - 1))


def mtp_targets(targets: Tensor, cu_seqlens: Tensor, depth: int, *, ignore_index: int = -100) -> Tensor:
    """Shift targets, int64 ``[T]``, left by ``depth`` inside every sequence.

    Depth 0 returns ``targets``, the next tokens; depth 1 gives the token after the next one. The last
    ``depth`` slots of every sequence become ``ignore_index``. ``cu_seqlens`` are int32 ``[S + 1]``, the
    offsets of the sequences with their padding.
    ``([6, 7, -100, 9, -100], [0, 3, 5], 1)`` becomes ``[7, -100, -100, -100, -100]``.
    """
    depth = whole_number(depth, "depth", advice="0 is the next token, 1 the token after it.")
    if targets.ndim != 1 or targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(
            f"targets is {targets.dtype} {list(targets.shape)}, wanted int64 [T]. Pass batch.targets."
        )

    total = targets.shape[0]
    if depth == 0 or total == 0:
        return targets

    sequence = seq_idx_from_cu_seqlens(cu_seqlens, total).flatten()
    near = torch.where(sequence[depth:] == sequence[:-depth], targets[depth:], ignore_index)
    return torch.nn.functional.pad(near, (0, min(depth, total)), value=ignore_index)


def predicting(
    operands: HeadOperands, batch: THDBatch, depth: int
) -> tuple[HeadOperands, Tensor, int | None]:
    """Return operands and targets of the rows of predictions; and the most loss tokens, or None."""
    if depth:
        batch.boundaries.require("later_targets", "The model")
        return operands, targets_after(batch, depth), batch.max_targets

    slots, targets, most = batch.prediction_rows
    if slots is not None:
        operands = operands.at(slots)
    return operands, targets, most


def targets_after(batch: THDBatch, depth: int) -> Tensor:
    """Shift a batch's targets by ``depth``; ranks that share a pack gather its targets in one collective."""
    boundaries = batch.boundaries
    targets = boundaries.whole(batch.targets)
    return boundaries.part(mtp_targets(targets, boundaries.whole_offsets, depth))
