"""What a plan is made from and with: cached counts, the model's own cost, schedules and schedulers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd import FlopsModel, Packs, Sequences, THDBatch, THDDataModule
from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDStep
from lightning_thd.data import planning
from lightning_thd.data.read.sources import Opener
from lightning_thd.data.sets import open_mixture, open_set
from lightning_thd.data.store.index import build_index
from lightning_thd.data.trainer_link import Host, check_step
from lightning_thd.packing import Cost, balance
from lightning_thd.packing.sharing import Sharing
from tests.data.support import CAPACITY, make_trainer
from tests.ranks import run_ranks
from tests.tiny import TinyModule, sequences


class Known(list[dict[str, Any]]):
    """A dataset that counts how often it is read."""

    def __init__(self, rows: list[dict[str, Any]], fingerprint: str = "a") -> None:
        super().__init__(rows)
        self.fingerprint, self.reads = fingerprint, 0

    def __getitem__(self, i: Any) -> Any:
        self.reads += 1
        return super().__getitem__(i)


def test_known_data_is_counted_once(tmp_path: Path) -> None:
    key = {"fingerprint": "a"}
    first = Known(sequences(50, labels=True))
    expected = build_index(list(first))
    for reads in (50, 0):
        data = Known(first)
        index = build_index(data, key=key, cache_dir=tmp_path)
        assert data.reads <= reads + 1  # one look at a sample tells what it holds
        assert index.lengths.tolist() == expected.lengths.tolist()
        assert index.loss_tokens.tolist() == expected.loss_tokens.tolist()
    assert isinstance(index.lengths, np.memmap)
    [folder] = tmp_path.iterdir()
    (folder / "lengths.npy").write_bytes(b"")
    with pytest.warns(UserWarning, match="It is built again now"):
        again = build_index(first, key=key, cache_dir=tmp_path)
    assert again.lengths.tolist() == expected.lengths.tolist()


def test_hugging_face_labels_are_counted_in_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    samples = sequences(60, labels=True)
    table = datasets.Dataset.from_list([{k: v.tolist() for k, v in s.items()} for s in samples])
    expected = build_index(samples)

    read = datasets.Dataset.__getitem__

    def first_alone(self: Any, key: Any) -> Any:
        if key != 0:
            raise AssertionError("samples were read")
        return read(self, key)

    monkeypatch.setattr(datasets.Dataset, "__getitem__", first_alone)
    for view, order in ((table, list(range(60))), (table.select([7, 3, 9]), [7, 3, 9])):
        index = build_index(view)
        assert index.lengths.tolist() == expected.lengths[order].tolist()
        assert index.loss_tokens.tolist() == expected.loss_tokens[order].tolist()
    with pytest.raises(AssertionError, match="samples were read"):  # a transform hides the columns
        build_index(table.with_transform(lambda rows: {"input_ids": [[1]] * len(rows["input_ids"])}))


def test_windows_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "COUNTS_FROM", 1)

    def order() -> list[tuple[int, ...]]:
        data = THDDataModule(
            Known(sequences(60)), capacity=CAPACITY, window=16, cache_dir=tmp_path, val=sequences(9)
        )
        data.setup("fit")
        return [b.sequence_ids for b in data.train_dataloader() if isinstance(b, THDBatch)]

    first = order()

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("windows were counted")

    monkeypatch.setattr("lightning_thd.packing.windows.count_windows", never)
    assert order() == first
    [folder] = tmp_path.glob("counts-*")
    shutil.rmtree(folder)
    with pytest.raises(AssertionError, match="windows were counted"):
        order()


class Late(TinyModule):
    """Builds its model when training begins."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.model = self.model, None  # type: ignore[assignment]
        self._modules.pop("made")

    def configure_model(self) -> None:
        if self.model is None:
            self.model = TinyModule().model


@pytest.mark.parametrize("kind", [TinyModule, Late])
@pytest.mark.parametrize("mine", [None, Cost(linear=1, quadratic=0)])
def test_the_cost_is_that_of_the_model_or_the_users(kind: type[TinyModule], mine: Cost | None) -> None:
    seen: list[Cost] = []

    def spy(lengths: Any, capacity: int, *, dp: int, cost: Cost) -> Any:
        seen.append(cost)
        return balance(lengths, capacity, dp=dp, cost=cost)

    step = Sequences(10)
    data = THDDataModule(sequences(30), capacity=CAPACITY, global_batch=step, scheduler=spy, cost=mine)
    make_trainer(strategy="thd").fit(kind(), data)
    of_model = FlopsModel.from_config(TinyModule().model.config)
    assert seen[0] == (mine or Cost.from_flops(of_model, longest=CAPACITY))


def test_a_scheduler_of_ones_own_places_the_sequences() -> None:
    def one_by_one(lengths: Any, capacity: int, *, dp: int, cost: Cost) -> Any:
        return [[[i] for i in range(len(lengths))]]

    data = THDDataModule(sequences(12), capacity=CAPACITY, global_batch=Sequences(4), scheduler=one_by_one)
    data.setup("fit")
    for step in data.train_dataloader():
        assert isinstance(step, THDStep)
        assert [len(batch) for batch in step.microbatches] == [1] * 4


def test_a_ready_made_schedule_is_followed() -> None:
    data = THDDataModule(sequences(6, longest=5), capacity=20, schedule=[2, 0, 1, 0, 2, 1])
    data.setup("fit")
    found = [b.sequence_ids for b in data.train_dataloader() if isinstance(b, THDBatch)]
    assert found == [(1, 3), (2, 5), (0, 4)]
    data = THDDataModule(sequences(6), capacity=99, schedule=[1, 2])
    data.setup("fit")
    with pytest.raises(ValueError, match=r"schedule has the shape \(2,\).* for 6 sequences"):
        data.train_dataloader()


def _fit_few(sequences_given: int, step: Any) -> tuple[list[tuple[int, ...]], int, list[float]]:
    module = TinyModule()
    trainer = make_trainer(max_epochs=2, devices=2, strategy="thd_ddp", num_sanity_val_steps=0)
    samples = sequences(sequences_given, longest=5)
    data = THDDataModule(samples, capacity=CAPACITY, global_batch=step, val=samples)
    trainer.fit(module, data)
    return module.seen, trainer.global_step, [float(p.detach().sum()) for p in module.model.parameters()]


@pytest.mark.parametrize("step", [None, Sequences(4)])
def test_fewer_sequences_than_ranks_give_every_rank_as_many_batches(step: Any) -> None:
    (seen, steps, weights), (other_seen, other_steps, other_weights) = run_ranks(_fit_few, 2, 1, step)
    assert len(seen) == len(other_seen) == steps == other_steps == 2
    assert sorted([*seen, *other_seen]) == [(), (), (0,), (0,)]
    assert weights == other_weights
    assert all(torch.isfinite(torch.tensor(weights)))


def _count_once(folder: str) -> int:
    import torch.distributed as dist

    data = Known(sequences(200))
    trainer = make_trainer(devices=2, strategy="ddp", limit_train_batches=1)
    module = THDDataModule(data, capacity=CAPACITY, cache_dir=folder)
    trainer.fit(TinyModule(), module)
    dist.barrier()
    return data.reads


def test_data_is_counted_once_a_node(tmp_path: Path) -> None:
    first, second = run_ranks(_count_once, 2, str(tmp_path))
    assert first >= 200
    assert second < 100


def test_packs_that_the_ranks_of_a_pipeline_do_not_divide() -> None:
    with pytest.raises(MisconfigurationException, match="but 2 data-parallel ranks"):
        check_step(Packs(3), ranks=2, accumulate=1, whole=True)


def test_what_is_not_planned_by_degrees() -> None:
    opener, settings = Opener(), planning.DataSettings(capacity=CAPACITY)
    host = Host(ranks=2, sharing=Sharing(max_degree=2))
    mixture = open_mixture("train", {"a": (sequences(3), 1.0)}, opener, empty="error")
    with pytest.raises(ValueError, match="context_parallel_size='dynamic' cannot be used with a mixture"):
        planning.make_planner(mixture, settings, host, training=True)
    one = open_set("train", sequences(3), opener, empty="error")
    aligned = replace(host, alignment=Alignment(sequence_multiple=1, total_multiple=16))
    with pytest.raises(ValueError, match="with a precision that aligns packs"):
        planning.make_planner(one, settings, aligned, training=True)


def test_an_id_past_the_vocabulary_where_only_lengths_were_known() -> None:
    class Counted(list[dict[str, Any]]):
        lengths = (2, 3)

    rows = Counted([{"input_ids": [1, 2]}, {"input_ids": [3, 64, 5]}])
    data = THDDataModule(rows, capacity=CAPACITY, vocab_size=64)
    data.setup("fit")
    with pytest.raises(ValueError, match="has the token id or label 64, but the model's vocabulary has"):
        list(data.train_dataloader())
