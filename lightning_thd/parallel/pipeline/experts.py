"""Router logits of a rank's layers -> the MoE balancing loss over all ranks' layers.

The loss multiplies how often an expert was chosen by how likely it was. Both are means over all layers, so
the loss is no sum over stages. Each stage therefore sends on what the means are made of: E sums of
probabilities, E counts and the number of rows. Their gradient comes back the same way.

Legend: E experts, R rows (slots of a microbatch on this rank).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd.parallel.pipeline.channel import Channel, Receive, Send

if TYPE_CHECKING:
    from lightning_thd.parallel.pipeline.stage import Stage

_FUNCTION = "load_balancing_loss_func"


def wants_balance(inner: Any) -> bool:
    """Return whether a model adds a balancing loss over the routers of its layers."""
    return bool(getattr(inner.config.get_text_config(decoder=True), "output_router_logits", None))


def require_known_balance(inner: Any) -> None:
    """Refuse balancing losses other than Switch Transformers' (arXiv:2101.03961, equations 4 to 6)."""
    module = _module_of_loss(inner)
    if module is not None:
        generator = torch.Generator().manual_seed(0)
        logits = tuple(torch.randn(7, 5, generator=generator) for _ in range(2))
        try:
            theirs = getattr(module, _FUNCTION)(logits, 5, 2, None)
        except (TypeError, ValueError, RuntimeError, IndexError):  # another signature
            theirs = None
        parts = add_routers(torch.zeros(11), logits, 5, 2)
        if theirs is not None and torch.allclose(balance_of(parts), torch.as_tensor(theirs), rtol=1e-5):
            return
    raise ValueError(
        f"{type(inner).__name__} has output_router_logits=True: its balancing loss needs the routers of all "
        "layers, which lie on other pipeline stages, and its formula is not known. Set "
        "config.output_router_logits=False, or pipeline_parallel_size=1."
    )


def add_routers(parts: Tensor, logits: Sequence[Tensor], experts: int, top_k: int) -> Tensor:
    """Add layers' logits ``[R, E]`` to the sums ``[2 E + 1]`` of earlier layers."""
    for layer in logits:
        weights = torch.nn.functional.softmax(layer, dim=-1)
        chosen = torch.topk(weights, top_k, dim=-1).indices.flatten()
        counts = torch.zeros(experts, device=layer.device).scatter_add_(
            0, chosen, torch.ones_like(chosen, dtype=torch.float32)
        )
        rows = torch.full((1,), float(weights.shape[0]), device=layer.device)
        parts = parts + torch.cat([weights.float().sum(0), counts, rows])
    return parts


def balance_of(parts: Tensor) -> Tensor:
    """Compute the balancing loss of sums ``[2 E + 1]``, ``E * sum(count / rows * sum / rows)``."""
    experts = parts.numel() // 2
    sums, rest = parts[:experts], parts[experts:].detach()
    counts, rows = rest[:experts], rest[experts:]
    return ((counts / rows) * (sums / rows)).sum() * experts


class Balance:
    """Computes the balancing loss of a model whose layers lie on several ranks."""

    def __init__(self, channel: Channel, stage: Stage) -> None:
        self.channel, self.stage = channel, stage
        self.received: Tensor | None = None

    def loss(self, logits: Any, experts: int, top_k: int, mask: Any = None) -> Tensor:
        """Return the loss over all layers on the last stage; replaces a model's own loss function.

        Other stages give NaN that leads back to the routers; without gradients all give the value.
        """
        assert mask is None, "packs have no attention mask"
        given: tuple[Tensor, ...] = logits if isinstance(logits, tuple) else ()
        size, stage = 2 * experts + 1, self.stage
        assert stage.device is not None
        empty = torch.zeros(size, device=stage.device)
        if not torch.is_grad_enabled():
            parts = add_routers(empty, given, experts, top_k)
            dist.all_reduce(parts, group=self.channel.down)
            return balance_of(parts)
        anchor = torch.zeros((), device=stage.device, requires_grad=True)
        if stage.has_stage_before:
            if self.received is None:  # a call that is run again has its parts already
                shape = torch.Size((size,))
                self.received = Receive.apply(anchor, self.channel, shape)  # type: ignore[no-untyped-call]
            empty = self.received
        parts = add_routers(empty, given, experts, top_k)
        send: Any = Send.apply
        loss: Tensor = balance_of(parts) if stage.holds_head else send(anchor, parts, self.channel)
        stage.made.append(loss.grad_fn)
        return loss


def balance_over_stages(inner: Any, balance: Balance) -> None:
    """Patch a model's forward to compute its balancing loss over all ranks' layers, in place."""
    module, forward = _module_of_loss(inner), inner.forward

    def balancing_forward(*args: Any, **kwargs: Any) -> Any:
        with _replaced(module, balance.loss):
            return forward(*args, **kwargs)

    inner.forward = balancing_forward


def _module_of_loss(inner: Any) -> Any:
    """Return the Python module in which a model's forward looks up its balancing-loss function."""
    modules = (sys.modules.get(kind.__module__) for kind in type(inner).__mro__)
    return next((module for module in modules if hasattr(module, _FUNCTION)), None)


@contextlib.contextmanager
def _replaced(module: Any, function: Callable[..., Tensor]) -> Generator[None]:
    before = getattr(module, _FUNCTION)
    setattr(module, _FUNCTION, function)
    try:
        yield
    finally:
        setattr(module, _FUNCTION, before)
