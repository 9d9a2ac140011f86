"""A model and a ``THDBatch`` -> the loss of law 2, or log-probabilities, without ever making the logits.

T slots in a pack, V vocabulary. The work is in ``head_call``; what models do to their logits after the head
(Granite's division, Cohere's factor, Gemma's cap) is seen, not looked up: ``lazy_logits``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_thd.batch import THDBatch
from lightning_thd.loss.linear_logprobs import LogProbs, linear_logprobs
from lightning_thd.loss.linear_nll import linear_nll
from lightning_thd.loss.model_head.head_call import HeadCall, Job
from lightning_thd.loss.model_head.wrapped import HeadOperands, language_model, text_config
from lightning_thd.loss.mtp import targets_after
from lightning_thd.loss.tiles.logit_map import LogitMap
from lightning_thd.loss.tiles.nll import Penalties
from lightning_thd.parallel.shard import pack_value

# DeepSeek-V3 (arXiv:2412.19437, section 2.2): the mean loss of the further predictions times 0.3 at first.
_MTP_WEIGHT = 0.3


def causal_lm_loss(
    model: nn.Module,
    batch: THDBatch,
    *,
    label_smoothing: float = 0.0,
    z_loss: float | None = None,
    mtp_weight: float = _MTP_WEIGHT,
) -> Tensor:
    """Sum the negative log-likelihood over a batch's loss tokens, times ``batch.loss_scale``.

    The mean of this over microbatches and ranks is the loss of the step: the sum over its loss tokens divided
    by their number. A mixture of experts' balancing loss, where ``config.output_router_logits`` asks for it,
    is added as the model adds it, once a microbatch; it is no sum over tokens.

    Args:
        model: a Hugging Face causal language model built with ``attn_implementation="thd"``, bare or wrapped
            (DDP, FSDP2, tensor parallel, PEFT, Accelerate, torch.compile).
        batch: the microbatch, on the model's device.
        label_smoothing: share of a target's mass spread over the vocabulary.
        z_loss: factor of the squared lse, added for each loss token; the config's ``z_loss_coefficient``
            (Bamba's) when None.
        mtp_weight: what the further predictions weigh, in mean, where the model calls its head more than
            once: call k + 1 predicts the token k places after the next.

    Returns:
        fp32 ``[]`` (fp64 for an fp64 model), under context parallelism the pack's on every rank, with the
        gradient of this rank's shard. 10 loss tokens and ``loss_scale`` 0.1 give their mean; no loss
        token gives 0, with zero gradients.

    Raises:
        ValueError: for another kind of model, another attention, or a batch that does not fit the model.
        NotImplementedError: for a model that does to its logits what cannot be followed.
    """
    inner = language_model(model)
    if z_loss is None:
        z_loss = float(getattr(text_config(inner), "z_loss_coefficient", None) or 0.0)
    penalties = Penalties(label_smoothing=label_smoothing, z_loss=z_loss)

    def values(operands: HeadOperands, depth: int, logit_map: LogitMap) -> Tensor:
        loss: Tensor = linear_nll(
            operands.hidden,
            operands.weight,
            targets_after(batch, depth).view(operands.hidden.shape[:-1]),
            bias=operands.bias,
            logit_map=logit_map,
            low_rank=operands.low_rank,
            token_weights=batch.loss_scale,
            penalties=penalties,
            tp_group=operands.tp_group,
            partial_hidden=operands.partial_hidden,
        )
        return loss.view(1)

    found = HeadCall.of(inner).run(model, lambda: Job(batch, values))
    loss = found["values"].squeeze(0)
    further = [value for name, value in found.items() if name.startswith("value_")]
    if further:
        loss = loss + torch.cat(further).mean() * mtp_weight
    return pack_value(loss + found["aux_loss"] if "aux_loss" in found else loss, batch)


def causal_lm_logprobs(
    model: nn.Module, batch: THDBatch, *, temperature: float = 1.0, entropy: bool = True
) -> LogProbs:
    """Compute log-probability, entropy and lse of every target of a batch, differentiable.

    Args:
        model: as for ``causal_lm_loss``.
        batch: the microbatch, on the model's device.
        temperature: divides the model's logits, after its own scale and cap.
        entropy: whether it is wanted; zeros without gradient otherwise.

    Returns:
        Three tensors ``[T]``, 0 where there is no target; fp32 (fp64 for an fp64 model). Entry i belongs to
        ``batch.targets[i]``, the token after slot i; ``PackedRollouts`` puts it in that token's place.

    Raises:
        ValueError: as ``causal_lm_loss``, and for a temperature that is not a number above 0.
        NotImplementedError: for a model that does to its logits what cannot be followed.
    """
    LogitMap(temperature=temperature)  # checked before the model runs

    def values(operands: HeadOperands, depth: int, logit_map: LogitMap) -> Tensor:
        results = linear_logprobs(
            operands.hidden,
            operands.weight,
            targets_after(batch, depth).view(operands.hidden.shape[:-1]),
            bias=operands.bias,
            logit_map=replace(logit_map, temperature=temperature),
            low_rank=operands.low_rank,
            tp_group=operands.tp_group,
            partial_hidden=operands.partial_hidden,
            entropy=entropy,
        )
        return torch.cat([part.flatten() for part in results])

    inner = language_model(model)
    found = HeadCall.of(inner).run(model, lambda: Job(batch, values))
    return LogProbs(*found["values"].chunk(3))
