"""One call of a model with its head replaced -> the loss its head made, and what happened to the logits.

T slots, V vocabulary. The model's own ``forward`` runs through its ``__call__``, hooks and all: FSDP2
gathers the head's weight and reduces its gradient, DDP sees its outputs, PEFT, Accelerate and activation
checkpointing stay in place. The replacements are the same objects at every call, so torch.compile need not
compile again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_thd.batch import THDBatch
from lightning_thd.loss.lazy_logits import LazyLogits, carry_loss, open_loss
from lightning_thd.loss.linear_nll import linear_nll
from lightning_thd.loss.logit_map import LogitMap
from lightning_thd.loss.mtp import mtp_targets
from lightning_thd.loss.nll_tiles import Penalties
from lightning_thd.loss.wrapped import guess_logit_map, head_operands, text_config

_ATTRIBUTE = "_thd_head_call"


@dataclass(slots=True)
class _State:
    """What one call is about.

    Attributes:
        batch: the microbatch.
        penalties: label smoothing and z-loss.
        mtp_weight: what the further predictions of a multi-token model weigh together.
        logits: what the head gave, one entry a prediction.
        seen: what the model did to the logits of the first.
    """

    batch: THDBatch
    penalties: Penalties
    mtp_weight: float
    logits: list[LazyLogits] = field(default_factory=list)
    seen: LogitMap | None = None


class HeadCall:
    """The replacements for the forward of a model and of its head; one object a model, kept on it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.logit_map: LogitMap = guess_logit_map(inner)
        self.state: _State | None = None
        self.model_forward: Any = None

    @classmethod
    def of(cls, inner: Any) -> HeadCall:
        """Give the model's own, making it in the first call."""
        call = inner.__dict__.get(_ATTRIBUTE)
        if call is None or call.inner is not inner:  # a copy of the model still carries the original's
            call = cls(inner)
            inner.__dict__[_ATTRIBUTE] = call
        assert isinstance(call, HeadCall)
        return call

    def __reduce__(self) -> tuple[Any, ...]:
        return (_nothing, ())  # copies and pickles of the model make their own

    def __call__(self, model: nn.Module, state: _State) -> tuple[Tensor, LogitMap]:
        """Call ``model``, the wrapped one, and give the loss and what was done to the logits."""
        head = self.inner.get_output_embeddings()
        self.model_forward = self.inner.forward
        self.state = state
        try:
            with _replaced(head, self.head_forward), _replaced(self.inner, self.forward):
                outputs = model(**state.batch.hf_kwargs())
        finally:
            self.state = None
            self.model_forward = None
        assert state.seen is not None
        loss: Tensor = outputs["loss"]
        return loss, state.seen

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Stand in for the model's forward; what it returns is what hooks of wrappers see."""
        outputs: dict[str, Tensor] = self._finish(self.model_forward(*args, **kwargs))
        return outputs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def head_forward(self, hidden: Tensor) -> LazyLogits:
        """Stand in for the head's forward: hidden states ``[1, T, H]`` -> a loss that looks like logits."""
        state = self.state
        assert state is not None
        batch, depth = state.batch, len(state.logits)
        operands = head_operands(self.inner.get_output_embeddings(), hidden)
        if operands.hidden.shape[:-1].numel() != batch.targets.numel():
            raise ValueError(
                f"The head got hidden states {list(operands.hidden.shape)} for "
                f"{batch.targets.numel()} targets, "
                "wanted one a slot. Leave logits_to_keep alone, and pass no inputs that add tokens."
            )
        loss = linear_nll(
            operands.hidden.flatten(0, -2),
            operands.weight,
            mtp_targets(batch.targets, batch.cu_seqlens_padded, depth),
            bias=operands.bias,
            logit_map=self.logit_map,
            low_rank=None
            if operands.low_rank is None
            else (operands.low_rank[0].flatten(0, -2), operands.low_rank[1]),
            ignore_index=-100,
            token_weights=batch.loss_scale,
            penalties=state.penalties,
            mean=False,
            tp_group=operands.tp_group,
            sequence_parallel=False,
            partial_hidden=operands.partial_hidden,
            chunk="auto",
            backend="auto",
        )
        logits = carry_loss(loss, (*operands.hidden.shape[:-1], operands.vocabulary))
        state.logits.append(logits)
        return logits

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _finish(self, outputs: Any) -> dict[str, Tensor]:
        state = self.state
        assert state is not None
        logits = getattr(outputs, "logits", None)
        if not any(logits is made for made in state.logits):
            raise ValueError(
                f"{type(self.inner).__name__}.forward returned {type(outputs).__name__} whose "
                "logits did not come "
                "from its head (get_output_embeddings()). Use loss.fused_linear_cross_entropy on its last "
                "hidden states, or its own logits."
            )
        assert isinstance(logits, LazyLogits)
        state.seen = logits.record.as_map()
        loss = open_loss(logits)
        further = [open_loss(made) for made in state.logits if made is not logits]
        if further:
            loss = loss + torch.stack(further).mean() * state.mtp_weight
        return {"loss": loss + self._auxiliary_loss(outputs)}

    def _auxiliary_loss(self, outputs: Any) -> Tensor | float:
        """Weigh a mixture of experts' balancing loss as the model itself does when it is given labels."""
        aux = getattr(outputs, "aux_loss", None)
        if not isinstance(aux, Tensor):
            return 0.0
        config = text_config(self.inner)
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            coefficient = getattr(self.inner, name, getattr(config, name, None))
            if coefficient is not None:
                weighted: Tensor = aux * coefficient
                return weighted
        raise ValueError(
            f"{type(self.inner).__name__} returned an auxiliary loss, but neither it nor its config has "
            "router_aux_loss_coef. Set config.router_aux_loss_coef, or config.output_router_logits=False."
        )


def _nothing() -> None:
    return None


@contextlib.contextmanager
def _replaced(module: nn.Module, forward: Any) -> Generator[None]:
    """Set a module's forward for a while; another one set on the module itself comes back afterwards."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


def new_state(batch: THDBatch, penalties: Penalties, mtp_weight: float) -> _State:
    """Begin a call."""
    return _State(batch, penalties, mtp_weight)
