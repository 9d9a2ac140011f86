"""Hooks that take the norm of one stage's gradients are refused, by their lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.utils import clip_grad_norm_ as clip

from lightning_thd.strategies import norms
from lightning_thd.strategies.pipeline.own_norms import refuse_own_norms


class Clips(L.LightningModule):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class ClipsByAnotherName(L.Callback):
    def on_before_optimizer_step(self, *_: Any) -> None:
        _helper(self)


def _helper(module: Any) -> None:
    def inner() -> None:
        clip(module.parameters(), 1.0)

    inner()


class ReadsLater(L.LightningModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.read()

    def read(self) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class ImportsInside(L.LightningModule):
    def on_after_backward(self) -> None:
        from lightning.pytorch.utilities import grad_norm as theirs

        self.total = theirs(self, 2)


class Total(L.Callback):
    def on_before_zero_grad(self, *_: Any) -> None:
        self.total = torch.nn.utils.get_total_norm([])


class Right(L.LightningModule):
    """Clips and reads as a pipeline can; its unused method does not."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        from lightning_thd.strategies.norms import grad_norm

        self.log_dict(grad_norm(self, 2))
        self.log_dict(norms.grad_norm(self, 2))
        nn.utils.clip_grad_value_(self.parameters(), 1.0)

    def unused(self) -> None:
        clip(self.parameters(), 1.0)


def by_lambda() -> L.LightningModule:
    module = L.LightningModule()
    module.configure_gradient_clipping = lambda *_, **__: clip(module.parameters(), 1.0)  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Clips, r"nn.utils.clip_grad_norm_\(self.*: clip_grad_norm_ sees the gradients of this"),
        (ClipsByAnotherName, r"py:\d+: clip\(module.parameters.*: clip_grad_norm_ sees"),
        (ReadsLater, r"py:\d+: self.log_dict\(grad_norm.*: grad_norm sees"),
        (ImportsInside, r"py:\d+: from lightning.pytorch.utilities import grad_norm"),
        (Total, r"py:\d+: self.total = torch.*: get_total_norm sees"),
        (by_lambda, r"py:\d+: module.configure.*: clip_grad_norm_ sees"),
    ],
)
def test_norms_of_a_stage_alone_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        refuse_own_norms([Right(), make()])


def test_what_a_pipeline_can_do_is_not_refused() -> None:
    refuse_own_norms([Right(), L.Callback(), object()])
