"""Models whose recurrent layers pass states from rank to rank give the gradients of one process."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.alignment import Alignment, Layout
from lightning_thd.models.families import recurrent
from lightning_thd.models.passing import adopt
from lightning_thd.models.passing.scan import OverRanks
from lightning_thd.parallel.context.layout import ShardLayout
from lightning_thd.parallel.shard import shard_batch
from tests.models.families import FAMILIES, build_in_double
from tests.models.passing import oracle
from tests.ranks import run_ranks

# Documents of several shards, of parts of one, of one token, shorter than the convolution.
LENGTHS = (3, 100, 1, 2, 31, 1, 6)
SHARP = ["lfm2", "qwen3_next"]
OTHERS = [
    *("mamba2", "falcon_h1", "zamba2", "granitemoehybrid", "nemotron_h", "qwen3_5", "olmo_hybrid"),
    *("lfm3", "bamba", "kimi_linear"),
]


class InDouble(TorchFunctionMode):
    """Calls in transformers' files that ask for fp32 get fp64; calls in our files get what they ask for.

    Norms, gates, decays and routers compute in fp32 there, whatever the model's dtype. Products of other
    shapes sum in other orders, and rounding to fp32 makes of that up to 1e-7 in single slots.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals["__name__"].partition(".")[0] == "torch":
            frame = frame.f_back
        if frame.f_globals["__name__"].startswith("transformers."):
            function = Tensor.double if function is Tensor.float else function
            args = [torch.float64 if x is torch.float32 else x for x in args]
            kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in kwargs.items()}
        return function(*args, **kwargs)


def gradients(model: nn.Module, batch: THDBatch) -> tuple[float, dict[str, Tensor]]:
    with InDouble():
        loss = causal_lm_loss(model, batch)
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def compare(families: list[str], layout: Layout) -> dict[str, tuple[float, float, int]]:
    """Return the errors of loss and gradients of every family, and how many layers passed states."""
    warnings.filterwarnings("ignore")
    group: Any = dist.group.WORLD
    cp = group.size()
    rows = [{"input_ids": torch.arange(n) * 7 % 60 + 1} for n in LENGTHS]
    batch = THDBatch.collate(rows, align=Alignment.for_(cp=cp, layout=layout))
    errors = {}

    for family in families:
        model = build_in_double(family)
        passed = [0]
        loss, expected = gradients(model, THDBatch.collate(rows))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recurrent, "run_carried", counting(passed))
            shard_loss, shard_gradients = gradients(
                build_in_double(family), shard_batch(batch, group=group, layout=layout)
            )
        for name in expected:
            grad = shard_gradients.get(name)
            shard_gradients[name] = torch.zeros_like(expected[name]) if grad is None else grad
            dist.all_reduce(shard_gradients[name])
            shard_gradients[name] /= cp
        scale = max(float(grad.norm()) for grad in expected.values())
        worst = max(
            float((shard_gradients[n] - grad).norm() / max(float(grad.norm()), 1e-3 * scale))
            for n, grad in expected.items()
        )
        errors[family] = (abs(shard_loss - loss) / loss, worst, passed[0])

    return errors


def counting(passed: list[int]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        passed[0] += 1
        return adopt.run_carried(*args)

    return run


@pytest.mark.parametrize(
    ("cp", "layout", "families"),
    [
        (2, "contiguous", SHARP),
        pytest.param(4, "contiguous", SHARP, marks=pytest.mark.slow),
        pytest.param(2, "dual_chunk", SHARP, marks=pytest.mark.slow),
        pytest.param(4, "contiguous", OTHERS, marks=pytest.mark.slow),
        pytest.param(2, "contiguous", OTHERS, marks=pytest.mark.slow),
        pytest.param(4, "dual_chunk", OTHERS, marks=pytest.mark.slow),
    ],
)
def test_gradients_equal_one_process(cp: int, layout: Layout, families: list[str]) -> None:
    families = [family for family in families if family in FAMILIES]  # transformers 5.19 has no lfm3
    for errors in run_ranks(compare, cp, families, layout):
        assert list(errors) == families
        for family, (loss, worst, passed) in errors.items():
            assert loss < 1e-12, family
            assert worst < 1e-10, (family, worst)  # other orders of the same sums
            assert passed, family


def replaced() -> None:
    group: Any = dist.group.WORLD
    model = build_in_double("lfm2")
    adopt._KERNELS = ()  # type: ignore[misc]  # the layer finds no function of ours
    batch = THDBatch.collate([{"input_ids": torch.arange(8)}], align=Alignment.for_(cp=2))
    with pytest.raises(RuntimeError, match="called \\[\\], but \\['causal_conv1d_fn'\\] carry its state"):
        causal_lm_loss(model, shard_batch(batch, group=group))


def test_a_kernel_put_in_place_of_the_layers_own_is_refused() -> None:
    run_ranks(replaced, 2)


@pytest.mark.parametrize(
    ("rule", "options", "name"),
    [
        (adopt.run_delta_rule, {"initial_state": torch.zeros(1)}, "initial_state"),
        (adopt.scan_state_space, {"z": torch.zeros(1), "chunk_size": 4}, "z"),
    ],
)
def test_what_a_shard_cannot_honour_is_refused(
    rule: Callable[..., Any], options: dict[str, Any], name: str
) -> None:
    x = torch.zeros(1, 4, 2, 3)
    with pytest.raises(ValueError, match=f"passes {name} to its kernel.*context_parallel_size=1"):
        rule(oracle.delta_rule, OverRanks(ShardLayout([4], cp=1, rank=0)), x, x, x, x, x, **options)
