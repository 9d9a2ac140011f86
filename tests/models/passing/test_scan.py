"""Scans and convolutions of shards, put together, are those of the pack; so are their gradients."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.models.bamba import modeling_bamba

from lightning_thd.alignment import Layout
from lightning_thd.batch import THDBatch
from lightning_thd.models.passing import adopt
from lightning_thd.models.passing.adopt import convolve, run_delta_rule, scan_state_space
from lightning_thd.models.passing.scan import OverRanks
from lightning_thd.models.passing.stretches import Carrier
from lightning_thd.parallel.context.layout import ShardLayout, gather_pack
from tests.models.families import build
from tests.models.passing import oracle
from tests.ranks import run_ranks

# One over several shards, empty ones, single tokens, all in one shard, cut at one slot.
CASES = [[3, 28, 1, 0, 2, 11, 1, 2], [48], [1] * 16, [2, 2, 12, 1, 1, 14, 0], [11, 1, 12, 13, 11]]
HEADS = 4
KEYS = 3
VALUES = 5
GROUPS = 2


def tensors(kind: str, slots: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    if kind == "convolution":
        shapes: dict[str, tuple[int, ...]] = {"x": (slots, 6), "weight": (6, 4), "bias": (6,)}
    elif kind == "state_space":
        shapes = {
            "x": (slots, HEADS, VALUES),
            "dt": (slots, HEADS),
            "b": (slots, GROUPS, KEYS),
            "c": (slots, GROUPS, KEYS),
            "decay": (HEADS,),
            "skip": (HEADS,),
            "bias": (HEADS,),
        }
    else:
        gates = (KEYS,) if kind == "kimi" else ()
        heads = HEADS if kind == "kimi" else GROUPS
        shapes = {
            "q": (slots, heads, KEYS),
            "k": (slots, heads, KEYS),
            "v": (slots, HEADS, VALUES),
            "g": (slots, HEADS, *gates),
            "beta": (slots, HEADS),
        }

    inputs = {name: torch.randn(shape, generator=made, dtype=torch.float64) for name, shape in shapes.items()}
    for name in ("decay", "g"):
        if name in inputs:
            inputs[name] = -inputs[name].abs()
    return inputs


def alone(function: Callable[..., Any], carrier: Carrier | None) -> Callable[..., Any]:
    """Bind a rule of stretches to their carrier, or return the function that runs whole sequences."""
    rules = {
        oracle.delta_rule: run_delta_rule,
        oracle.state_space: scan_state_space,
        convolved: convolve,
    }
    if carrier is None:
        return function
    kernel = torch.autocast("cpu", enabled=False)(function)  # a kernel does not read autocast
    return lambda *args, **kwargs: rules[function](kernel, carrier, *args, **kwargs)


def convolved(x: Tensor, weight: Tensor, bias: Tensor, activation: str | None = None) -> Tensor:
    out = torch.nn.functional.conv1d(x, weight[:, None], bias, padding=3, groups=len(weight))
    return torch.tanh(out[..., : x.shape[-1]])


def run(kind: str, t: dict[str, Tensor], carrier: Carrier | None) -> Tensor:
    """Run a kind on one row of sequences, or on stretches."""
    if kind == "convolution":
        out: Tensor = alone(convolved, carrier)(t["x"].T[None], t["weight"], t["bias"])
        return out[0].T

    if kind == "state_space":
        out = alone(oracle.state_space, carrier)(
            *(t["x"][None], t["dt"][None], t["decay"], t["b"][None], t["c"][None]),
            chunk_size=4,
            D=t["skip"],
            dt_bias=t["bias"],
            dt_softplus=True,
            dt_limit=(0.1, 2.0),
        )
        return out[0]

    outputs = alone(oracle.delta_rule, carrier)(
        *(t[name][None] for name in ("q", "k", "v")),
        g=t["g"][None],
        beta=t["beta"].sigmoid()[None],
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=True,
    )
    return outputs[0][0]


def whole(kind: str, lengths: list[int]) -> dict[str, Tensor]:
    """Run every sequence alone; the oracle."""
    t = {name: x.requires_grad_() for name, x in tensors(kind, sum(lengths)).items()}
    slots = {name for name, x in t.items() if x.shape[0] == sum(lengths)}
    outputs = []
    for end, length in zip(np.cumsum(lengths).tolist(), lengths, strict=True):
        if length:
            inputs = {name: x[end - length : end] if name in slots else x for name, x in t.items()}
            outputs.append(run(kind, inputs, None))
    out = torch.cat(outputs)
    (out * weights(out)).sum().backward()
    return {"out": out.detach(), **{name: x.grad for name, x in t.items()}}


def weights(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)


def sharded(kind: str, shard: ShardLayout, dtype: torch.dtype, *, autocast: bool) -> dict[str, Tensor]:
    """What ``whole`` returns, put together from the shards of all ranks."""
    inputs = {}
    of_slots = set()
    for name, x in tensors(kind, shard.slots).items():
        if x.shape[0] == shard.slots:
            of_slots.add(name)
            x = x[shard.own]
        inputs[name] = x.detach().to(dtype, copy=True).requires_grad_()

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = run(kind, inputs, OverRanks(shard))
    whole_out = torch.empty(shard.slots, *out.shape[1:], dtype=torch.float64)
    (out * weights(whole_out)[shard.own]).sum().backward()

    results = {"out": gather_pack(out.detach(), shard)}
    for name, x in inputs.items():
        grad = torch.zeros_like(x) if x.grad is None else x.grad
        if name in of_slots:
            results[name] = gather_pack(grad, shard)
        else:
            dist.all_reduce(grad)
            results[name] = grad
    return results


def compare(kinds: list[str], layouts: list[Layout], cases: int, autocast: bool = False) -> float:
    """Largest relative error of outputs and gradients over all cases, in fp64, or in fp32 under autocast."""
    group: Any = dist.group.WORLD
    cp = group.size()
    dtype = torch.float32 if autocast else torch.float64
    bound = 2e-5 if autocast else 1e-10
    worst = 0.0

    for kind, lengths, layout in itertools.product(kinds, CASES[:cases], layouts):
        multiple = 1 if layout == "contiguous" else 2 * cp
        padded = [math.ceil(length / multiple) * multiple for length in lengths]
        shard = ShardLayout(padded, cp=cp, rank=group.rank(), group=group, layout=layout)
        results = sharded(kind, shard, dtype, autocast=autocast)
        for name, expected in whole(kind, padded).items():
            error = float((results[name] - expected).norm() / expected.norm().clamp_min(1e-3))
            assert error < bound, (kind, lengths, layout, name, error)
            worst = max(worst, error)

    return worst


KINDS = ["convolution", "state_space", "delta", "kimi"]


@pytest.mark.parametrize(
    ("cp", "cases"),
    [
        (2, 1),
        pytest.param(4, len(CASES), marks=pytest.mark.slow),
        pytest.param(2, len(CASES), marks=pytest.mark.slow),
    ],
)
def test_shards_equal_the_pack(cp: int, cases: int) -> None:
    """Outputs and gradients of every kind and layout are those of each sequence run alone."""
    # fp64: other orders of the same sums.
    assert max(run_ranks(compare, cp, KINDS, ["contiguous", "dual_chunk", "mixed"], cases)) < 1e-12


def test_autocast_does_not_round_what_a_shard_adds_to_its_kernel() -> None:
    """Under bf16 autocast, shards are as near to fp64 as fp32 is."""
    run_ranks(compare, 2, ["state_space", "delta"], ["dual_chunk"], 1, True)


def test_a_cpu_has_transformers_own_functions_where_kernels_are_installed() -> None:
    """causal-conv1d, for example, replaces the function on every device, and refuses tensors of a CPU."""
    stock = inspect.unwrap(modeling_bamba.causal_conv1d_fn)

    @functools.wraps(stock)
    def kernel(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("Expected x.is_cuda() to be true")

    run = adopt._in_torch("causal_conv1d_fn", kernel)
    x = torch.randn(2, 3, 7)
    weight = torch.randn(3, 4)
    bias = torch.randn(3)
    assert torch.equal(run(x, weight, bias, activation="silu"), stock(x, weight, bias, activation="silu"))
    assert run(x.to("meta"), weight.to("meta")).shape == x.shape  # as in lint_capture
    with pytest.raises(RuntimeError, match="is_cuda"):  # transformers' own would mix the sequences
        run(x, weight, bias, seq_idx=torch.zeros(2, 7, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="is_cuda"):
        run(x=x, weight=weight, seq_idx=torch.zeros(2, 7, dtype=torch.int32))


@pytest.mark.parametrize("family", ["mamba", "bamba"])  # no rank passes mamba's states on
def test_a_pack_on_a_cpu_runs_transformers_own_functions_where_kernels_are_installed(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits on a CPU are the same whether or not kernels that refuse tensors of a CPU are installed."""
    model: Any = build(family, "thd").eval()
    batch = THDBatch.collate([{"input_ids": range(3, 3 + length)} for length in (7, 1, 5)])
    without_kernels = model(**batch.hf_kwargs()).logits
    file = sys.modules[type(model).__module__]
    replaced = 0
    for name in adopt._KERNELS:
        stock = getattr(file, name, None)
        if callable(stock):
            monkeypatch.setattr(file, name, kernel_of_a_gpu(stock))
            replaced += 1
    assert replaced >= 2
    monkeypatch.setattr(adopt, "available", lambda _: True)
    assert torch.equal(model(**batch.hf_kwargs()).logits, without_kernels)


def kernel_of_a_gpu(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel as causal-conv1d installs it: it replaces a function, and refuses tensors of a CPU."""

    @functools.wraps(own)
    def kernel(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Expected x.is_cuda() to be true")

    return kernel
