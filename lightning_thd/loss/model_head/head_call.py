"""One call of a model with its head replaced -> values computed from hidden states instead of logits.

T slots, V vocabulary. The model's own ``forward`` runs through its ``__call__``, hooks and all: FSDP2
gathers the head's weight and reduces its gradient, DDP sees its outputs, PEFT, Accelerate and activation
checkpointing stay in place. The replacements are the same objects at every call, so torch.compile need not
compile again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_thd._static import shapes_are_static
from lightning_thd.batch import THDBatch
from lightning_thd.loss.dtensors import is_dtensor
from lightning_thd.loss.model_head.lazy_logits import LazyLogits, carry_values, open_values
from lightning_thd.loss.model_head.linear_head import LinearHead
from lightning_thd.loss.model_head.wrapped import (
    HeadOperands,
    base_of,
    guess_logit_map,
    head_operands,
    text_config,
)
from lightning_thd.loss.tiles.logit_map import LogitMap
from lightning_thd.models.mixers import has_mixers
from lightning_thd.models.pack import packed
from lightning_thd.parallel.pipeline.stage import stage_of
from lightning_thd.parallel.shard import THDShard

_ATTRIBUTE = "_thd_head_call"


@dataclass(slots=True)
class Job:
    """One forward pass: its batch, the function to apply to hidden states, and the results.

    Attributes:
        batch: the microbatch.
        values: from the head's operands, how many times the head was called before, and what the model does
            to its logits, to what is wanted, ``[n]``.
        size: n, for pipeline stages that have no head.
        logits: what the head gave, one entry a call of it.
        seen: what the model did to the logits it returned.
    """

    batch: THDBatch
    values: Callable[[HeadOperands, int, LogitMap], Tensor]
    size: int = 1
    logits: list[LazyLogits] = field(default_factory=list)
    seen: LogitMap | None = None


class HeadCall:
    """Replaces the forward of a model and of its head, so that no logits are computed."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.logit_map: LogitMap = guess_logit_map(inner)
        self.job: Job | None = None
        self.model_forward: Any = None
        self._own_head_forward: Any = None  # that was put on the head itself
        self._linear = LinearHead()
        self._has_mixers = has_mixers(inner)

    @classmethod
    def of(cls, inner: Any) -> HeadCall:
        """Return the model's ``HeadCall``, made in the first call."""
        call = inner.__dict__.get(_ATTRIBUTE)
        if call is None or call.inner is not inner:  # a copy of the model still carries the original's
            call = cls(inner)
            inner.__dict__[_ATTRIBUTE] = call
        assert isinstance(call, HeadCall)
        return call

    def __reduce__(self) -> tuple[Any, ...]:
        return (_nothing, ())  # copies and pickles of the model make their own

    def run(self, model: nn.Module, job: Callable[[], Job]) -> dict[str, Tensor]:
        """Call the model with its head replaced and return what the head computed.

        Args:
            model: what the user holds.
            job: makes a fresh job; a second one is needed when the first call shows that the model does
                something to its logits that its config does not tell. The next calls know.

        Returns:
            ``{"values": [n], "value_1": ..., "aux_loss": []}``: one value a call of the head.

        Raises:
            ValueError: for a wrapper that goes past the model's forward, and so past its replacement.
        """
        for _ in range(2):
            current = job()
            outputs = self._run(model, current)
            if current.seen is None:
                raise ValueError(
                    f"{type(model).__name__} never called {type(self.inner).__name__}.forward as it is now: "
                    "it holds a forward from before, as PEFT's adaption prompts do. Use another adapter or "
                    "wrapper for packs, or compute the loss from the model's own logits."
                )
            if current.seen.agrees(self.logit_map):
                break
            self.logit_map = current.seen
            if (stage := stage_of(self.inner)) is not None and not stage.again():
                break
        return outputs

    def _run(self, model: nn.Module, job: Job) -> dict[str, Tensor]:
        head = self.inner.get_output_embeddings()
        self.model_forward = self.inner.forward
        self._own_head_forward = head.__dict__.get("forward")
        self.job = job
        try:
            replaced = _replaced(head, self.head_forward), _replaced(self.inner, self.forward)
            with replaced[0], replaced[1], self._lengths_of(job.batch):
                outputs: dict[str, Tensor] = model(**job.batch.hf_kwargs())
        finally:
            self.job = None
            self.model_forward = self._own_head_forward = None
        return outputs

    def _lengths_of(self, batch: THDBatch) -> contextlib.AbstractContextManager[None]:
        """Pass the lengths to state-space layers, which otherwise read them from the device.

        Those of a recorded step work with sizes alone, and a shard's with those of the whole pack, which
        its layout knows. Other layers ask for no lengths.
        """
        if not self._has_mixers or shapes_are_static() or isinstance(batch, THDShard):
            return contextlib.nullcontext()
        return packed(batch)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Run the model's forward and return the computed values in place of logits."""
        outputs: dict[str, Tensor] = self._finish(self.model_forward(*args, **kwargs))
        return outputs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def head_forward(self, hidden: Tensor) -> LazyLogits:
        """Compute the job's values from hidden states ``[1, T, H]`` and return them as lazy logits."""
        job = self.job
        assert job is not None
        head, stage = self.inner.get_output_embeddings(), stage_of(self.inner)
        if stage is not None and not stage.holds_head:
            logits = carry_values(stage.stand_in(job.size, hidden), (*hidden.shape[:-1], head.out_features))
            job.logits.append(logits)
            return logits
        operands = head_operands(head, hidden)
        base = base_of(head)
        if not is_dtensor(base.weight):
            given = self._own_head_forward if base is head else base.__dict__.get("forward")
            self._linear.check(base, given, operands.hidden, operands.weight)
        slots = job.batch.targets.numel()
        if operands.hidden.shape[:-1].numel() != slots:
            raise ValueError(
                f"The head got hidden states {list(operands.hidden.shape)} for {slots} targets, wanted one a "
                "slot. Leave logits_to_keep alone, and pass no inputs that add tokens."
            )
        values = job.values(operands, len(job.logits), self.logit_map)
        values = values if stage is None else stage.share(values)
        logits = carry_values(values, (*operands.hidden.shape[:-1], operands.vocabulary))
        job.logits.append(logits)
        return logits

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _finish(self, outputs: Any) -> dict[str, Tensor]:
        job = self.job
        assert job is not None
        logits = getattr(outputs, "logits", None)
        if not any(logits is made for made in job.logits):
            raise ValueError(
                f"{type(self.inner).__name__}.forward returned a {type(outputs).__name__} whose logits did "
                "not come from its head (get_output_embeddings()). Set config.return_dict=True if it is a "
                "tuple; else use loss.fused_linear_cross_entropy on the last hidden states."
            )
        assert isinstance(logits, LazyLogits)
        job.seen = logits.record.as_map()
        found = {"values": open_values(logits)}
        further = [made for made in job.logits if made is not logits]
        found |= {f"value_{depth}": open_values(made) for depth, made in enumerate(further, start=1)}
        auxiliary = self._auxiliary_loss(outputs)
        if auxiliary is not None:
            found["aux_loss"] = auxiliary
        return found

    def _auxiliary_loss(self, outputs: Any) -> Tensor | None:
        """Return the balancing loss of a mixture of experts, times the model's coefficient."""
        aux = getattr(outputs, "aux_loss", None)
        if not isinstance(aux, Tensor):
            return None
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
    """Replace a module's forward inside a ``with`` block and restore it afterwards."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before
