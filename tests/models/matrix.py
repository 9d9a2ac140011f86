"""The oracle of the matrix: stock transformers, one sequence at a time, against packs through "thd"."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_thd.batch import THDBatch
from tests.models.families import VOCAB, build
from tests.oracles import kept

# Lengths include 1, a power of two and its neighbours, and more than one chunk (8) and window (5) of the
# tiny configs.
PACKS = ((7, 1, 16, 3, 8), (1, 9, 17))


class Result(NamedTuple):
    logits: list[Tensor]
    loss: Tensor
    gradients: dict[str, Tensor]


def samples(lengths: Sequence[int], seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(3, VOCAB, (n,), generator=generator)} for n in lengths]


@cache
def packs() -> tuple[THDBatch, ...]:
    return tuple(THDBatch.collate(samples(lengths, seed)) for seed, lengths in enumerate(PACKS))


def shake(model: nn.Module) -> None:
    """Move biases, norms, gates and sinks off their initial zeros and ones, where errors would not show."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def result_of(model: nn.Module, logits: list[Tensor], targets: list[Tensor]) -> Result:
    loss = torch.stack(
        [cross_entropy(x, y, reduction="sum") for x, y in zip(logits, targets, strict=True)]
    ).sum()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Result([x.detach() for x in logits], loss.detach(), gradients)


@cache
def oracle(name: str) -> tuple[dict[str, Any], Result]:
    """Run every sequence alone through the stock eager implementation."""
    model = build(name, "eager").eval()
    shake(model)

    def run_alone() -> tuple[Any, ...]:
        logits = []
        targets = []
        for batch in packs():
            for ids, target in zip(batch.unpack(batch.input_ids), batch.unpack(batch.targets), strict=True):
                logits.append(model(ids[None], use_cache=False).logits[0])
                targets.append(target)
        return tuple(result_of(model, logits, targets))

    weights = model.state_dict()
    return weights, Result(*kept(f"family {name}", weights, run_alone))


def run_packed(model: nn.Module, *, autocast: bool = False) -> Result:
    """Run all packs forward, then backward once through all of them."""
    logits = []
    targets = []
    for batch in packs():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(**batch.hf_kwargs()).logits
        logits.extend(batch.unpack(out.float()))
        targets.extend(batch.unpack(batch.targets))
    return result_of(model, logits, targets)


def relative_error(got: Tensor, want: Tensor, floor: float = 0.0) -> float:
    return ((got - want).abs().max() / want.abs().max().clamp_min(max(floor, 1e-30))).item()


def assert_same(got: Result, want: Result, *, tolerance: float) -> None:
    """Compare logits, loss and every gradient, relative to the largest entry of each tensor.

    A gradient that is a sum of terms that cancel (the decay of a state, a key bias) carries the rounding of
    the terms, so none is held to less than a thousandth of the largest gradient of the model.
    """
    assert len(got.logits) == len(want.logits) > 0
    for ours, theirs in zip(got.logits, want.logits, strict=True):
        assert relative_error(ours, theirs) <= tolerance
    assert relative_error(got.loss, want.loss) <= tolerance
    assert got.gradients.keys() == want.gradients.keys()

    largest = max(gradient.abs().max().item() for gradient in want.gradients.values())
    errors = {
        name: relative_error(got.gradients[name], gradient, 1e-3 * largest)
        for name, gradient in want.gradients.items()
        # A softmax does not see a key bias without rotary positions: its gradient is rounding alone.
        if max(gradient.abs().max(), got.gradients[name].abs().max()).item() > 1e-6 * largest
    }
    assert len(errors) >= len(want.gradients) / 2

    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= tolerance, (worst, errors[worst])


def thd_model(name: str) -> torch.nn.Module:
    """Build a "thd" model with the weights of the oracle."""
    model = build(name, "thd")
    model.load_state_dict(oracle(name)[0])
    return model


def checkpoint(model: torch.nn.Module, *, use_reentrant: bool) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
