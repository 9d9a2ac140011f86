"""Patches of images are found when rows are counted, bound every pack, and weigh in the plan."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from lightning_thd import Packs, Sequences, THDBatch, THDDataModule
from lightning_thd.batch import THDStep
from lightning_thd.batch.media import patch_table
from lightning_thd.data.store.columns import without_pixels
from lightning_thd.data.store.index import build_index
from lightning_thd.flops import FlopsModel
from lightning_thd.packing import Cost

COST = Cost(linear=1, quadratic=0, patch=1, patch_pair=0.01)


def rows(count: int = 40) -> list[dict[str, Any]]:
    """Rows of text, of one image, of two, and of a video of two frames, in turns."""
    found: list[dict[str, Any]] = []
    for i in range(count):
        row: dict[str, Any] = {"input_ids": np.arange(5 + i % 7)}
        size = 2 * (1 + i % 5)
        grids = [[], [[1, size, 4]], [[1, 4, 4], [1, 2, size]], [[2, 4, size]]][i % 4]
        if grids:
            name = "video" if i % 4 == 3 else "image"
            patches = sum(t * h * w for t, h, w in grids)
            pixels = "pixel_values" + ("_videos" if name == "video" else "")
            row |= {f"{name}_grid_thw": np.array(grids), pixels: np.ones((patches, 2), np.float32)}
        found.append(row)
    return found


def patches_of(row: dict[str, Any]) -> int:
    return sum(
        int(np.prod(grid)) for name in ("image_grid_thw", "video_grid_thw") for grid in row.get(name, ())
    )


PATCHES = [patches_of(row) for row in rows()]


def squares_of(row: dict[str, Any]) -> int:
    grids = [grid for name in ("image_grid_thw", "video_grid_thw") for grid in row.get(name, ())]
    return sum(int(t) * int(h * w) ** 2 for t, h, w in grids)


def test_grids_are_counted_with_the_lengths() -> None:
    sizes = build_index(rows()).sizes
    assert sizes[:, 0].tolist() == PATCHES
    assert sizes[:, 1].tolist() == [squares_of(row) for row in rows()]
    assert not sizes[:, 2:].any()
    assert build_index([{"input_ids": [1, 2]}] * 3).sizes.shape == (0, 4)


def test_columns_of_grids_are_counted_without_reading_pixels() -> None:
    datasets = pytest.importorskip("datasets")
    grids = [[[1, 4, 4]], [[1, 2, 2], [1, 4, 4]], [[2, 4, 4]]]
    made = datasets.Dataset.from_list(
        [{"input_ids": [1, 2], "image_grid_thw": grid, "pixel_values": [[0.5]]} for grid in grids]
    ).with_format("numpy")
    assert without_pixels(made).column_names == ["input_ids", "image_grid_thw"]
    index = build_index(made)
    assert index.sizes[:, 0].tolist() == [16, 20, 32]
    assert index.media.tolist() == [0, 1, 2]


def test_images_of_one_size_are_counted_by_the_models_patch() -> None:
    given = [
        {"input_ids": [1] * 4, "pixel_values": torch.zeros(n, 3, 28, 56)} if n else {"input_ids": [1]}
        for n in (0, 1, 3)
    ]
    sizes = build_index(given).sizes
    assert patch_table(sizes, 14).tolist() == [[0, 0], [8, 64], [24, 3 * 64]]
    with pytest.raises(ValueError, match="max_patches=9, but images of the train data come as pixels"):
        plan(THDDataModule(given, capacity=8, max_patches=9))
    stats = THDBatch.collate(given, vision=FlopsModel.from_config(LLAVA).vision).stats
    assert (stats.vision_patches, stats.vision_squares) == (32, 4 * 64)


TOWER = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "image_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_size": 14,
}
TEXT = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
LLAVA = {"model_type": "llava", "vision_config": TOWER, "text_config": TEXT}


def plan(data: THDDataModule, dp: int = 2) -> list[Any]:
    data.attach(ranks=dp, accumulate=1)
    data.setup("fit")
    planner = data.train_steps().planner
    assert planner is not None
    return [planner.step(0, k, dp) for k in range(planner.num_steps(0))]


@pytest.mark.parametrize("step", [Packs(2), Sequences(20)])
def test_the_module_bounds_patches_and_weighs_them(step: Packs | Sequences) -> None:
    data = THDDataModule(rows(), capacity=64, global_batch=step, max_patches=100, cost=COST)
    plans = plan(data)
    assert sorted(i for one in plans for i in one.spans.index) == list(range(40))
    for one in plans:
        assert one.microbatch_patches.max() <= 100
        assert one.patches.tolist() == [PATCHES[i] for i in one.spans.index]
    squares = np.array([squares_of(row) for row in rows()])
    at = plans[0].spans.index
    np.testing.assert_allclose(
        plans[0].span_work, plans[0].spans.lengths + np.array(PATCHES)[at] + 0.01 * squares[at]
    )
    [batches] = [list(data.train_steps())]
    assert (
        sum(batch.stats.vision_patches for made in batches for batch in cast("THDStep", made).microbatches)
        > 0
    )


def test_what_rows_do_not_say_is_declared_by_a_function() -> None:
    given = [{"input_ids": np.arange(6), "features": np.ones((i + 1, 2))} for i in range(12)]
    data = THDDataModule(
        given, capacity=64, max_patches=20, extras_cost=lambda row: 2 * (len(row["features"]) % 6), cost=COST
    )
    assert all(one.microbatch_patches.max() <= 20 for one in plan(data, 1))
    grids = THDDataModule(
        given, capacity=80, extras_cost=lambda row: [[2, 3, len(row["features"])]], cost=COST
    )
    [one] = plan(grids, 1)
    assert one.patches.tolist() == [6 * (i + 1) for i in one.spans.index]
    with pytest.raises(ValueError, match=r"Sequence 0: extras_cost\(sample\)"):
        plan(THDDataModule(given, capacity=64, extras_cost=lambda row: -1))
    for many in (2**40, [[1, 2**20, 2**20]]):
        with pytest.raises(
            ValueError, match=r"extras_cost\(sample\) gives images .* Give patches, not pixels"
        ):
            plan(THDDataModule(given, capacity=64, extras_cost=lambda row, many=many: many))


def test_images_that_are_dropped_take_no_part_in_a_mixture() -> None:
    texts = [{"input_ids": np.arange(9)} for _ in range(40)]
    data = THDDataModule(
        {"a": (rows(), 0.5), "b": (texts, 0.5)}, capacity=64, max_patches=20, cost=COST, oversize="drop"
    )
    drawn = [i for one in plan(data) for i in one.spans.index]
    assert sum(i < 40 for i in drawn) == sum(i >= 40 for i in drawn) == 40
    assert all(PATCHES[i] <= 20 for i in drawn if i < 40)


iter_rows: Any = lambda: iter(rows())  # noqa: E731


def test_a_stream_bounds_and_weighs_patches_too() -> None:
    data = THDDataModule(iter_rows, capacity=64, global_batch=Sequences(20), max_patches=100, cost=COST)
    data.attach()
    steps = list(zip(range(2), data.train_steps(), strict=False))
    stats = [batch.stats for _, step in steps for batch in cast("THDStep", step).microbatches]
    assert all(one.vision_patches <= 100 for one in stats)
    assert sum(one.vision_patches for one in stats) == sum(PATCHES)
    refused = THDDataModule(iter_rows, capacity=64, global_batch=Sequences(20), max_patches=10)
    refused.attach()
    with pytest.raises(ValueError, match=r"the sequence has 16 image patches but max_patches=10"):
        next(iter(refused.train_steps()))
    dropped = THDDataModule(
        iter_rows, capacity=64, global_batch=Sequences(9), max_patches=10, oversize="drop"
    )
    dropped.attach()
    assert cast("THDStep", next(iter(dropped.train_steps()))).microbatches[0].stats.vision_patches <= 10


class KnowsLengths(list[Any]):
    lengths: list[int]


def test_a_bound_needs_the_patches_of_every_row() -> None:
    given = KnowsLengths(rows())
    given.lengths = [len(row["input_ids"]) for row in given]
    with pytest.raises(ValueError, match="gives its `lengths`, so that no row was read"):
        plan(THDDataModule(given, capacity=64, max_patches=100))
    assert plan(THDDataModule(given, capacity=64, max_patches=100, extras_cost=patches_of))
    with pytest.raises(ValueError, match=r"Sequence 3 has 64 image patches but max_patches=60"):
        plan(THDDataModule(rows(), capacity=64, max_patches=60))


def test_images_that_change_after_they_were_counted_are_refused() -> None:
    class Changes(list[Any]):
        pass

    given = Changes(rows(4))
    data = THDDataModule(given, capacity=64, cost=COST)
    data.setup("fit")
    given[1] = {**given[1], "image_grid_thw": np.array([[1, 8, 8]])}
    with pytest.raises(
        ValueError, match=r"Sequence 1 has \(64, .*\) patches and pixels of images, but \(16, "
    ):
        list(data.train_dataloader())
