"""Ordinary padded batches under the monitor, against a count by hand from the lengths of their rows."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from transformers import BatchEncoding

from lightning_thd.callbacks.seen import Dense, microbatches, resolve
from lightning_thd.flops import FlopsModel, SeqStats
from tests.callbacks.fits import CONFIG, PEAK, Clock, Memory, Module, loader, monitor, trainer
from tests.device_reads import RefuseDeviceReads

LENGTHS = [[5, 3, 8], [1, 8, 2], [4, 4, 7], [8, 8, 8]]
N = 8
PAD = 0
WINDOWED = {**CONFIG, "model_type": "mistral", "sliding_window": 4, "pad_token_id": PAD}
ENCODER = {
    "model_type": "bert", "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "type_vocab_size": 2, "max_position_embeddings": 16,
}  # fmt: skip


def padded(lengths: list[int], *, left: bool = False) -> dict[str, torch.Tensor]:
    mask = torch.stack([(torch.arange(N) < length).long() for length in lengths])
    mask = mask.flip(1) if left else mask
    ids = torch.randint(1, 31, (len(lengths), N), generator=torch.Generator().manual_seed(0))
    return {"input_ids": torch.where(mask == 1, ids, PAD), "attention_mask": mask}


def with_labels(lengths: list[int], *, left: bool = False) -> dict[str, torch.Tensor]:
    rows = padded(lengths, left=left)
    labels = torch.where(rows["attention_mask"] == 1, rows["input_ids"], -100)
    return {"input_ids": rows["input_ids"], "labels": labels}


def with_positions(lengths: list[int], fill: int, *, left: bool) -> dict[str, torch.Tensor]:
    rows = padded(lengths, left=left)
    mask = rows["attention_mask"]
    positions = torch.where(mask == 1, mask.cumsum(1) - 1, fill)
    return {"input_ids": rows["input_ids"], "position_ids": positions}


SHAPES: dict[str, Any] = {
    "right": padded,
    "left": lambda lengths: padded(lengths, left=True),
    "encoding": lambda lengths: BatchEncoding(padded(lengths)),
    "tuple of a dict": lambda lengths: (padded(lengths), torch.ones(len(lengths))),
    "tuple of tensors": lambda lengths: tuple(padded(lengths).values()),
    "mask last": lambda lengths: (
        padded(lengths)["input_ids"],
        with_labels(lengths)["labels"],
        padded(lengths)["attention_mask"].bool(),
    ),
    "labels": with_labels,
    "labels left": lambda lengths: with_labels(lengths, left=True),
    "lengths": lambda lengths: {"input_ids": padded(lengths)["input_ids"], "lengths": torch.tensor(lengths)},
    "list of lengths": lambda lengths: {"input_ids": padded(lengths)["input_ids"], "lengths": lengths},
}


class Rows(Module):
    """Trains on padded batches of any shape."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        while isinstance(batch, tuple | list):
            batch = batch[0]
        ids = batch if isinstance(batch, torch.Tensor) else batch["input_ids"]
        self.clock.sleep(self.seconds)
        return self.model.head(self.model.embed(ids)).square().mean()


class Refuse(L.Callback):
    """Refuses device reads around the hooks of the monitor, which stands between two of these."""

    mode: Any = contextlib.nullcontext()

    def __init__(self, *, first: bool, steps: int) -> None:
        self.first = first
        self.steps = steps

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
        if self.first and index + 1 < self.steps:
            Refuse.mode = RefuseDeviceReads()
            Refuse.mode.__enter__()
        elif not self.first and index + 1 < self.steps:
            Refuse.mode.__exit__(None, None, None)


def fit(tmp_path: Path, batches: list[Any], config: dict[str, Any], **settings: Any) -> Memory:
    """Train on batches, with one log at the end; no step before it may read the device."""
    clock = Clock()
    memory = Memory()
    steps = len(batches)
    callbacks = [
        Refuse(first=True, steps=steps),
        monitor(clock, **settings),
        Refuse(first=False, steps=steps),
    ]
    run = trainer(tmp_path, *callbacks, logger=memory, log_every_n_steps=steps)
    run.fit(Rows(clock, config=config), loader(batches))
    return memory


def by_hand(config: dict[str, Any], lengths: list[list[int]]) -> tuple[SeqStats, int]:
    model = FlopsModel.from_config(config)
    flat = [length for row in lengths for length in row]
    stats = SeqStats.from_lengths(flat, windows=model.windows, slots=len(flat) * N)
    return stats, model.training_flops(stats).model


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("config", [WINDOWED, {**ENCODER, "pad_token_id": PAD}], ids=["window", "encoder"])
def test_padded_rows_count_their_real_tokens(tmp_path: Path, shape: str, config: dict[str, Any]) -> None:
    memory = fit(tmp_path, [SHAPES[shape](lengths) for lengths in LENGTHS], config)
    stats, flops = by_hand(config, LENGTHS)
    row = memory.rows[-1][1]
    assert row["train/total_flops"] == pytest.approx(flops, rel=1e-9)
    assert row["train/device/flops_per_sec"] == pytest.approx(flops / 2.0, rel=1e-9)
    assert row["train/device/mfu"] == pytest.approx(flops / 2.0 / PEAK, rel=1e-9)
    assert row["train/packing/fill"] == pytest.approx(stats.real_tokens / stats.slots, rel=1e-9)
    assert row["train/device/real_items_per_sec"] == pytest.approx(stats.real_tokens / 2.0, rel=1e-9)
    assert row["train/device/items_per_sec"] == pytest.approx(stats.slots / 2.0, rel=1e-9)
    assert row["train/samples"] == 12


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("fill", [0, 1])
def test_positions_tell_the_padding_that_they_do_not_count(fill: int, left: bool) -> None:
    ((stats, lengths),) = resolve(microbatches(with_positions([5, 3, 8], fill, left=left)))
    assert sorted(lengths or ()) == [3, 5, 8]
    assert stats == SeqStats.from_lengths([3, 5, 8], slots=24)


VISION = {
    "model_type": "qwen2_vl",
    "text_config": {**CONFIG, "model_type": "qwen2_vl_text"},
    "vision_config": {
        "depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("masked", [True, False])
def test_images_beside_padded_rows_are_counted(tmp_path: Path, masked: bool) -> None:
    grids = torch.tensor([[1, 4, 4], [2, 2, 6], [0, 0, 0]])
    rows = padded([5, 3, 8]) if masked else {"input_ids": padded([8, 8, 8])["input_ids"]}
    row = fit(tmp_path, [{**rows, "image_grid_thw": grids}] * 4, VISION).rows[-1][1]
    model = FlopsModel.from_config(VISION)
    images = {"image_grid_thw": grids[:2], "vision_windows": model.vision_windows}
    stats = SeqStats.from_lengths([5, 3, 8] if masked else [8] * 3, slots=24, windows=model.windows, **images)
    assert model.training_flops(stats).vision > 0
    assert row["train/total_flops"] == pytest.approx(4 * model.training_flops(stats).model, rel=1e-9)


@pytest.mark.parametrize(
    "beside",
    [
        {"length": ["short", "long"]},
        {"lengths": [[1, 2], [3]]},
        {"lengths": torch.tensor([3, -1])},
        {"cu_seqlens": torch.tensor([0, 9, 3])},
        {"microbatches": 4},
    ],
    ids=str,
)
def test_a_key_that_means_something_else_does_not_end_a_run(beside: dict[str, Any]) -> None:
    batch = SimpleNamespace(input_ids=torch.ones(2, N, dtype=torch.long), **beside)
    ((_, lengths),) = resolve(microbatches(batch))
    assert isinstance(lengths, Dense)


class Named(NamedTuple):
    labels: torch.Tensor
    input_ids: torch.Tensor
    attention_mask: torch.Tensor


def odd_batches() -> dict[str, tuple[Any, list[int]]]:
    """Return batches as other libraries make them, with the lengths of their sequences."""
    rows = padded([5, 3, 8])
    lengths = [3, 5, 8]
    ids = rows["input_ids"]
    mask = rows["attention_mask"]
    numbers = torch.tensor([[1, 1, 2, 2, 2, 3, 0, 0], [1, 1, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1]])
    return {
        "mask added to scores": ({**rows, "attention_mask": torch.where(mask == 1, 0.0, -1e9)}, lengths),
        "mask that adds nothing": ({**rows, "attention_mask": torch.zeros(3, N)}, [N, N, N]),
        "numbered sequences": ({"input_ids": ids, "attention_mask": numbers}, [1, 2, 3, 4, 4, 7]),
        "named tuple": (Named(ids.roll(-1, 1), ids, mask), lengths),
        "floats in a tuple": ((ids, mask.float()), lengths),
        "lists of microbatches": (
            {"input_ids": [ids, ids], "attention_mask": [mask, mask]},
            sorted(lengths * 2),
        ),
        "lengths before a cut": ({"input_ids": ids, "length": [5, 3, 20]}, lengths),
        "one token between": (
            {"input_ids": ids[:1], "position_ids": torch.tensor([[0, 1, 2, 0, 0, 1, 0, 0]])},
            [1, 2, 3],
        ),
        "one row of three": (
            {"input_ids": ids[:1], "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])},
            [2, 3, 3],
        ),
        "small integers": (
            {"input_ids": ids[:1], "cu_seqlens": torch.tensor([0, 3, 5, 8], dtype=torch.int8)},
            [2, 3, 3],
        ),
        "a pack in one axis": ({"input_ids": ids[0], "cu_seqlens": torch.tensor([0, 3, 8])}, [3, 5]),
        "lengths of a pack": ({"input_ids": ids[0], "lengths": torch.tensor([3, 5])}, [3, 5]),
        "positions in one axis": (
            {"input_ids": ids[0], "position_ids": torch.tensor([0, 1, 2, 0, 1, 0, 1, 2])},
            [2, 3, 3],
        ),
        "mask in one axis": ({"input_ids": ids[0], "attention_mask": mask[0]}, [5]),
        "a row and a mask in one axis": ((ids[:1], mask[0]), [5]),
        "embeddings": ({"inputs_embeds": torch.rand(3, N, 6), "attention_mask": mask}, lengths),
    }


@pytest.mark.parametrize("name", odd_batches())
def test_batches_of_other_libraries_count_their_sequences(name: str) -> None:
    batch, expected = odd_batches()[name]
    counted = [lengths or () for _, lengths in resolve(microbatches(batch))]
    assert not any(isinstance(lengths, Dense) for lengths in counted)
    assert sorted(length for lengths in counted for length in lengths) == expected


def test_ids_of_padding_inside_a_row_are_tokens() -> None:
    ids = torch.tensor([[5, 0, 6, 0, 0], [0, 0, 0, 0, 0]])
    labels = torch.where(ids == 0, -100, ids)
    ((_, lengths),) = resolve(microbatches({"input_ids": ids, "labels": labels}, pad_id=0))
    assert lengths == (3, 0)


def test_types_or_labels_in_a_tuple_are_no_mask() -> None:
    rows = padded([5, 3])
    types = torch.tensor([[0, 0, 0, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0]])
    for other in (types, rows["input_ids"].roll(-1, 1)):
        ((stats, lengths),) = resolve(microbatches((rows["input_ids"], other)))
        assert isinstance(lengths, Dense)
        assert stats.real_tokens == 16
    ((stats, _),) = resolve(microbatches((rows["input_ids"], types, rows["attention_mask"])))
    assert stats.real_tokens == 8


@pytest.mark.parametrize("shape", ["ids", "dict", "plain positions"])
def test_what_tells_no_lengths_leaves_out_real_tokens_and_says_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shape: str
) -> None:
    rows = [padded(lengths)["input_ids"] for lengths in LENGTHS]
    batches: list[Any] = rows if shape == "ids" else [{"input_ids": ids} for ids in rows]
    if shape == "plain positions":
        batches = [{**batch, "position_ids": torch.arange(N).expand(3, N)} for batch in batches]
    with caplog.at_level(logging.INFO):
        memory = fit(tmp_path, batches * 2, CONFIG)

    assert caplog.text.count("show which slots are padding") == 1
    row = memory.rows[-1][1]
    gone = {"packing/fill", "device/real_items_per_sec", "device/mfu", "packing/attention_fraction"}

    assert not gone & {key.removeprefix("train/") for key in row}
    _, flops = by_hand(CONFIG, [[N] * 3] * 8)
    assert row["train/total_flops"] == flops
    assert row["train/device/hfu"] == pytest.approx(flops / 4.0 / PEAK)

    caplog.clear()
    with caplog.at_level(logging.INFO):
        slots = fit(tmp_path, batches, CONFIG, tokens="slots").rows[-1][1]
    assert "show which slots are padding" not in caplog.text
    assert slots["train/device/mfu"] == pytest.approx(flops / 2 / 2.0 / PEAK)


class Attends(Rows):
    """A module without a config that attends over whole rows, as wide as its embedding."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = self.model.embed(batch["input_ids"])[:, None]
        y = torch.nn.functional.scaled_dot_product_attention(x, x, x)[:, 0]
        return self.model.head(y).square().mean()


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("causal", ["half", "exact", "full"])
def test_accumulated_rows_of_a_model_without_a_config_count_their_real_pairs(
    tmp_path: Path, accumulate: int, causal: Any
) -> None:
    throughput = monitor(Clock(), causal=causal)
    batches = [padded(lengths) for lengths in LENGTHS]
    batches[1] = {name: rows[:2] for name, rows in batches[1].items()}  # fewer slots than its neighbour
    run = trainer(tmp_path, throughput, accumulate_grad_batches=accumulate)
    run.fit(Attends(Clock(), config=None), loader(batches))
    lengths = [5, 3, 8, 1, 8, 4, 4, 7, 8, 8, 8]
    squares = sum(length**2 for length in lengths)
    tokens = sum(lengths)
    pairs = {"half": squares / 2, "exact": (squares + tokens) / 2, "full": squares}[causal]
    flops = 3 * 2 * 4 * 31 * tokens + 3 * 4 * 4 * pairs
    assert throughput.latest["train/total_flops"] == pytest.approx(flops, rel=1e-9)


def test_a_line_at_the_end_says_what_packing_would_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        fit(tmp_path, [padded(lengths) for lengths in LENGTHS], CONFIG)
    assert caplog.text.count("31% of slots were padding: 66 real tokens in 96 slots") == 1
    assert "up to 1.5 times as many tokens a second" in caplog.text
