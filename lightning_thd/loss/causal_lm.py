"""A model and a ``THDBatch`` -> the loss of law 2, without ever making the logits.

T slots in a pack, H hidden size, V vocabulary. The model's own ``forward`` runs, hooks and all (FSDP2 gathers
the head's weight, DDP sees its outputs, LoRA and activation checkpointing stay in place); only its head is
replaced for the call by one that turns hidden states into the loss.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lightning_thd.batch import THDBatch
from lightning_thd.loss.lazy_logits import LazyLogits, carry_loss, open_loss
from lightning_thd.loss.linear_nll import linear_nll
from lightning_thd.loss.logit_map import LogitMap
from lightning_thd.loss.nll_tiles import Penalties

# head -> what its model does to the logits, as seen in an earlier call
_SEEN_MAPS: weakref.WeakKeyDictionary[nn.Module, LogitMap] = weakref.WeakKeyDictionary()


def causal_lm_loss(model: nn.Module, batch: THDBatch) -> Tensor:
    """Sum the negative log-likelihood over a batch's loss tokens, times ``batch.loss_scale``.

    Args:
        model: a Hugging Face causal language model built with ``attn_implementation="thd"``, bare or wrapped
            (DDP, FSDP2, PEFT, torch.compile).
        batch: the microbatch, on the model's device.

    Returns:
        fp32 ``[]``. A batch of 10 loss tokens with ``loss_scale`` 0.1 gives their mean.
    """
    inner = _language_model(model)
    _check_attention(inner)
    head = inner.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise ValueError(
            f"{type(inner).__name__}.get_output_embeddings() gave {head!r}, wanted the module that makes the "
            "logits. Use loss.fused_linear_logprobs on the hidden states instead."
        )
    guess = _SEEN_MAPS.get(head) or _guess_map(inner)
    loss, seen = _run(model, inner, head, batch, guess)
    if not seen.agrees(guess):  # only in the first call of a family that _guess_map does not foresee
        loss, seen = _run(model, inner, head, batch, seen)
    _SEEN_MAPS[head] = seen
    return loss


def _run(
    model: nn.Module, inner: nn.Module, head: nn.Module, batch: THDBatch, logit_map: LogitMap
) -> tuple[Tensor, LogitMap]:
    """Call the model once with ``logit_map`` assumed; give the loss and the map that was seen."""
    seen: list[LogitMap] = []
    original = inner.forward

    def head_forward(hidden: Tensor) -> LazyLogits:
        weight, bias = head.weight, getattr(head, "bias", None)
        loss = linear_nll(
            hidden,
            weight,
            batch.targets.view(hidden.shape[:-1]),
            bias=bias,
            logit_map=logit_map,
            low_rank=None,
            ignore_index=-100,
            token_weights=batch.loss_scale,
            penalties=Penalties(),
            mean=False,
            tp_group=None,
            sequence_parallel=False,
            chunk="auto",
            backend="auto",
        )
        return carry_loss(loss, (*hidden.shape[:-1], weight.shape[0]))

    def forward(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
        outputs = original(*args, **kwargs)
        logits = outputs.logits
        if not isinstance(logits, LazyLogits):
            raise ValueError(f"{type(inner).__name__} did not return its head's output as logits.")
        seen.append(logits.record.as_map())
        return {"loss": open_loss(logits) + _auxiliary_loss(inner, outputs)}

    with _replaced_forward(head, head_forward), _replaced_forward(inner, forward):
        outputs = model(**batch.hf_kwargs())
    loss: Tensor = outputs["loss"]
    return loss, seen[0]


@contextlib.contextmanager
def _replaced_forward(module: nn.Module, forward: Any) -> Iterator[None]:
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def _auxiliary_loss(inner: nn.Module, outputs: Any) -> Tensor | float:
    """Weigh a mixture of experts' balancing loss as the model itself does when it is given labels."""
    aux = getattr(outputs, "aux_loss", None)
    if not isinstance(aux, Tensor):
        return 0.0
    config = inner.config.get_text_config()
    for name in ("router_aux_loss_coef", "aux_loss_coef"):
        coefficient = getattr(inner, name, getattr(config, name, None))
        if coefficient is not None:
            return aux * coefficient
    raise ValueError(
        f"{type(inner).__name__} returned an auxiliary loss, but neither it nor its config has "
        "router_aux_loss_coef. Set config.router_aux_loss_coef, or config.output_router_logits=False."
    )


def _language_model(model: nn.Module) -> Any:
    """Unwrap DDP, torch.compile and PEFT down to the module that owns the head."""
    inner: Any = model
    while True:
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif not hasattr(inner, "get_output_embeddings") and isinstance(
            getattr(inner, "module", None), nn.Module
        ):
            inner = inner.module
        else:
            break
    if not hasattr(inner, "get_output_embeddings") or not hasattr(inner, "config"):
        raise ValueError(
            f"causal_lm_loss got a {type(inner).__name__}, wanted a Hugging Face causal language model "
            "(with get_output_embeddings() and config). For another model, call "
            "loss.fused_linear_logprobs(hidden, weight, batch.targets) on its last hidden states."
        )
    return inner


def _check_attention(inner: Any) -> None:
    config = inner.config.get_text_config()
    implementation = getattr(config, "_attn_implementation", None)
    if getattr(config, "num_attention_heads", None) and implementation != "thd":
        raise ValueError(
            f"{type(inner).__name__} runs attn_implementation={implementation!r}, which lets packed "
            "sequences "
            "see each other or builds a T x T mask. Load it with attn_implementation='thd', or call "
            "model.set_attn_implementation('thd') after `import lightning_thd`."
        )


def _guess_map(inner: Any) -> LogitMap:
    """Read the usual scale and cap from the config; a call checks them against what the model does."""
    config = inner.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    if getattr(config, "logits_scaling", None):
        scale /= config.logits_scaling
    softcap = getattr(config, "final_logit_softcapping", None)
    return LogitMap(scale=float(scale), softcap=None if softcap is None else float(softcap))
