"""Ten thousand batches of a real data module, against what the kernels of every recipe assert."""

from __future__ import annotations

from typing import Any

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


def batches(recipe: Recipe, layout: tuple[int, int, bool], count: int, seed: int) -> Any:
    """Give that many packs as a fit would: planned, padded and collated by the data module."""
    rng = np.random.default_rng(seed)
    cp, tp, sequence_parallel = layout
    alignment = recipe.alignment(cp=cp, tp=tp, sequence_parallel=sequence_parallel)
    capacity = int(rng.integers(1, 3)) * max(LONGEST * 2, alignment.total_multiple) + 7
    lengths = np.minimum(rng.lognormal(3, 1, 1_000).astype(int) + 1, LONGEST)
    ids = torch.arange(LONGEST) % 250
    samples = [{"input_ids": ids[:length]} for length in lengths]
    step: dict[str, Any] = {"global_batch": Sequences(7)} if seed % 2 else {}
    data = THDDataModule(samples, capacity=capacity, seed=seed, **step)
    data.attach(alignment=alignment)
    data.setup("fit")
    while count:
        for given in data.train_dataloader():
            for batch in given.microbatches if step else [given]:
                yield batch
                count -= 1
                if not count:
                    return


def violations(batch: THDBatch, recipe: Recipe, layout: tuple[int, int, bool]) -> list[str]:
    cp, tp, sequence_parallel = layout
    slots = batch.input_ids.numel()
    ranks = {"local": cp * tp if sequence_parallel else cp, "gathered": cp}
    found = [
        f"{slots} slots, {shard} {multiple}"
        for shard, multiple in ASSERTED[recipe.name]
        if slots % (ranks[shard] * multiple)
    ]
    padded = batch.cu_seqlens_padded.diff()
    if cp > 1 and bool((padded % (2 * cp)).any()):
        found.append(f"lengths {padded.tolist()} at cp={cp}")
    # every slot is of a sequence; what is not a token has no target
    if int(batch.cu_seqlens_padded[-1]) != slots or slots < sum(batch.lengths):
        found.append(f"{slots} slots, offsets end at {int(batch.cu_seqlens_padded[-1])}")
    if int((batch.targets != -100).sum()) != sum(length - 1 for length in batch.lengths if length):
        found.append("targets outside of the sequences")
    return found


@pytest.mark.parametrize("wanted", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_batches_of_a_data_module_break_no_rule(wanted: int) -> None:
    cells = [(recipe, layout) for recipe in KNOWN_RECIPES.values() for layout in LAYOUTS]
    each, seen, found = -(-wanted // len(cells)), 0, []
    sizes = set()
    for seed, (recipe, layout) in enumerate(cells):
        for batch in batches(recipe, layout, each, seed):
            seen += 1
            sizes.add(batch.input_ids.numel())
            found += [f"{recipe.name} {layout}: {what}" for what in violations(batch, recipe, layout)]
    assert seen >= wanted
    assert len(sizes) > 10  # not one shape again and again
    assert found == []
