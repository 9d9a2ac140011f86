"""Paths and datasets of every kind open as rows of ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest

from lightning_thd import THDDataModule
from lightning_thd.data.loader import Position
from tests.data.support import open_source
from tests.tiny import sequences


def ids_of(dataset: Any) -> list[list[int]]:
    return [np.asarray(dataset[i]["input_ids"]).tolist() for i in range(len(dataset))]


def test_folders_of_columns(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [s["input_ids"].tolist() for s in sequences(30)]
    table = datasets.Dataset.from_dict({"input_ids": rows})
    (tmp_path / "shards").mkdir()
    for k in range(3):
        table.shard(3, k, contiguous=True).to_parquet(str(tmp_path / "shards" / f"{k}.parquet"))
    assert ids_of(open_source(tmp_path / "shards")) == rows


def test_folders_of_lines(tmp_path: Path) -> None:
    for k in range(2):
        (tmp_path / f"{k}.jsonl").write_text(f'{{"text": "{k}"}}\n')
    assert ids_of(open_source(tmp_path)) == [[48, 257], [49, 257]]
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match="holds 2 JSONL and 1 text files, for example 0.jsonl and notes.txt"):
        open_source(tmp_path)


def test_the_module_serves_one_trainer_after_another(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text("\n".join(json.dumps({"text": "x" * (n % 9)}) for n in range(40)))
    data = THDDataModule(file, capacity=16, cache_dir=tmp_path / "c")

    class Pretends:
        """A Trainer of some ranks, as far as a data module looks."""

        def __init__(self, ranks: int) -> None:
            self.accumulate_grad_batches, self.callbacks, self.loggers = 1, [], []
            self.lightning_module, self.is_global_zero, self.overfit_batches = None, True, 0
            self.num_training_batches = float("inf")
            self.fit_loop = L.Trainer(logger=False, accelerator="cpu", devices=1).fit_loop  # not begun
            self.strategy, self.precision_plugin = self, None
            self.distributed_sampler_kwargs = {"rank": 0, "num_replicas": ranks}

    data.pin_memory = False
    for ranks in (1, 4, 2):
        data.trainer = Pretends(ranks)  # type: ignore[assignment]
        data.setup("fit")
        loader = data.train_dataloader()
        made = loader.source.steps(Position(), None)
        tokens = sum(batch.stats.real_tokens for step in made for batch in step.batches)
        assert tokens == pytest.approx(int(data._sets["train"].index.lengths.sum()) / ranks, rel=0.3)


@pytest.mark.parametrize("order", [("full", "empty"), ("empty", "full")])
def test_a_file_of_columns_without_rows_adds_nothing(tmp_path: Path, order: tuple[str, str]) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    kind = pa.list_(pa.int64())
    for name, rows in (("full", [[1, 2], [3]]), ("empty", [])):
        pq.write_table(pa.table({"input_ids": pa.array(rows, kind)}), tmp_path / f"{name}.parquet")
    found = open_source([str(tmp_path / f"{name}.parquet") for name in order], cache_dir=tmp_path / "cache")
    assert [row["input_ids"].tolist() for row in (found[0], found[1])] == [[1, 2], [3]]
    with pytest.raises(ValueError, match=r"empty\.parquet has no row"):
        open_source(str(tmp_path / "empty.parquet"), cache_dir=tmp_path / "cache")
