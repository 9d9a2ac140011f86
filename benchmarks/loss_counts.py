"""The losses on a GPU by count: bytes of traffic for each logit and launches, at 32,768 tokens x 151,936.

Nothing is computed: the tensors are fake, on an imagined CUDA device, and a mode counts the operators that
would launch a kernel. Traffic counts tensors as large as a tile of logits, outside of matrix products, by the
table below. ``--operators`` prints the share of every operator, too.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import results
from lightning_thd.loss import (
    fused_linear_cross_entropy,
    fused_linear_distillation,
    fused_linear_logprobs,
)
from lightning_thd.loss.tiles import logits

TOKENS, WIDTH, VOCABULARY = 32_768, 4096, 151_936
# Targets that do not count, as at the end of the pack's sequences.
IGNORED = 8
# Operators that launch nothing: views, allocations, and scalars that stay on the host.
_FREE = {
    "alias", "as_strided", "detach", "device", "empty", "empty_like", "expand", "lift_fresh", "new_empty",
    "scalar_tensor", "select", "slice", "squeeze", "t", "transpose", "unsqueeze", "view",
}  # fmt: skip
_PRODUCTS = {"mm", "addmm"}
# Bytes of each logit that an operator moves, where it is not once every large tensor that it reads or writes.
# A softmax of a row above the 227 KB of shared memory reads it three times. ``tests/interpreter`` counts the
# loads and stores of the kernels.
_BYTES = {
    "softmax": 16.0,
    "_softmax": 16.0,
    "gather": 0.0,
    "scatter_": 0.0,
    "nll_of_rows": 10.0,
    "statistics_of_rows": 4.0,
    "gradient_of_rows": 6.0,
    "divergence_terms_of_rows": 8.0,
    "divergence_gradient_of_rows": 10.0,
}


@dataclass(slots=True)
class Count:
    """Launches by operator, and bytes of traffic with logits by operator."""

    launches: Counter[str] = field(default_factory=Counter)
    traffic: Counter[str] = field(default_factory=Counter)


class _Counting(TorchDispatchMode):
    def __init__(self, count: Count, tile: int) -> None:
        super().__init__()
        self.count, self.tile = count, tile

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name in _FREE:
            return found
        self.count.launches[name] += 1
        if name not in _PRODUCTS:
            self._add_traffic(name, [*args, *(kwargs or {}).values()], found)
        return found

    def _holds_logits(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.numel() >= self.tile and x.shape[-1] != WIDTH

    def _add_traffic(self, name: str, inputs: list[Any], found: Any) -> None:
        outputs = found if isinstance(found, tuple | list) else [found]
        large = [x for x in inputs if self._holds_logits(x)]
        if name in _BYTES:
            self.count.traffic[name] += sum(_BYTES[name] * x.numel() for x in large[:1])
            return
        large += [x for x in outputs if self._holds_logits(x)]
        self.count.traffic[name] += sum(x.numel() * x.itemsize for x in large)


@contextlib.contextmanager
def fake_gpu(*, kernels: bool) -> Iterator[None]:
    """Fake tensors on an imagined CUDA device, with or without Triton."""
    from tests.imagined.gpu import imagined_gpu

    with (
        imagined_gpu(),
        mock.patch.object(logits, "runs_triton", return_value=kernels),
        # one product adds to a sum on a GPU; a mode that watches would split it in two
        mock.patch.object(torch._C, "_len_torch_dispatch_stack", return_value=0),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=False),
        FakeTensorMode(),
    ):
        yield


def scalar(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None) -> Tensor:
    kept = targets.numel() - IGNORED
    return fused_linear_cross_entropy(hidden, weight, targets, softcap=softcap, loss_tokens=kept)


def capped(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return scalar(hidden, weight, targets, 30.0)


def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    kept = targets.numel() - IGNORED
    rows = fused_linear_logprobs(hidden, weight, targets, loss_tokens=kept)
    return -rows.logp.sum() - 0.01 * rows.entropy.sum()


def distilled(kind: Literal["kl", "reverse_kl", "jsd"]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a divergence from a teacher of the same size."""

    def way(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        kept = targets.numel() - IGNORED
        teacher = {"teacher_hidden": hidden.detach(), "teacher_weight": weight.detach()}
        return fused_linear_distillation(hidden, weight, targets, **teacher, kind=kind, loss_tokens=kept)

    return way


def count(
    way: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    kernels: bool,
    sizes: tuple[int, int, int] = (TOKENS, WIDTH, VOCABULARY),
) -> Count:
    """Count one forward and backward pass of a loss; launches at any sizes, traffic at the module's."""
    tokens, width, vocabulary = sizes
    found = Count()
    with fake_gpu(kernels=kernels):
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
        hidden = torch.empty(tokens, width, **options)
        weight = torch.empty(vocabulary, width, **options)
        targets = torch.empty(tokens, device="cuda", dtype=torch.long)
        with _Counting(found, tile=2**24):
            way(hidden, weight, targets).backward()
    return found


WAYS = {
    "scalar loss": scalar,
    "scalar loss, softcap": capped,
    "log-probs + entropy": logprobs,
    "distillation, kl": distilled("kl"),
    "distillation, jsd": distilled("jsd"),
}
# Goals: bytes of each logit, and launches.
# A divergence counts the teacher's logits with the student's.
GOALS = {
    "scalar loss": (10.0, 120),
    "scalar loss, softcap": (10.0, 120),
    "log-probs + entropy": (10.0, 700),
    "distillation, kl": (18.0, 400),
    "distillation, jsd": (26.0, 450),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operators", action="store_true", help="print every operator")
    arguments = parser.parse_args(argv)
    logits = TOKENS * VOCABULARY
    for name, way in WAYS.items():
        ours, torchs = (count(way, kernels=kernels) for kernels in (True, False))
        for kind, found in (("kernels", ours), ("torch's operators", torchs)):
            launches, traffic = found.launches.total(), found.traffic.total() / logits
            print(f"{name}, {kind}: {traffic:.1f} bytes a logit, {launches} launches")
            if arguments.operators:
                for operator, times in found.launches.most_common():
                    print(f"  {operator:24} {times:6} {found.traffic[operator] / logits:8.2f}")
        most, launches = GOALS[name]
        size = f"{TOKENS:,} x {VOCABULARY:,}"
        results.less(
            f"traffic of a logit, {name}, {size}, by count",
            ours.traffic.total() / logits,
            "bytes",
            most * 1.03,  # the last tile of the vocabulary counts with its whole buffer
            peer=torchs.traffic.total() / logits,
            precision="bf16",
        )
        results.less(
            f"launches, {name}, {size}, by count",
            ours.launches.total(),
            "launches",
            launches,
            peer=torchs.launches.total(),
            precision="bf16",
        )


if __name__ == "__main__":
    main()
