"""Weights, distillation and DPO without logits: memory and time beside the plain loss, whole logits and TRL.

A part of ``python -m benchmarks.loss``: T = 4,096 tokens of H = 1,024, 32,000 columns, fp32 (``--quick``
2,048 tokens), forward and backward, all ways in turn. Memory as there; times are the least CPU seconds
of the runs. TRL's divergence is its own function on whole logits; liger's is its algorithm in pure torch,
1,024 tokens at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.results import Result, faster, less
from lightning_thd._imports import available
from lightning_thd.loss import (
    fused_linear_cross_entropy,
    fused_linear_distillation,
    fused_linear_logprobs,
    preference,
)

Way = Callable[[Tensor, Tensor, Tensor], None]
_WIDTH, _TEACHER_WIDTH = 1024, 1536
_PAIRS = 8
# Peak memory of whole logits in units of [T, V] in fp32, measured at T = 3,072.
_UNITS = {
    "DPO, whole logits": 4,
    "distillation, kl, TRL on whole logits": 9,
    "distillation, jsd, TRL on whole logits": 17,
}


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Our loss as it is."""
    fused_linear_cross_entropy(hidden, weight, targets).backward()


def weighted(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Our loss with token weights, smoothing and a z-loss."""
    weights = torch.linspace(0.5, 2.0, len(targets))
    loss = fused_linear_cross_entropy(
        hidden, weight, targets, token_weights=weights, label_smoothing=0.1, z_loss=1e-4
    )
    loss.backward()


def teacher(tokens: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Hidden states and weight of a wider model."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, _TEACHER_WIDTH, generator=generator)
    return hidden, torch.randn(vocabulary, _TEACHER_WIDTH, generator=generator) * 0.05


def distilled(taught: tuple[Tensor, Tensor], kind: str) -> Way:
    """Our distillation."""

    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
        fused_linear_distillation(
            hidden,
            weight,
            targets,
            teacher_hidden=taught[0],
            teacher_weight=taught[1],
            kind=kind,  # type: ignore[arg-type]
        ).backward()

    return run


def naive_distilled(taught: tuple[Tensor, Tensor], kind: str) -> Way:
    """Whole logits of both, by TRL's own function where it is installed."""

    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
        z, t = F.linear(hidden, weight), F.linear(*taught)
        if available("trl"):
            from trl.experimental.gkd import GKDTrainer

            beta = 0.0 if kind == "kl" else 0.5
            GKDTrainer.generalized_jsd_loss(z[None], t[None], beta=beta, reduction="sum").backward()
            return
        s, t = z.log_softmax(-1), t.log_softmax(-1)
        m = s if kind == "kl" else torch.stack([s, t]).logsumexp(0) - torch.tensor(2.0).log()
        found = F.kl_div(m, t, log_target=True, reduction="sum")
        (
            found if kind == "kl" else 0.5 * (found + F.kl_div(m, s, log_target=True, reduction="sum"))
        ).backward()

    return run


def chunked_distilled(taught: tuple[Tensor, Tensor], chunk: int = 1024) -> Way:
    """Liger's algorithm for the divergence: whole rows of logits of a chunk, its gradient at once."""

    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        with torch.no_grad():
            for at in range(0, len(hidden), chunk):
                rows = slice(at, at + chunk)
                p = (
                    F.linear(hidden[rows], weight)
                    .softmax(-1)
                    .sub_(F.linear(taught[0][rows], taught[1]).softmax(-1))
                )
                d_hidden[rows] = p @ weight
                d_weight.addmm_(p.t(), hidden[rows])
        hidden.grad, weight.grad = d_hidden, d_weight

    return run


def _dpo(logp: Tensor) -> None:
    sums = logp.view(2 * _PAIRS, -1).sum(1)
    reference = sums.detach() * 0.99
    preference.dpo_loss(*sums.chunk(2), *reference.chunk(2)).backward()


def dpo(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Our log-probabilities, without entropy, and DPO."""
    _dpo(fused_linear_logprobs(hidden, weight, targets, entropy=False).logp)


def naive_dpo(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Whole logits; the log-probability of the target less the log-sum, as TRL selects it."""
    z = F.linear(hidden, weight)
    _dpo(z.gather(1, targets[:, None]).squeeze(1) - z.logsumexp(-1))


def show(
    run: Callable[[dict[str, Way], int], dict[str, tuple[float, float]]],
    tokens: int,
    full: bool,
    memory: int,
) -> None:
    """Measure and print; about seven minutes for 8,192 tokens on two idle cores.

    Args:
        run: runs ways in turn on tokens; gives peak MiB and CPU seconds of each.
        tokens: T.
        full: whether the goals hold at this size.
        memory: bytes that can be had; a way that needs more is left out, its memory is what was measured of
            3,072 tokens, scaled, and there is no goal for its time.
    """
    taught = teacher(tokens, 32_000)
    ways: dict[str, Way] = {
        "plain loss": plain,
        "weights, smoothing, z-loss": weighted,
        "DPO": dpo,
        "DPO, whole logits": naive_dpo,
        "distillation, kl": distilled(taught, "kl"),
        "distillation, kl, TRL on whole logits": naive_distilled(taught, "kl"),
        "distillation, kl, liger's algorithm": chunked_distilled(taught),
        "distillation, jsd": distilled(taught, "jsd"),
        "distillation, jsd, TRL on whole logits": naive_distilled(taught, "jsd"),
    }
    print(f"\nT={tokens} H={_WIDTH} V=32,000 float32, the teacher's H={_TEACHER_WIDTH}")
    print(f"{'':40}{'peak MiB':>10}{'cpu s':>8}")
    needs = {name: units * tokens * 32_000 * 4 for name, units in _UNITS.items()}
    large = {name for name, need in needs.items() if 1.2 * need > memory}
    found = run({name: way for name, way in ways.items() if name not in large}, tokens)
    for name in large:
        print(f"{name} is left out, it needs {needs[name] / 2**30:.0f} GiB")
        found[name] = needs[name] / 2**20, math.nan
    for name, (mib, seconds) in found.items():
        print(f"{name:40}{mib:10.0f}{seconds:8.2f}")
    results: list[Result] = []
    base, more = found["plain loss"], found["weights, smoothing, z-loss"]
    results.append(
        less(
            "weights, smoothing and z-loss, memory",
            more[0],
            "MiB",
            1.1 * base[0],
            peer=base[0],
            precision="fp32",
        )
    )
    results.append(
        less(
            "weights, smoothing and z-loss, CPU time",
            more[1],
            "s",
            1.1 * base[1],
            peer=base[1],
            precision="fp32",
        )
    )
    for name, peer, share in (
        ("DPO", "DPO, whole logits", 8.0),
        ("distillation, kl", "distillation, kl, TRL on whole logits", 10.0),
        ("distillation, jsd", "distillation, jsd, TRL on whole logits", 10.0),
    ):
        if full:  # with fewer tokens the weight's gradient is most of the memory
            results.append(
                faster(
                    f"{name}, memory, {peer}", found[name][0], found[peer][0], "MiB", share, precision="fp32"
                )
            )
        if peer not in large:
            results.append(
                faster(
                    f"{name}, CPU time, {peer}", found[name][1], found[peer][1], "s", 1.0, precision="fp32"
                )
            )
    for result in results:
        print(f"  {result.what}: {'met' if result.met else 'MISSED'}")
