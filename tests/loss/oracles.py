"""The slow, obvious way: all logits at once, in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._python_dispatch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call's settings, and tensors to fit them."""

    tokens: int = 53
    width: int = 16
    vocabulary: int = 101
    dtype: torch.dtype = torch.float64
    bias: bool = False
    ignored: float = 0.0
    softcap: float | None = None
    temperature: float = 1.0
    logit_scale: float = 1.0
    valid_vocab_size: int | None = None
    seed: int = 0

    def tensors(self) -> tuple[list[Tensor], Tensor]:
        """Leaves (hidden, weight, [bias]) and targets."""
        torch.manual_seed(self.seed)
        shapes = [(self.tokens, self.width), (self.vocabulary, self.width)]
        shapes += [(self.vocabulary,)] if self.bias else []
        leaves = [torch.randn(shape).to(self.dtype).requires_grad_() for shape in shapes]
        targets = torch.randint(0, self.valid_vocab_size or self.vocabulary, (self.tokens,))
        targets[torch.rand(self.tokens) < self.ignored] = -100
        return leaves, targets

    def teacher(self, width: int = 24) -> tuple[Tensor, Tensor]:
        """Hidden states and a weight for the same tokens and vocabulary."""
        generator = torch.Generator().manual_seed(11)
        hidden = torch.randn(self.tokens, width, generator=generator, dtype=torch.float64)
        weight = torch.randn(self.vocabulary, width, generator=generator, dtype=torch.float64) * 0.5
        return hidden.to(self.dtype), weight.to(self.dtype)

    def kwargs(self, leaves: list[Tensor]) -> dict[str, Any]:
        """The keyword arguments of the fused losses."""
        names = ("softcap", "temperature", "logit_scale", "valid_vocab_size")
        return {"bias": leaves[2] if self.bias else None, **{name: getattr(self, name) for name in names}}

    def logits(self, leaves: list[Tensor]) -> Tensor:
        z = F.linear(*leaves) * self.logit_scale
        if self.softcap is not None:
            z = torch.tanh(z / self.softcap) * self.softcap
        return (z / self.temperature)[:, : self.valid_vocab_size]

    def logprobs(self, leaves: list[Tensor], targets: Tensor) -> tuple[Tensor, ...]:
        """Log-probability, entropy, lse; zero where ignored, and p log p where p is 0."""
        z = self.logits(leaves)
        z = z.float() if z.itemsize < 4 else z
        log_p = z.log_softmax(-1)
        logp = log_p.gather(1, targets.clamp_min(0)[:, None]).squeeze(1)
        entropy = -(log_p.exp() * log_p.clamp_min(torch.finfo(z.dtype).min)).sum(-1)
        return tuple(torch.where(targets != -100, x, 0.0) for x in (logp, entropy, z.logsumexp(-1)))


def wide(leaves: list[Tensor]) -> list[Tensor]:
    return [leaf.detach().double().requires_grad_() for leaf in leaves]


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm; absolute below 1e-3."""
    return ((ours.detach().double() - theirs.detach()).norm() / theirs.detach().norm().clamp_min(1e-3)).item()


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The bytes of the largest tensor that any operator returned."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result
