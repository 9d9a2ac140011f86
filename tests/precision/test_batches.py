"""Ten thousand batches of a real data module, against what the kernels of every recipe assert."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from lightning_thd import Sequences, THDDataModule
from lightning_thd.batch import THDBatch
from lightning_thd.precision.recipes import KNOWN_RECIPES, Recipe

# What is asserted of the slots of one rank, said again from Transformer Engine 2.20 and torch 2.13: "local"
# slots are those before sequence parallelism gathers them, T / (cp x tp), "gathered" ones T / cp.
ASSERTED: dict[str, tuple[tuple[str, int], ...]] = {
    **dict.fromkeys(
        ("delayed", "current", "tensorwise", "rowwise", "rowwise_with_gw_hp"),
        (("local", 8), ("gathered", 16)),  # rows of an input; inner dimension of the weight gradient
    ),
    "blockwise": (("local", 8), ("local", 128)),
    "mxfp8": (("local", 8), ("local", 32)),
    "nvfp4": (("local", 8), ("local", 16), ("local", 128), ("gathered", 32)),
}
LAYOUTS = ((1, 1, False), (2, 1, False), (4, 2, True), (2, 4, True))  # cp, tp, sequence parallel
LONGEST = 80


def batches(recipe: Recipe, layout: tuple[int, int, bool], count: int, seed: int) -> Iterator[THDBatch]:
    """Give that many packs as a fit would: planned, padded and collated by the data module."""
    rng = np.random.default_rng(seed)
    cp, tp, sequence_parallel = layout
    alignment = recipe.alignment(cp=cp, tp=tp, sequence_parallel=sequence_parallel)
    capacity = int(rng.integers(1, 3)) * max(LONGEST * 2, alignment.total_multiple) + 7
    lengths = np.minimum(rng.lognormal(3, 1, 1_000).astype(int) + 1, LONGEST)
    ids = torch.arange(LONGEST) % 250
    samples = [{"input_ids": ids[:length]} for length in lengths]
    has_steps = seed % 2 == 1
    data = THDDataModule(
        samples, capacity=capacity, seed=seed, global_batch=Sequences(7) if has_steps else None
    )
    data.attach(alignment=alignment)
    data.setup("fit")

    def endless() -> Iterator[THDBatch]:
        while True:
            for batch_or_step in data.train_dataloader():
                yield from batch_or_step.microbatches if has_steps else [batch_or_step]

    yield from itertools.islice(endless(), count)


def violations(batch: THDBatch, recipe: Recipe, layout: tuple[int, int, bool]) -> list[str]:
    """Say which rules of the recipe's kernels a batch breaks."""
    cp, tp, sequence_parallel = layout
    slots = batch.input_ids.numel()
    ranks = {"local": cp * tp if sequence_parallel else cp, "gathered": cp}
    broken = [
        f"{slots} slots, {shard} {multiple}"
        for shard, multiple in ASSERTED[recipe.name]
        if slots % (ranks[shard] * multiple)
    ]

    padded = batch.cu_seqlens_padded.diff()
    if cp > 1 and bool((padded % (2 * cp)).any()):
        broken.append(f"lengths {padded.tolist()} at cp={cp}")
    last_offset = int(batch.cu_seqlens_padded[-1])
    if last_offset != slots or slots < sum(batch.lengths):
        broken.append(f"{slots} slots, offsets end at {last_offset}")
    if int((batch.targets != -100).sum()) != sum(length - 1 for length in batch.lengths if length):
        broken.append("targets outside of the sequences")
    return broken


@pytest.mark.parametrize("least", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_batches_of_a_data_module_break_no_rule(least: int) -> None:
    """Packs for every recipe and layout of ranks have the multiples that its kernels assert."""
    cells = [(recipe, layout) for recipe in KNOWN_RECIPES.values() for layout in LAYOUTS]
    per_cell = math.ceil(least / len(cells))
    broken = []
    sizes = []
    for seed, (recipe, layout) in enumerate(cells):
        for batch in batches(recipe, layout, per_cell, seed):
            sizes.append(batch.input_ids.numel())
            broken += [f"{recipe.name} {layout}: {rule}" for rule in violations(batch, recipe, layout)]
    assert broken == []
    assert len(sizes) >= least
    assert len(set(sizes)) > 10  # not one shape again and again
