"""The loss on a GPU: memory and time of a 152k head on 32k tokens, and fp8 products on every aligned pack."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu_parts import Row, median_us, part
from lightning_thd._imports import available
from lightning_thd.alignment import Alignment
from lightning_thd.loss import fused_linear_cross_entropy, fused_linear_logprobs
from lightning_thd.loss.tiles import logits

TOKENS, WIDTH, VOCABULARY = 32_768, 4096, 151_936
SCALAR = "scalar loss"
LOGPROBS = "log-probs + entropy"
IN_TORCH = "torch's operators"


def _ways() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    def entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        results = fused_linear_logprobs(hidden, weight, targets)
        return -results.logp.sum() - 0.01 * results.entropy.sum()

    ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        SCALAR: lambda h, w, y: fused_linear_cross_entropy(h, w, y),
        "scalar loss, 4,096 rows": lambda h, w, y: fused_linear_cross_entropy(h, w, y, chunk=4096),
        LOGPROBS: entropy,
        f"{SCALAR}, {IN_TORCH}": lambda h, w, y: fused_linear_cross_entropy(h, w, y),
        f"{LOGPROBS}, {IN_TORCH}": entropy,
        "F.cross_entropy": lambda h, w, y: F.cross_entropy(F.linear(h, w).float(), y, reduction="sum"),
    }
    if hasattr(F, "linear_cross_entropy"):
        ways["torch"] = lambda h, w, y: F.linear_cross_entropy(h, w, y, reduction="sum")
    if available("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=torch.float32)
        ways["liger"] = lambda h, w, y: liger(w, h, y)
    if available("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        # Its default drops small gradients, so that they would not be equal.
        ways["cut-cross-entropy"] = lambda h, w, y: linear_cross_entropy(
            h, w, y, reduction="sum", filter_eps=None
        )
    return ways


def _without_kernels() -> Any:
    return mock.patch.object(logits, "runs_triton", return_value=False)


@part(
    "loss_big_head",
    shows="32k tokens x 152k vocabulary, bf16: peak memory and time beside the peers",
    seconds=120,
    rank=32,
)
def big_head() -> Iterator[Row]:
    """Peak above the operands, gradients included, and the median time of forward and backward."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(VOCABULARY, WIDTH, device="cuda") * 0.02).bfloat16().requires_grad_()
    targets = torch.randint(0, VOCABULARY, (TOKENS,), device="cuda")
    losses: dict[str, float] = {}
    times: dict[str, float] = {}
    peaks: dict[str, float] = {}
    for name, loss in _ways().items():
        by = _without_kernels if name.endswith(IN_TORCH) else contextlib.nullcontext

        def run(loss: Callable[[Tensor, Tensor, Tensor], Tensor] = loss, by: Any = by) -> Tensor:
            hidden.grad = None
            weight.grad = None
            with by():
                value = loss(hidden, weight, targets)
                value.backward()
            return value.detach()

        hidden.grad = weight.grad = None
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        try:
            losses[name] = run().item()
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
            yield Row(case=f"{name}: peak", value=peaks[name], unit="GiB")
            times[name] = median_us(run, repeats=5) / 1e3
            yield Row(case=f"{name}: forward + backward", value=times[name], unit="ms")
        except torch.cuda.OutOfMemoryError:
            yield Row(case=f"{name}: out of memory", value=float("inf"), unit="GiB")
        except (RuntimeError, TypeError, ValueError) as error:
            if name in (SCALAR, LOGPROBS):
                raise
            yield Row(case=f"{name} cannot run: {error}".splitlines()[0][:120], value=0.0, unit="")
    exact = _exact_loss(hidden.detach(), weight.detach(), targets)
    for what, figures in (("time", times), ("peak", peaks)):
        if "liger" in figures and SCALAR in figures:
            ratio = figures[SCALAR] / figures["liger"]
            case = f"{SCALAR} over liger: {what}"
            yield Row(case=case, value=ratio, unit="times", goal="<= 1.05", met=ratio <= 1.05)
    in_torch = times.get(f"{LOGPROBS}, {IN_TORCH}")
    if in_torch is not None:
        ratio = in_torch / times[LOGPROBS]
        case = f"{LOGPROBS}, {IN_TORCH} over kernels: time"
        yield Row(case=case, value=ratio, unit="times", goal=">= 1.5", met=ratio >= 1.5)
    for name in [one for one in losses if not one.startswith(LOGPROBS)]:
        error = abs(losses[name] / exact - 1.0)
        wanted = "<= 1e-4" if name == SCALAR else ""
        yield Row(case=f"{name}: error of the loss", value=error, unit="relative", goal=wanted,
                  met=error <= 1e-4 if wanted else None)  # fmt: skip


def _exact_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> float:
    """fp32 products of the same operands, a thousand tokens at a time."""
    wide, total = weight.float(), 0.0
    for h, y in zip(hidden.split(1024), targets.split(1024), strict=True):
        total += F.cross_entropy(h.float() @ wide.t(), y, reduction="sum").double().item()
    return total


@part(
    "loss_kernels",
    shows="the loss's kernel on hardware: errors against float64, and TB/s by columns and warps of a program",
    seconds=60,
    rank=30,
)
def kernels() -> Iterator[Row]:
    """One kernel for rows of 1,000, 50,257 and 151,936 columns, then its bandwidth at ten bytes a logit."""
    from lightning_thd.loss.kernels import rows
    from lightning_thd.loss.kernels.operators import RowBuffer, nll_of_rows

    def launch(buffer: RowBuffer, targets: Tensor, columns: int, softcap: float | None) -> Tensor:
        count = len(targets)
        losses, weights = torch.empty(count, device="cuda"), torch.ones(count, device="cuda")
        memory, bf16 = buffer.memory(count), torch.bfloat16
        nll_of_rows(memory, losses, targets, weights, None, bf16, columns, -100, 0.0, 0.0, 1.0, softcap, 1.0)
        return losses

    torch.manual_seed(0)
    for columns in (1000, 50_257, VOCABULARY):
        for softcap in (None, 30.0):
            raw = torch.randn(64, columns, device="cuda") * 4
            targets = torch.randint(0, columns, (64,), device="cuda")
            leaf = raw.double().requires_grad_()
            z = leaf if softcap is None else softcap * torch.tanh(leaf / softcap)
            exact = F.cross_entropy(z, targets, reduction="sum")
            (gradient,) = torch.autograd.grad(exact, leaf)
            wanted = exact.detach()
            buffer = RowBuffer(64, columns, raw.device)
            buffer.products(64, columns).copy_(raw)
            losses = launch(buffer, targets, columns, softcap)
            found = buffer.gradient(64, columns, torch.bfloat16).double()
            for what, error, limit in (
                ("loss", float((losses.double().sum() / wanted - 1.0).abs()), 1e-5),
                ("gradient", float((found - gradient).abs().max() / gradient.abs().max()), 4e-3),
            ):
                case = f"{what}, {columns} columns, softcap {softcap}"
                goal = f"<= {limit}"
                yield Row(case=case, value=error, unit="relative", goal=goal, met=error <= limit)
    buffer = RowBuffer(2048, VOCABULARY, torch.device("cuda"))
    buffer.memory(2048).normal_()
    targets = torch.randint(0, VOCABULARY, (2048,), device="cuda")
    for shape in ((4096, 8), (8192, 8), (8192, 16), (16_384, 16), (16_384, 32), (32_768, 32)):
        with mock.patch.object(rows, "shape_of", return_value=shape):
            us = median_us(partial(launch, buffer, targets, VOCABULARY, None), repeats=5)
        speed = 10 * 2048 * VOCABULARY / us / 1e6
        chosen = shape == rows.shape_of(VOCABULARY)
        goal, met = (">= 2.7", speed >= 2.7) if chosen else ("", None)
        yield Row(case=f"{shape[0]} columns, {shape[1]} warps", value=speed, unit="TB/s", goal=goal, met=met)


@part(
    "loss_fp8_products",
    shows="torch._scaled_mm takes every aligned pack, forward and both gradients",
    seconds=20,
    rank=33,
)
def fp8_products() -> Iterator[Row]:
    """Random totals, aligned for tensorwise fp8, through all three products of a linear layer."""
    if torch.cuda.get_device_capability() < (8, 9):
        yield Row(case="this GPU has no fp8", value=0.0, unit="packs")
        return
    align = Alignment.for_(recipe="tensorwise")
    generator = torch.Generator().manual_seed(0)
    refused = 0
    draws = torch.randint(1, 9000, (200,), generator=generator).tolist()
    one = torch.ones((), device="cuda")
    weight = torch.randn(512, 256, device="cuda").to(torch.float8_e4m3fn)
    for total in draws:
        slots = align.padded_total(total)
        x = torch.randn(slots, 256, device="cuda").to(torch.float8_e4m3fn)
        dy = torch.randn(slots, 512, device="cuda").to(torch.float8_e5m2)
        products = (
            (x, weight.t()),
            (dy, weight.t().contiguous().t()),
            (dy.t().contiguous(), x.t().contiguous().t()),
        )
        try:
            for a, b in products:
                torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        except RuntimeError:
            refused += 1
    yield Row(case="packs refused of 200", value=float(refused), unit="packs", goal="0", met=refused == 0)
