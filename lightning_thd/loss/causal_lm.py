"""A model and a ``THDBatch`` -> the loss of law 2, without ever making the logits.

T slots in a pack, V vocabulary. The work is in ``head_call``; what models do to their logits after the head
(Granite's division, Cohere's factor, Gemma's cap) is seen, not looked up: ``lazy_logits``.
"""

from __future__ import annotations

from torch import Tensor, nn

from lightning_thd.batch import THDBatch
from lightning_thd.loss.head_call import HeadCall, new_state
from lightning_thd.loss.nll_tiles import Penalties
from lightning_thd.loss.wrapped import language_model, text_config

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
            once.

    Returns:
        fp32 ``[]`` (fp64 for an fp64 model). 10 loss tokens and ``loss_scale`` 0.1 give their mean; no loss
        token gives 0, with zero gradients.

    Raises:
        ValueError: for another kind of model, another attention, or a batch that does not fit the model.
        NotImplementedError: for a model that does to its logits what cannot be followed.
    """
    inner = language_model(model)
    call = HeadCall.of(inner)
    if z_loss is None:
        z_loss = float(getattr(text_config(inner), "z_loss_coefficient", None) or 0.0)
    penalties = Penalties(label_smoothing=label_smoothing, z_loss=z_loss)
    loss, seen = call(model, new_state(batch, penalties, mtp_weight))
    if not seen.agrees(call.logit_map):
        # The first call of a family whose config does not say what it does; the next ones know.
        call.logit_map = seen
        loss, _ = call(model, new_state(batch, penalties, mtp_weight))
    return loss
