"""What others do instead, in pure torch: for ``benchmarks.loss``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Whole logits, widened to fp32 as transformers does."""
    F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum").backward()


def torch_own(policy: str) -> Callable[[Tensor, Tensor, Tensor], None]:
    """PyTorch's own linear_cross_entropy under one of its policies."""

    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
        options = torch.nn.LinearCrossEntropyOptions(acc_policy=policy)  # type: ignore[arg-type]
        F.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=options).backward()

    return run


def torch_per_token(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """PyTorch's own linear_cross_entropy with a value a token, as its options choose the tiles."""
    options = torch.nn.LinearCrossEntropyOptions()
    F.linear_cross_entropy(hidden, weight, targets, reduction="none", options=options).sum().backward()


class LigerAlgorithm(torch.autograd.Function):
    """liger-kernel's fused linear cross entropy as its paper (arXiv:2410.10989) describes it, in pure torch.

    Chunks of next_power_of_2(T / ceil(V / H)) tokens; each chunk's logits become its gradient in place.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Loss and gradients."""
        tokens, width = hidden.shape
        rows = -(-tokens // -(-weight.shape[0] // width))
        chunk = 1 << (rows - 1).bit_length()
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight)
        loss = torch.zeros((), dtype=torch.float32)
        for start in range(0, tokens, chunk):
            part, target = hidden[start : start + chunk], targets[start : start + chunk, None]
            z = (part @ weight.t()).float()
            lse = z.logsumexp(1, keepdim=True)
            loss += (lse - z.gather(1, target)).sum()
            z.sub_(lse).exp_()
            z.scatter_(1, target, z.gather(1, target) - 1.0)
            z = z.to(hidden.dtype)
            d_hidden[start : start + chunk] = z @ weight
            d_weight.addmm_(z.t(), part)
        ctx.save_for_backward(d_hidden, d_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Scale in place."""
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden.mul_(grads[0]), d_weight.mul_(grads[0]), None


def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """The same, forward and backward."""
    LigerAlgorithm.apply(hidden, weight, targets).backward()


PEERS: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {"naive": naive, "liger's algorithm": liger}
if hasattr(F, "linear_cross_entropy"):
    PEERS |= {
        "torch, auto": torch_own("auto"),
        "torch, accurate": torch_own("accurate"),
        "torch, per token": torch_per_token,
    }


class ChunkedLogprobs(torch.autograd.Function):
    """Vocabulary-parallel log-probabilities with collectives in every chunk of tokens.

    Three forward (maximum, sum, target), one backward for the chunk's hidden states, as post-training
    libraries do on top of their tensor-parallel heads.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, group: dist.ProcessGroup, chunk: int
    ) -> Tensor:
        """Chunk by chunk."""
        ctx.group, ctx.chunk = group, chunk
        start_column = dist.get_rank(group) * weight.shape[0]
        logps, lses = [], []
        for part, target in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            z = part @ weight.t()
            largest = z.amax(1)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            total = (z - largest[:, None]).exp_().sum(1)
            dist.all_reduce(total, group=group)
            local = target - start_column
            here = (local >= 0) & (local < weight.shape[0])
            chosen = torch.where(
                here, z.gather(1, local.clamp(0, weight.shape[0] - 1)[:, None]).squeeze(1), 0.0
            )
            dist.all_reduce(chosen, group=group)
            lses.append(largest + total.log())
            logps.append(chosen - lses[-1])
        ctx.save_for_backward(hidden, weight, targets, torch.cat(lses))
        return torch.cat(logps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """Logits made again, chunk by chunk."""
        hidden, weight, targets, lse = ctx.saved_tensors
        start_column = dist.get_rank(ctx.group) * weight.shape[0]
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            p = (hidden[rows] @ weight.t()).sub_(lse[rows, None]).exp_().neg_()
            local = (targets[rows] - start_column)[:, None]
            here = (local >= 0) & (local < weight.shape[0])
            index = local.clamp(0, weight.shape[0] - 1)
            p.scatter_(1, index, p.gather(1, index) + here.to(p.dtype)).mul_(grads[0][rows, None])
            part = p @ weight
            dist.all_reduce(part, group=ctx.group)
            d_hidden[rows] = part
            d_weight.addmm_(p.t(), hidden[rows])
        return d_hidden, d_weight, None, None, None
