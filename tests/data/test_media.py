"""Images beside the tokens, from samples to training: grids, M-RoPE positions, and nothing cut in two."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from lightning_thd import THDBatch, THDDataModule, causal_lm_loss
from tests.data.support import batches_of, make_trainer
from tests.models.test_vision import IMAGE, build
from tests.models.test_vision import sample as make_sample

GRIDS: list[list[tuple[int, int, int]]] = [
    [(1, 4, 4)],
    [],
    [(1, 4, 8), (1, 4, 4)],
    [(2, 4, 4)],
    [],
    [(1, 8, 4)],
]


def samples(model: Any) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    rows: list[dict[str, Any]] = []
    for grids in GRIDS:
        row: dict[str, Any] = make_sample(grids, generator)
        ids = row["input_ids"][None]
        row["labels"] = torch.where(ids[0] == IMAGE, -100, ids[0])
        if grids:  # those of text are the usual ones, so they may be left out
            kinds = (ids == IMAGE).int()
            positions, _ = model.model.get_rope_index(ids, kinds, image_grid_thw=row["image_grid_thw"])
            row["position_ids"] = positions[:, 0]
        rows.append(row)
    return rows


class Sees(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = build("qwen2_5_vl", "thd").double()
        self.seen: list[int] = []
        self.total = 0.0

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        self.seen += batch.sequence_ids
        loss = causal_lm_loss(self.model, batch)
        self.total += float(loss.detach()) * batch.loss_tokens
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_images_train_as_if_each_sequence_was_alone(num_workers: int) -> None:
    module = Sees()
    rows = samples(module.model)
    for row in rows:
        row.update({k: v.double() for k, v in row.items() if k == "pixel_values"})
    data = THDDataModule(rows, capacity=48, num_workers=num_workers)
    make_trainer().fit(module, data)
    assert sorted(module.seen) == list(range(len(rows)))
    eager = build("qwen2_5_vl", "eager").double()
    expected = 0.0
    for row in rows:
        ids, labels = row["input_ids"][None], row["labels"]
        given = {k: row[k] for k in ("pixel_values", "image_grid_thw") if k in row}
        if "position_ids" in row:
            given["position_ids"] = row["position_ids"][:, None]
        with torch.no_grad():
            logits = eager(input_ids=ids, use_cache=False, **given).logits[0]
        expected += float(torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum"))
    # transformers takes softmax and rotary tables of the vision tower in fp32, in blocks of other sizes
    assert module.total == pytest.approx(expected, rel=1e-7)


def image_samples(count: int = 6, long: int = 30) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"input_ids": np.arange(1, 6)} for _ in range(count)]
    rows[2] = {"input_ids": np.arange(long), "pixel_values": np.ones((4, 2)), "image_grid_thw": [[1, 2, 2]]}
    rows[2]["image_grid_thw"] = np.array(rows[2]["image_grid_thw"])
    return rows


@pytest.mark.parametrize("oversize", ["truncate", "split"])
def test_a_sequence_with_images_is_never_cut(oversize: Any) -> None:
    message = "Sequence 2 has 30 tokens, more than fit a pack, and carries image_grid_thw, pixel_values"
    with pytest.raises(ValueError, match=message):
        batches_of(THDDataModule(image_samples(), capacity=8, oversize=oversize))
    texts = image_samples(long=7)
    texts[4] = {"input_ids": np.arange(20)}  # text beside them may be cut
    assert batches_of(THDDataModule(texts, capacity=8, oversize=oversize))

    class KnowsLengths(list[Any]):
        @property
        def lengths(self) -> list[int]:
            return [len(row["input_ids"]) for row in self]

    with pytest.raises(ValueError, match=message):  # never read before: refused when it is
        batches_of(THDDataModule(KnowsLengths(image_samples()), capacity=8, oversize=oversize))


def test_a_sequence_with_images_is_dropped_or_has_its_own_pack() -> None:
    data = THDDataModule(image_samples(), capacity=8, oversize="drop")
    assert sorted(i for batch in batches_of(data) for i in batch.sequence_ids) == [0, 1, 3, 4, 5]
    assert data.counts["train"]["dropped"] == 1
    [alone] = [
        b for b in batches_of(THDDataModule(image_samples(), capacity=8, oversize="own_pack")) if b.extras
    ]
    assert alone.sequence_ids == (2,)
    assert alone.extras["pixel_values"].shape == (4, 2)
    assert alone.stats.vision_patches == 4
