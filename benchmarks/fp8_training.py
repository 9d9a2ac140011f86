"""The loss of 200 steps in emulated FP8 beside bf16: Llama and Mixtral, every recipe of torchao.

A part of ``python -m benchmarks.fp8`` (``--training`` runs it alone; about five minutes on one core). Both
train from the same weights on the same packs in the same order, which is asserted; the products of FP8 are
torchao's with ``emulate=True``: rounded to FP8, multiplied in high precision. 80 documents are learned by
heart, which magnifies any difference: bf16 itself, begun again with one weight moved by 0.01, ends 1 to 2 %
elsewhere. So means over the last 50 steps of three starts are compared; every start is printed.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.results import less
from lightning_thd import THDDataModule
from lightning_thd.precision import FP8Precision
from tests.precision.runs import DATA, Module, fit, llama, mixtral

STEPS, LAST, STARTS, GOAL = 200, 50, 3, 2.0  # the goal in per cent
SLOTS = 256
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
MODELS: dict[str, Callable[[int], nn.Module]] = {"llama": llama, "mixtral": mixtral}


class Watched(Module):
    """Remembers the packs it was given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.packs: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Train, and remember."""
        self.packs.append(hash(tuple(batch.input_ids.tolist())))
        return super().training_step(batch, batch_idx)


def train(model: nn.Module, recipe: str | None, steps: int = STEPS) -> Watched:
    """Train once.

    Args:
        model: with weights in fp32, which training rounds to bf16.
        recipe: of torchao; None for bf16.
        steps: optimizer steps.
    """
    module = Watched(model)
    plugin = None if recipe is None else FP8Precision(recipe, engine="torchao", emulate=True)
    data = THDDataModule(DATA, capacity=SLOTS, pad_to=SLOTS)
    precision = {"precision": "bf16-true"} if recipe is None else {}
    with tempfile.TemporaryDirectory() as folder:
        fit(Path(folder), module, plugin, steps=steps, data=data, **precision)
    return module


def show(steps: int = STEPS) -> None:
    """Train, print and keep the goals.

    Args:
        steps: of a run; the goals are kept for the full number alone.
    """
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the sums of more threads differ from run to run
    print(f"\nmean loss of the last {LAST} of {steps} steps, packs of {SLOTS}: {STARTS} starts, their mean")
    for name, make in MODELS.items():
        plain = [train(make(start), None, steps) for start in range(STARTS)]
        reference = _print(name, "bf16", plain, None)
        for recipe in RECIPES:
            low = [train(make(start), recipe, steps) for start in range(STARTS)]
            for ours, theirs in zip(low, plain, strict=True):
                assert ours.packs == theirs.packs, "the runs trained on other packs"
                assert ours.losses != theirs.losses, "nothing was rounded to FP8"
            off = abs(100 * (_print(name, recipe, low, reference) / reference - 1))
            if steps == STEPS:
                less(f"{name}, {recipe}: loss after {STEPS} steps away from bf16", off, "%", GOAL)
    torch.set_num_threads(threads)
    logging.disable(logging.NOTSET)


def _print(name: str, recipe: str, runs: list[Watched], reference: float | None) -> float:
    """Print the starts of one recipe and return their mean."""
    ends = [float(np.mean(run.losses[-LAST:])) for run in runs]
    mean = float(np.mean(ends))
    away = "" if reference is None else f"  {100 * (mean / reference - 1):+.2f} % from bf16"
    print(
        f"{name:<9}{recipe:<20}" + "".join(f"{end:8.4f}" for end in ends) + f"  ={mean:8.4f}{away}",
        flush=True,
    )
    return mean
