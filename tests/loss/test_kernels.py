"""Losses whose rows come from the kernels, here their stand-in: which heads take them, and that they fit.

``tests/interpreter`` runs the kernels themselves.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_thd._imports import installed
from lightning_thd.loss import fused_linear_cross_entropy, fused_linear_logprobs
from lightning_thd.loss.tiles import logits
from lightning_thd.warnings import THDWarning
from tests.imagined.support import why_not
from tests.loss.forced import kernels_forced
from tests.loss.oracles import Case, relative, wide
from tests.loss.test_fused import DIVERGENCES, KINDS, at_the_edges, fused, shards, whole
from tests.ranks import run_ranks

CUDA = torch.device("cuda")
ROOT = Path(__file__).parents[2]
# A bf16 gradient of a logit is rounded, and products of a bf16 weight are exact in fp32.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize(
    ("device", "compute", "wide", "triton", "hip", "serves"),
    [
        ("cuda", torch.bfloat16, torch.float32, True, None, True),
        ("cuda", torch.float32, torch.float32, True, None, True),
        ("cuda", torch.float16, torch.float32, True, None, False),
        ("cuda", torch.float64, torch.float64, True, None, False),
        ("cuda", torch.bfloat16, torch.float32, False, None, False),
        ("cuda", torch.bfloat16, torch.float32, True, "6.4", False),
        ("cpu", torch.float32, torch.float32, True, None, False),
        ("meta", torch.bfloat16, torch.float32, True, None, False),
    ],
)
def test_one_function_chooses(
    device: str, compute: torch.dtype, wide: torch.dtype, triton: bool, hip: str | None, serves: bool
) -> None:
    with (
        mock.patch.object(logits, "_has_triton", return_value=triton),
        mock.patch.object(torch.version, "hip", hip),
    ):
        settings = SimpleNamespace(compute=compute, accumulator=wide, columns=8)
        hidden = SimpleNamespace(device=torch.device(device))
        head: Any = SimpleNamespace(hidden=hidden, settings=settings)
        assert logits.by_kernels(head) is serves


# The kernels that each loss launches; "kl" needs no sum over a row before its gradient.
LAUNCHES = {
    "nll": {"nll"},
    "logprobs": {"statistics", "gradient"},
    "kl": {"statistics", "divergence_gradient"},
    "reverse_kl": {"statistics", "divergence_terms", "divergence_gradient"},
    "jsd": {"statistics", "divergence_terms", "divergence_gradient"},
}


def operands(case: Case) -> tuple[list[Tensor], Tensor, tuple[Tensor, Tensor]]:
    leaves, targets = case.tensors()
    return leaves, targets, case.teacher()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", ["auto", 20])
@pytest.mark.parametrize("vocabulary", [101, 5000])
def test_values_and_gradients(kind: str, dtype: torch.dtype, chunk: object, vocabulary: int) -> None:
    case = Case(
        dtype=dtype, bias=True, ignored=0.02, softcap=5.0, temperature=0.7, logit_scale=0.5,
        valid_vocab_size=vocabulary - 11, vocabulary=vocabulary, tokens=150,
    )  # fmt: skip
    leaves, targets, taught = operands(case)
    with torch.no_grad():
        leaves[0][targets == -100] = torch.nan

    with kernels_forced(interpreted=False) as calls:
        loss = fused(kind, leaves, targets, taught, chunk=chunk, **case.kwargs(leaves))
        ours = torch.autograd.grad(loss, leaves)

    assert set(calls) == LAUNCHES[kind]
    with torch.no_grad():
        leaves[0][targets == -100] = 0.0
    leaves64 = wide(leaves)
    expected = whole(kind, case, leaves64, targets, taught)
    theirs = torch.autograd.grad(expected, leaves64)

    # The teacher's states are rounded to the student's bf16.
    assert relative(loss, expected) < (2e-4 if kind in DIVERGENCES and dtype == torch.bfloat16 else 2e-5)
    for mine, oracle in zip(ours, theirs, strict=True):
        assert relative(mine, oracle) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_products_stay_with_torch(kind: str, dtype: torch.dtype) -> None:
    leaves, targets, taught = operands(Case(dtype=dtype))
    with kernels_forced(interpreted=False) as calls:
        fused(kind, leaves, targets, taught).backward()
    assert calls == []


def test_a_nan_shows_in_its_row_alone() -> None:
    leaves, targets, _ = operands(Case(dtype=torch.float32))
    with torch.no_grad():
        leaves[0][3] = torch.nan
    with kernels_forced(interpreted=False):
        logp = fused_linear_logprobs(leaves[0], leaves[1], targets).logp
        loss = fused_linear_cross_entropy(leaves[0], leaves[1], targets)
        (gradient,) = torch.autograd.grad(loss, leaves[0])
    assert logp.isnan().nonzero().flatten().tolist() == [3]
    assert loss.isnan()
    assert gradient.isnan().any(1).nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("whose", ["student", "teacher"])
def test_a_nan_shows_in_every_divergence(kind: str, whose: str, by_kernels: bool) -> None:
    leaves, targets, (hidden, weight) = operands(Case(dtype=torch.float32))
    hidden = hidden.clone()
    with torch.no_grad():
        (leaves[0] if whose == "student" else hidden)[3] = torch.nan
    with kernels_forced(interpreted=False) if by_kernels else contextlib.nullcontext():
        loss = fused(kind, leaves, targets, (hidden, weight))
        (gradient,) = torch.autograd.grad(loss, leaves[0])
    assert loss.isnan()
    assert gradient.isnan().any(1).nonzero().flatten().tolist() == [3]


def test_a_target_outside_of_the_vocabulary_is_refused() -> None:
    leaves, targets, _ = operands(Case(dtype=torch.float32))
    targets[2] = 101
    with kernels_forced(interpreted=False), pytest.raises(ValueError, match=r"targets\[2\] is 101"):
        fused_linear_cross_entropy(leaves[0], leaves[1], targets)


def over_ranks() -> list[float]:
    """Return errors of losses whose vocabulary two ranks share, by kernels."""
    errors = []
    with kernels_forced(interpreted=False) as calls:
        for kind in KINDS:
            case = Case(
                vocabulary=100, dtype=torch.float32, ignored=0.4, softcap=5.0, temperature=0.7, bias=True
            )
            full, targets = case.tensors()
            local = shards(full)
            taught = case.teacher()
            of_rank = (taught[0], taught[1].chunk(2)[dist.get_rank()])
            loss = fused(kind, local, targets, of_rank, **case.kwargs(local), tp_group=dist.group.WORLD)
            ours = torch.autograd.grad(loss, local)
            leaves64 = wide(full)
            expected = whole(kind, case, leaves64, targets, taught)
            theirs = shards(list(torch.autograd.grad(expected, leaves64)))
            errors += [relative(a, b) for a, b in zip([loss, *ours], [expected, *theirs], strict=True)]
        assert set(calls) == {"statistics", "gradient", "divergence_terms", "divergence_gradient"}
        errors += [1e-6 * error for error in at_the_edges()]  # in fp64, which stays with torch's operators

    return errors


def test_ranks_that_share_the_vocabulary_equal_one() -> None:
    for errors in run_ranks(over_ranks, 2):
        assert len(errors) > 8
        assert max(errors) < 2e-5


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_each_logit_moves_ten_bytes_in_a_few_launches() -> None:
    """At 32,768 x 151,936, counted on fake tensors in a process of its own, where a GPU is imagined."""
    script = (
        "from benchmarks.loss_counts import *\n"
        "for name, way in WAYS.items():\n"
        "    found = count(way, kernels=True)\n"
        "    most, launches = GOALS[name]\n"
        "    traffic = found.traffic.total() / (TOKENS * VOCABULARY)\n"
        "    assert 0.99 * most < traffic < 1.03 * most, (name, traffic)\n"
        "    assert 10 < found.launches.total() <= launches, (name, found.launches)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.skipif(not installed("triton"), reason="triton is not installed: make test-kernels installs it")
def test_a_sample_of_the_kernels_in_tritons_interpreter(pytestconfig: pytest.Config) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/interpreter/test_loss_rows.py",
    ]
    # What is no error in this session, such as deprecations with the oldest releases, is none there.
    for category in pytestconfig.getoption("pythonwarnings") or []:
        command += ["-W", category]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        [*command, "-m", "not slow"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout


def wrong(launch: Callable[..., None]) -> Callable[..., None]:
    """Return a launch that doubles what the kernel wrote over the products."""

    def run(z: Tensor, *rest: Any) -> None:
        launch(z, *rest)
        out = next(x for x in rest if isinstance(x, Tensor) and x.ndim == 2)
        out.mul_(2)

    return run


def failing(launch: Callable[..., None]) -> Callable[..., None]:
    def run(*args: Any) -> None:
        raise RuntimeError("out of resource: shared memory")

    return run


def refusing(launch: Callable[..., None]) -> Callable[..., None]:
    def run(*args: Any) -> None:
        raise ValueError("type fp8e4nv is not supported")

    return run


@pytest.mark.parametrize("change", [wrong, failing, refusing])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_that_are_wrong_in_their_trial_are_replaced_with_a_warning(
    kind: str, change: Callable[..., Any]
) -> None:
    case = Case(dtype=torch.float32)
    leaves, targets, taught = operands(case)
    expected = whole(kind, case, wide(leaves), targets, taught)

    def step() -> Tensor:
        loss = fused(kind, leaves, targets, taught)
        loss.backward()
        return loss.detach()

    with kernels_forced(interpreted=False) as calls:
        rows = sys.modules["lightning_thd.loss.kernels.rows"]
        broken = {name: change(getattr(rows, name)) for name in LAUNCHES[kind]}
        with mock.patch.multiple(rows, **broken), pytest.warns(THDWarning, match="not used here: of 16 rows"):
            loss = step()
        calls.clear()
        step()
        assert calls == []

    assert relative(loss, expected) < 2e-5


def test_a_trial_takes_few_rows_once_and_waits_while_operators_are_watched() -> None:
    leaves, targets, _ = operands(Case(dtype=torch.float32))
    with kernels_forced(interpreted=False) as calls:
        with FlopCounterMode(display=False):
            fused_linear_cross_entropy(leaves[0], leaves[1], targets)
        in_watched = len(calls)
        fused_linear_cross_entropy(leaves[0], leaves[1], targets)
        in_first = len(calls) - in_watched
        fused_linear_cross_entropy(leaves[0], leaves[1], targets)
        assert [in_watched, in_first, len(calls) - in_watched - in_first] == [1, 2, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_runs_on_the_device_of_its_rows_under_another_default_device(kind: str) -> None:
    leaves, targets, taught = operands(Case(dtype=torch.float32))
    with kernels_forced(interpreted=False) as calls, torch.device("meta"):
        fused(kind, leaves, targets, taught).backward()
    assert calls


def test_the_first_batch_may_be_anything() -> None:
    leaves, targets, _ = operands(Case(dtype=torch.float32))
    with kernels_forced(interpreted=False) as calls:
        loss = fused_linear_cross_entropy(leaves[0], leaves[1], torch.full_like(targets, -100))
        assert loss == 0.0
        (gradient,) = torch.autograd.grad(loss, leaves[:1])
        assert gradient.count_nonzero() == 0

        with torch.no_grad():
            leaves[0][0] = torch.nan
        assert fused_linear_cross_entropy(leaves[0], leaves[1], targets).isnan()
        assert calls == ["nll"] * 2  # the trial, and the second loss: the first has no rows
