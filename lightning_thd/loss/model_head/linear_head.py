"""A head whose forward is its own, not that of ``nn.Linear`` -> an error where it does not multiply and add.

H hidden size, V vocabulary. The loss multiplies hidden states by the head's weight itself, so a head that
normalises its weight or scales its result would be left out without a word.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

_ROWS = 16  # what FP8 products are multiples of
_ROUNDS = ("torchao", "transformer_engine", "bitsandbytes")  # libraries whose layers round on purpose
_ROUNDED, _EXACT = 0.1, 1e-3  # relative difference; TF32 stays below the second


class LinearHead:
    """Compares the forward of a head with a product by its weight, once for every forward it is seen with."""

    def __init__(self) -> None:
        self._known: list[object] = [nn.Linear.forward]

    def check(self, base: Any, given: Callable[..., Any] | None, hidden: Tensor, weight: Tensor) -> None:
        """Refuse a head that does more than multiply and add.

        Args:
            base: the head, under its adapters.
            given: the ``forward`` that was put on this head alone, if any.
            hidden: of the call, ``[..., H]``; its dtype and device are those compared in.
            weight: ``[V, H]``, gathered, of this rank.

        Raises:
            ValueError: naming the head.
        """
        forward = type(base).forward if given is None else given
        if any(forward is known for known in self._known) or not _can_look(hidden, weight):
            return
        probe = torch.linspace(-1.0, 1.0, _ROWS * weight.shape[1], device=hidden.device)
        probe = probe.view(1, _ROWS, weight.shape[1]).to(hidden.dtype)
        with torch.no_grad(), _disable_current_modes():  # which count or record the step's own operators
            try:
                found = type(base).forward(base, probe) if given is None else given(probe)
            except Exception:  # of a kernel for other devices, say
                found = None
            bias = getattr(base, "bias", None)
            wanted = F.linear(probe.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))
            if found is None and not _more_than_hidden(forward, bound=given is not None):
                self._known.append(forward)
                return
            if isinstance(found, Tensor) and found.shape == wanted.shape:
                if not bool(wanted.any()):  # a head that starts at zero shows nothing yet
                    return
                off = float((found.double() - wanted.double()).norm() / wanted.double().norm())
                exact = hidden.dtype in (torch.float32, torch.float64) and found.dtype == hidden.dtype
                rounds = type(base).__module__.partition(".")[0] in _ROUNDS
                if off <= (_EXACT if exact and not rounds else _ROUNDED):
                    self._known.append(forward)
                    return
        raise ValueError(
            f"The model's head is a {type(base).__name__} whose forward is not hidden @ weight.T + bias, "
            "which is what causal_lm_loss computes in its place. Use the model's own logits for this head, "
            "or put what it does to its weight into a parametrization (torch.nn.utils.parametrize)."
        )


def _more_than_hidden(forward: Callable[..., Any], *, bound: bool) -> bool:
    """Return whether a forward cannot be called without more than hidden states."""
    wanted = [
        each
        for each in inspect.signature(forward).parameters.values()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    return len(wanted) > (1 if bound else 2)


def _can_look(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether numbers can be read here: of plain tensors that hold some, and in no graph's capture."""
    plain = all(type(x) in (Tensor, nn.Parameter) and not x.is_meta for x in (hidden, weight))
    return plain and not (hidden.is_cuda and torch.cuda.is_current_stream_capturing())
