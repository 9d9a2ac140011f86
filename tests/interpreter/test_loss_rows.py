"""The kernels of the losses, run by Triton's interpreter, against autograd in fp64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_thd.loss.kernels.operators import (
    RowBuffer,
    divergence_gradient_of_rows,
    divergence_terms_of_rows,
    gradient_of_rows,
    nll_of_rows,
    statistics_of_rows,
)
from lightning_thd.loss.tiles.softmax import MAX, SUM, TARGET, TOTAL, WEIGHTED, blank_statistics

# The interpreter's own numpy.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")
ROWS = 7
# The interpreter cuts fp32 off to bf16, by up to 2^-7; a GPU rounds, by up to 2^-9.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 7.9e-3}
Report = Callable[[str, float], None]
MAPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 30.0},
    "scale and temperature": {"scale": 0.25, "temperature": 1.7},
    "softcap, scale and temperature": {"softcap": 5.0, "scale": 0.5, "temperature": 0.7},
    "label smoothing": {"smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "all at once": {"softcap": 20.0, "scale": 1.5, "temperature": 0.8, "smoothing": 0.2, "z_loss": 1e-3},
}
EXTRAS = ("", "bias", "ignored", "-inf")


@pytest.fixture(autouse=True)
def masked_lanes() -> Iterator[None]:
    """Let the interpreter compute lanes that are masked out, which may hold anything."""
    before = np.seterr(all="ignore")
    yield
    np.seterr(**before)


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Report:
    """Have ``make test-kernels`` list an error at its end."""
    return record_property


def cases() -> Iterator[Any]:
    widths = (8, 16, 1000, 1031, 40_000)
    for name, columns, compute, extra in itertools.product(MAPS, widths, TOLERANCE, EXTRAS):
        if columns == 40_000 and (name not in ("plain", "all at once") or extra == "bias"):
            continue
        if extra == "-inf" and ("smoothing" in MAPS[name] or "softcap" in MAPS[name]):
            continue  # the mean logit is -inf, and a cap makes all logits finite
        sample = columns == 1031 and (name, extra) in (("all at once", "ignored"), ("plain", "-inf"))
        marks = [] if sample else [pytest.mark.slow]
        title = f"{name} {columns} {str(compute)[6:]} {extra}".strip()
        yield pytest.param(name, columns, compute, extra, marks=marks, id=title)


def numbers(options: dict[str, Any]) -> tuple[float, float | None, float]:
    return options.get("scale", 1.0), options.get("softcap"), options.get("temperature", 1.0)


def logits_of(raw: Tensor, bias: Tensor | None, options: dict[str, Any]) -> Tensor:
    scale, softcap, temperature = numbers(options)
    z = (raw if bias is None else raw + bias.double()) * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z / temperature


def draw(columns: int, *, infinite: bool = False) -> tuple[Tensor, Tensor]:
    """Return raw products and targets; some columns are -inf, but not the targets'."""
    torch.manual_seed(columns)
    raw = torch.randn(ROWS, columns) * 4
    targets = torch.randint(0, columns, (ROWS,))
    if infinite:
        raw[:, ::5] = -torch.inf
        raw[:, -1] = 1.0
        targets = torch.full((ROWS,), columns - 1)
    return raw, targets


def filled(raw: Tensor) -> RowBuffer:
    buffer = RowBuffer(*raw.shape, raw.device)
    buffer.memory(len(raw)).fill_(torch.nan)
    buffer.products(*raw.shape).copy_(raw)
    return buffer


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference as a share of the largest number."""
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize(("name", "columns", "compute", "extra"), list(cases()))
def test_losses_and_gradients(
    name: str, columns: int, compute: torch.dtype, extra: str, report: Report
) -> None:
    options = MAPS[name]
    raw, targets = draw(columns, infinite=extra == "-inf")
    weights = torch.rand(ROWS)
    bias = torch.randn(columns) if extra == "bias" else None
    products = raw.clone()
    if extra == "ignored":
        targets[::3] = -100
        products[0] = torch.nan  # a row that does not count

    leaf = raw.double().requires_grad_()
    z = logits_of(leaf, bias, options)
    lse = z.logsumexp(1)
    smoothing = options.get("smoothing", 0.0)
    at_target = z.gather(1, targets.clamp_min(0)[:, None]).squeeze(1)
    loss = (1.0 - smoothing) * (lse - at_target) + options.get("z_loss", 0.0) * lse.square()
    if smoothing:
        loss = loss + smoothing * (lse - z.mean(1))
    expected = torch.where(targets != -100, weights.double() * loss, 0.0)
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    expected = expected.detach()

    buffer = filled(products)
    losses = torch.full((ROWS,), torch.nan)
    nll_of_rows(
        buffer.memory(ROWS), losses, targets, weights, bias, compute, columns, -100,
        smoothing, options.get("z_loss", 0.0), *numbers(options),
    )  # fmt: skip
    dx = buffer.gradient(ROWS, columns, compute)
    assert dx.dtype == compute
    assert float(((losses.double() - expected).abs() / expected.abs().clamp_min(1.0)).max()) < 2e-6
    assert error(dx, gradient) < TOLERANCE[compute]
    if columns == 1031 and compute == torch.float32:
        report(f"gradient of rows, {name}{extra and ', '}{extra}", error(dx, gradient))


@pytest.mark.parametrize("columns", [1000, pytest.param(1031, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("options", [{}, {"softcap": 8.0, "scale": 0.5, "temperature": 1.3}])
def test_statistics_and_gradients_over_tiles_of_the_vocabulary(
    columns: int, tiles: int, options: dict[str, Any], report: Report
) -> None:
    raw, targets = draw(columns)
    leaf = raw.double().requires_grad_()
    z = logits_of(leaf, None, options)
    log_p = z.log_softmax(1)
    outputs = [
        log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1), z.logsumexp(1), z.mean(1)
    ]  # fmt: skip
    upstream = torch.randn(4, ROWS, dtype=torch.float64)
    summed = sum((g * output).sum() for g, output in zip(upstream, outputs, strict=True))
    (expected,) = torch.autograd.grad(summed, leaf)
    outputs = [output.detach() for output in outputs]

    edges = [round(columns * k / tiles) for k in range(tiles + 1)]
    parts = [slice(*pair) for pair in itertools.pairwise(edges)]
    stats = blank_statistics(raw, ROWS, torch.float32)
    for part in parts:
        buffer = filled(raw[:, part])
        width = part.stop - part.start
        statistics_of_rows(
            buffer.memory(ROWS), stats, targets, None, width, part.start, True, True, *numbers(options)
        )
    log_mass = stats[SUM].log()
    lse = stats[MAX] + log_mass
    entropy = log_mass - stats[WEIGHTED] / stats[SUM]
    actual = (stats[TARGET] - lse, entropy, lse, stats[TOTAL] / columns)
    for mine, oracle in zip(actual, outputs, strict=True):
        assert float((mine.double() - oracle).abs().max()) < 1e-5

    g_logp, g_entropy, g_lse, g_mean = upstream.float()
    direct = g_lse - g_logp - g_entropy * entropy
    factors = torch.stack([lse, direct, -g_entropy, g_logp, g_mean / columns])
    for part, compute in itertools.product(parts, TOLERANCE):
        buffer = filled(raw[:, part])
        width = part.stop - part.start
        gradient_of_rows(
            buffer.memory(ROWS), factors, targets, None, compute, width, part.start, True, *numbers(options)
        )
        worst = (buffer.gradient(ROWS, width, compute).double() - expected[:, part]).abs().max()
        assert float(worst / expected.abs().max()) < TOLERANCE[compute]
    report(f"log-probabilities of rows, {columns} columns, {tiles} tiles", error(actual[0], outputs[0]))


def divergence_of(z: Tensor, u: Tensor, kind: str, beta: float) -> Tensor:
    """Return the divergence of every row in fp64, from student logits ``z`` and teacher logits ``u``."""
    s = z.log_softmax(1)
    t = u.log_softmax(1)
    p = s.exp()
    q = t.exp()
    m = (beta * q + (1.0 - beta) * p).log()

    def kl(a: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
        here = a > 0
        return (a * torch.where(here, log_a - torch.where(here, log_b, 0.0), 0.0)).sum(1)

    if kind == "jsd":
        return beta * kl(q, t, m) + (1.0 - beta) * kl(p, s, m)
    return kl(q, t, s) if kind == "kl" else kl(p, s, t)


def normalisers(z: Tensor) -> Tensor:
    """Return each row's largest logit, and the log of its ``sum e^(z - largest)``, fp32 ``[2, rows]``."""
    largest = z.amax(1).float()
    log_mass = (z - largest.double()[:, None]).logsumexp(1)
    return torch.stack([largest, log_mass.float()])


def rounding_of_divergences(columns: int, largest: float, *, mapped: bool) -> float:
    """Return how far rounding in fp32 can move a divergence or its gradient, relative to the largest entry.

    A log-probability s has errors of ``|s|`` units: two subtractions and the product with log2(e). Columns
    that count have ``|s|`` up to the log of their number, in student and teacher. Sums and the rest add a few
    units. Maps of logits round each logit three times: bias, scale or softcap, temperature.
    """
    units = 2 * 3 * math.log(columns) + 12
    if mapped:
        units += 2 * 3 * largest
    return units * 2.0**-24


def divergence_cases() -> Iterator[Any]:
    for kind, columns, compute, extra in itertools.product(
        ("kl", "reverse_kl", "jsd"), (8, 1000, 1031, 9000), TOLERANCE, ("", "maps", "ignored", "-inf")
    ):
        sample = columns == 1031 and compute == torch.float32 and extra in ("maps", "-inf")
        title = f"{kind} {columns} {str(compute)[6:]} {extra}".strip()
        marks = [] if sample else [pytest.mark.slow]
        yield pytest.param(kind, columns, compute, extra, marks=marks, id=title)


@pytest.mark.parametrize(("kind", "columns", "compute", "extra"), list(divergence_cases()))
def test_divergences_and_gradients(
    kind: str, columns: int, compute: torch.dtype, extra: str, report: Report
) -> None:
    beta = 0.3
    ours: dict[str, Any] = {"temperature": 1.0}
    theirs: dict[str, Any] = {"temperature": 1.0}
    bias = None
    taught_bias = None
    if extra == "maps":
        ours = {"softcap": 20.0, "scale": 1.5, "temperature": 0.8}
        theirs = {"softcap": 15.0, "scale": 0.5, "temperature": 0.8}
        bias = torch.randn(columns)
        taught_bias = torch.randn(columns)
    raw, targets = draw(columns, infinite=extra == "-inf")
    torch.manual_seed(1)
    taught_raw = torch.randn(ROWS, columns) * 3
    weights = torch.rand(ROWS)
    if extra == "-inf":
        taught_raw[:, :-1:5] = -torch.inf
    products = raw.clone()
    if extra == "ignored":
        targets[::3] = -100
        products[0] = torch.nan  # a row that does not count

    leaf = raw.double().requires_grad_()
    z = logits_of(leaf, bias, ours)
    u = logits_of(taught_raw.double(), taught_bias, theirs)
    real = u.isfinite().all(0)  # autograd has NaN for columns without probability, which get no gradient
    expected = torch.where(targets != -100, divergence_of(z[:, real], u[:, real], kind, beta), 0.0)
    (gradient,) = torch.autograd.grad((expected * weights.double()).sum(), leaf)
    expected = expected.detach()

    buffer = filled(products)
    teacher = filled(taught_raw)
    memory = buffer.memory(ROWS), teacher.memory(ROWS)
    factors = torch.cat([normalisers(z.detach()), normalisers(u), torch.zeros(2, ROWS)])
    sums = torch.full((5, ROWS), torch.nan)
    losses = torch.full((ROWS,), torch.nan)
    maps = (*numbers(ours)[:2], *numbers(theirs))
    rest = (bias, taught_bias)
    if kind != "kl":
        divergence_terms_of_rows(*memory, sums, factors, targets, *rest, columns, -100, kind, beta, *maps)
        losses = sums[0]
        factors[4:] = sums[1:3]
    divergence_gradient_of_rows(
        *memory, losses, factors, targets, weights, *rest, compute, columns, -100, kind, beta, *maps
    )  # fmt: skip
    dx = buffer.gradient(ROWS, columns, compute)
    assert dx.dtype == compute
    logits = torch.cat([z.detach(), u], dim=1)
    limit = rounding_of_divergences(
        columns, float(logits[logits.isfinite()].abs().max()), mapped=extra == "maps"
    )
    assert float(((losses.double() - expected).abs() / expected.abs().clamp_min(1.0)).max()) < limit
    if compute == torch.bfloat16:
        limit = TOLERANCE[compute]
    assert error(dx, gradient) < limit
    if columns == 1031 and compute == torch.float32:
        report(f"gradient of {kind}{extra and ', '}{extra}", error(dx, gradient))


@pytest.mark.parametrize("kind", ["reverse_kl", "jsd"])
@pytest.mark.parametrize("columns", [101, pytest.param(9000, marks=pytest.mark.slow)])
def test_divergences_keep_fp32_if_one_token_is_nearly_certain(
    kind: str, columns: int, report: Report
) -> None:
    """Compare each row by itself: g of such a token and the sum of e^s g are nearly equal there."""
    beta = 0.5
    maps = (1.0, None, 1.0, None, 1.0)
    raw, targets = draw(columns)
    raw /= 4
    raw[:, columns // 2] = torch.linspace(5.0, 17.0, ROWS)
    taught_raw = torch.randn(ROWS, columns)
    leaf = raw.double().requires_grad_()
    (expected,) = torch.autograd.grad(divergence_of(leaf, taught_raw.double(), kind, beta).sum(), leaf)

    buffer = filled(raw)
    memory = buffer.memory(ROWS), filled(taught_raw).memory(ROWS)
    factors = torch.cat([normalisers(raw.double()), normalisers(taught_raw.double()), torch.zeros(2, ROWS)])
    sums = torch.zeros(5, ROWS)
    losses = torch.zeros(ROWS)
    divergence_terms_of_rows(
        *memory, sums, factors, targets, None, None, columns, -100, kind, beta, *maps
    )  # fmt: skip
    factors[4:] = sums[1:3]
    divergence_gradient_of_rows(
        *memory, losses, factors, targets, torch.ones(ROWS), None, None, torch.float32, columns, -100, kind,
        beta, *maps,
    )  # fmt: skip
    dx = buffer.gradient(ROWS, columns, torch.float32)
    worst = float(((dx.double() - expected).abs().amax(1) / expected.abs().amax(1)).max())
    assert worst < rounding_of_divergences(columns, 17.0, mapped=False)
    report(f"gradient of {kind}, one of {columns} tokens nearly certain, row by row", worst)


def test_what_is_not_a_number_shows() -> None:
    """A NaN logit shows in the loss and gradient of its row alone, as does a row of -inf."""
    raw, targets = draw(64)
    raw[1, 5] = torch.nan
    raw[2] = -torch.inf
    buffer = filled(raw)
    losses = torch.zeros(ROWS)
    nll_of_rows(
        buffer.memory(ROWS), losses, targets, torch.ones(ROWS), None, torch.bfloat16, 64, -100, 0.0, 0.0,
        1.0, None, 1.0,
    )  # fmt: skip
    gradient = buffer.gradient(ROWS, 64, torch.bfloat16)
    assert losses.isnan().nonzero().flatten().tolist() == [1, 2]
    assert gradient[1].isnan().all()
    assert gradient.isnan().any(1).nonzero().flatten().tolist() == [1, 2]


def test_each_logit_is_loaded_twice_and_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten bytes in bf16, over rows of three blocks; ``benchmarks/loss_counts.py`` counts with them."""
    from triton.runtime import interpreter

    moved = {"load": 0, "store": 0}
    builder = interpreter.InterpreterBuilder
    load = builder.create_masked_load
    store = builder.create_masked_store

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        loaded = load(self, pointers, mask, *rest)
        if mask.data.size > 1:
            moved["load"] += int(mask.data.sum()) * loaded.data.itemsize
        return loaded

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if mask.data.size > 1:
            moved["store"] += int(mask.data.sum()) * 2  # bf16
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(builder, "create_masked_load", counted_load)
    monkeypatch.setattr(builder, "create_masked_store", counted_store)
    columns = 40_000
    raw, targets = draw(columns)
    nll_of_rows(
        filled(raw).memory(ROWS), torch.empty(ROWS), targets, torch.ones(ROWS), None, torch.bfloat16,
        columns, -100, 0.0, 0.0, 1.0, None, 1.0,
    )  # fmt: skip
    assert moved == {"load": 8 * ROWS * columns, "store": 2 * ROWS * columns}
