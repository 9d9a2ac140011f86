"""Rows, Hugging Face datasets and records of streams train on what they say, or are refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_thd import Sequences, THDBatch, THDDataModule
from lightning_thd.data.loader import Position
from lightning_thd.data.store.tokens import TokenStore
from lightning_thd.data.streams import Stream
from tests.data.support import Rows, batches_of, read

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")


def texts(train: Any, **how: Any) -> list[str]:
    return ["".join(map(chr, row[:-1])) for row in read(train, **how)]


def test_records_and_packed_hold_for_streams() -> None:
    both = Rows({"text": "hi", "prompt": "p", "completion": "c"})
    assert texts(both, records="text") == ["hi"]
    assert texts(both, records="prompt") == texts(both) == ["pc"]
    with pytest.raises(ValueError, match=r"a record of kind 'prompt' among records of kind 'ids'"):
        read(both, records="ids")
    with pytest.raises(ValueError, match=r"packed='packs' takes rows apart, which a stream cannot"):
        read(both, packed="packs")
    restarting = Rows({"input_ids": [1, 2, 3, 4], "position_ids": [0, 1, 0, 1]})
    with pytest.raises(ValueError, match="position_ids begin again"):
        read(restarting)
    assert read(restarting, packed="off") == [[1, 2, 3, 4]]


def test_a_stream_takes_the_modules_on_error_unless_it_has_its_own() -> None:
    bad = Rows({"input_ids": [1]}, {"input_ids": [-1]})
    assert read(Stream(source=bad), on_error="skip") == [[1]]
    with pytest.raises(ValueError, match="more than max_errors=0"):
        read(Stream(source=bad), on_error="skip", max_errors=0)
    with pytest.raises(ValueError, match="row 1"):
        read(Stream(source=bad, on_error="raise"), on_error="skip")


@pytest.mark.parametrize("shards", [1, 2])
def test_a_hugging_face_stream_in_its_second_epoch_is_resumed(shards: int) -> None:
    def make(parts: list[int]) -> Iterator[Any]:
        return ({"input_ids": [part * 40 + i]} for part in parts for i in range(40))

    whole = datasets.IterableDataset.from_generator(make, gen_kwargs={"parts": [*range(shards)]})
    source = whole.shuffle(seed=3, buffer_size=20)

    def steps(state: Any = None) -> Any:
        data = THDDataModule(Stream(source=source, window=4), capacity=8, global_batch=Sequences(3))
        loader = data.train_steps()
        if state is not None:
            loader.load_state_dict(state)
        return loader

    def used(loader: Any, count: int = 99) -> list[int]:
        steps = islice(loader, count)
        return [int(i) for step in steps for batch in step.microbatches for i in batch.input_ids]

    first = used(steps())
    source.set_epoch(1)
    again = used(steps())
    begun = steps()
    assert again != first
    assert sorted(again) == sorted(first) == [*range(40 * shards)]
    assert used(begun, 7) + used(steps(begun.state_dict())) == again


def test_a_key_of_text_beside_ids_has_to_leave_all_rows() -> None:
    rows = [{"input_ids": [1, 2, 3], "topic": "a"}] * 4
    expected = r"Sequence 0 carries 'topic' as str.*remove_columns\('topic'\)"
    with pytest.raises(ValueError, match=expected) as err:
        read(rows)
    assert "on_error" not in str(err.value)  # which would skip every row


class OneBuffer:
    """Hands out one buffer again and again."""

    def __init__(self, rows: np.ndarray, **others: np.ndarray) -> None:
        self._rows = rows
        self._others = others
        self._buffer = np.empty_like(rows[0])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        self._buffer[:] = self._rows[i]
        pixels = {} if self._others else {"pixel_values": torch.from_numpy(self._buffer)}
        return {"input_ids": self._buffer, **self._others, **pixels}


def test_a_buffer_that_is_handed_out_again_fills_no_other_sequence() -> None:
    rows = np.arange(240).reshape(4, 60)
    batches = batches_of(THDDataModule(OneBuffer(rows), capacity=64))
    assert sorted(batch.input_ids.tolist() for batch in batches) == rows.tolist()
    for batch in batches:
        assert torch.equal(batch.extras["pixel_values"], batch.input_ids)
    long = OneBuffer(np.arange(400).reshape(4, 100), attention_mask=np.ones(100, int))
    pieces = read(long, oversize="split", global_batch=Sequences(3))
    assert sorted(chain(*pieces)) == [*range(400)]
    packed = OneBuffer(rows, lengths=np.array([20, 40]))
    assert [*chain(*read(packed))] == rows.ravel().tolist()


@pytest.mark.parametrize(("kind", "found"), [(np.uint8, 156), (np.uint16, 65436)])
def test_labels_without_a_sign_hold_no_minus_100(kind: Any, found: int) -> None:
    ids = np.array([1, 2, 3])
    labels = np.array([-100, 2, 3]).astype(kind)
    row = {"input_ids": ids, "labels": labels}
    table = pa.table({"input_ids": [ids], "labels": pa.array([labels], pa.list_(pa.from_numpy_dtype(kind)))})
    tensors = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
    for rows in ([row], [tensors], Rows(row), datasets.Dataset(table)):
        with pytest.raises(ValueError, match=f"the label {found} in {np.dtype(kind)}, which is what -100"):
            read(rows)
    with pytest.raises(ValueError, match=f"the label {found} in"):
        TokenStore(ids, np.array([0, 3]), labels)
    with pytest.raises(ValueError, match=f"the label {found} in"):
        THDBatch.from_padded(ids[None], np.ones((1, 3), int), labels[None])


def test_a_job_that_is_resumed_with_other_tokens_of_the_same_lengths_is_refused() -> None:
    def loader(first: int) -> Any:
        data = THDDataModule([{"input_ids": [first + i] * 3} for i in range(9)], capacity=8)
        data.setup("fit")
        return data.train_steps()

    state = loader(0).state_dict()
    loader(0).load_state_dict(state)
    with pytest.raises(ValueError, match="other data: the lengths agree, but tokens or labels do not"):
        loader(20).load_state_dict(state)


@pytest.mark.parametrize("as_stream", [False, True])
def test_records_of_text_keep_the_label_of_a_sequence(as_stream: bool, tmp_path: Path) -> None:
    def labels(*rows: Any, **how: Any) -> Any:
        file = tmp_path / "a.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = Stream(str(file)) if as_stream else file
        data = THDDataModule(source, capacity=64, global_batch=Sequences(9), **how)
        data.setup("fit")
        return next(iter(data.train_steps())).microbatches[0].extras["labels"]

    labels_of_batch = labels({"text": "a", "label": 3}, {"text": "bc", "label": 3})
    assert (labels_of_batch.tolist(), labels_of_batch.dtype) == ([3, 3], torch.int64)
    one_without = {"text": "a", "label": 3}, {"text": "bc", "label": "news"}
    if not as_stream:
        assert labels(*one_without, on_error="skip").tolist() == [3]
    assert labels({"prompt": "a", "completion": "b", "label": 0.5}).dtype == torch.float32
    assert labels({"text": "a", "labels": 3}).tolist() == [3]
    with pytest.raises(ValueError, match=r"line 2: it has no number under 'label'|row 1: it has no 'label'"):
        labels(*one_without)
    with pytest.raises(ValueError, match="several numbers under 'label'"):
        labels({"text": "a", "label": [0, 1]})


def test_training_data_without_a_token_to_learn_warns() -> None:
    for nothing in ({"labels": [-100, -100]}, {"weights": 0.0}):
        with pytest.warns(UserWarning, match="no token is learned"):
            read([{"input_ids": [1, 2], **nothing}])
    assert read([{"input_ids": [1]}]) == [[1]]


@pytest.mark.parametrize(
    "key",
    ["weights", "loss_mask", "labels", "attention_mask", "position_ids", "segment_ids", "prompt_length"],
)
def test_numbers_of_tokens_beside_text_are_refused(key: str) -> None:
    value = 1 if key == "prompt_length" else np.array([1, 0])
    masked = [{"text": "ab", key: value}]
    for source in (masked, Rows(*masked), [{"prompt": "a", "completion": "b", key: value}]):
        with pytest.raises(ValueError, match=f"'{key}' beside text"):
            read(source)
    if key != "weights":
        assert len(read([{"text": "ab", "input_ids": [1, 2], key: value}], records="text")) == 1
    assert len(read([{"text": "ab", key: None, "weight": "3 kg"}])) == 1


@pytest.mark.parametrize("known", [False, True])
def test_a_dataset_that_raises_stop_iteration_ends_no_epoch(known: bool) -> None:
    class Ends(list[Any]):
        def __getitem__(self, i: Any) -> Any:
            return next(iter([])) if i == 2 else super().__getitem__(i)

    rows = Ends({"input_ids": [i, i]} for i in range(4))
    if known:
        rows.lengths = [2] * 4  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="Sequence 2: the dataset raised StopIteration"):
        read(rows, empty="drop")


BAD_ROWS = [
    ({"input_ids": [1, -2]}, "has the token id -2"),
    ({"input_ids": [1, None]}, "has a null under 'input_ids', at position 1 of 2"),
    ({"input_ids": [1, 2**31]}, "has the token id 2147483648"),
    ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids but 1 labels"),
    ({"input_ids": [1, 2], "labels": [1, -7000]}, "has the label -7000"),
]


@pytest.mark.parametrize("form", ["list", "arrow", "parquet"])
@pytest.mark.parametrize("k", range(len(BAD_ROWS)))
def test_bad_rows_are_named_at_preparation_or_skipped(tmp_path: Path, form: str, k: int) -> None:
    row, message = BAD_ROWS[k]
    good = {name: [1, 2] for name in row}
    rows = [good, good, row, good]
    source: Any = rows
    if form != "list":
        source = datasets.Dataset.from_list(rows)

    if form == "parquet":
        source.to_parquet(str(tmp_path / "t.parquet"))
        source = tmp_path / "t.parquet"

    place = r"t\.parquet, row 2" if form == "parquet" else "(Sequence|Row) 2"
    with pytest.raises(ValueError, match=rf"{place} .*{message}"):
        THDDataModule(source, capacity=8).setup("fit")

    data = THDDataModule(source, capacity=8, on_error="skip")
    with pytest.warns(UserWarning, match=rf"1 bad rows are left out; the first: .*{place} "):
        [batch] = batches_of(data)
    assert sorted(batch.sequence_ids) == [0, 1, 3]
    assert data.counts["train"]["skipped"] == 1
    assert data.counts["train"]["empty"] == 0


def test_ids_outside_the_vocabulary_are_found_before_the_first_batch() -> None:
    rows = [{"input_ids": [1, 2]}, {"input_ids": [1, 64]}]
    for source in (rows, datasets.Dataset.from_list(rows), TokenStore.from_rows([[1, 2], [1, 64]])):
        data = THDDataModule(source, capacity=8, vocab_size=64)
        data.setup("fit")
        with pytest.raises(ValueError, match="Sequence 1 of the train data has the token id 64"):
            data.train_dataloader()


def test_other_columns_of_a_dataset_are_left_out() -> None:
    rows = datasets.Dataset.from_list(
        [{"input_ids": [1, 2], "name": "a", "special_tokens_mask": [0, 0], "length": 2}] * 3
    )
    [batch] = batches_of(THDDataModule(rows, capacity=8))
    assert batch.extras == {}
    assert batch.stats.real_tokens == 6


VIEWS: dict[str, Callable[[Any], Any]] = {
    "selection": lambda table: table.select([2, 0]),
    "slice": lambda table: table.select(range(1, 3)),
    "filter": lambda table: table.filter(lambda row: len(row["input_ids"]) > 1),
    "shuffle": lambda table: table.shuffle(seed=3),
    "joined": lambda table: datasets.concatenate_datasets([table.select([2]), table.select(range(2))]),
    "torch": lambda table: table.with_format("torch"),
    "hidden labels": lambda table: table.with_format("numpy", columns=["input_ids"]),
    "shown labels": lambda t: t.with_format("torch", columns=["input_ids"], output_all_columns=True),
    "transform": lambda t: t.with_transform(lambda rows: {"input_ids": [[9, 8] for _ in rows["input_ids"]]}),
    "subset": lambda table: torch.utils.data.Subset(table, [2, 1]),
    "concatenated": lambda t: torch.utils.data.ConcatDataset([t.select([1]), t.select([0])]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_datasets_give_what_their_samples_show(name: str) -> None:
    """Sample by sample, as a list would give them, ids and targets."""

    def found(source: Any) -> dict[int, Any]:
        rows = {}
        for batch in batches_of(THDDataModule(source, capacity=512)):
            columns = batch.unpack(batch.input_ids), batch.unpack(batch.targets)
            for i, ids, targets in zip(batch.sequence_ids, *columns, strict=True):
                rows[i] = ids.tolist(), targets.tolist()
        return rows

    view = VIEWS[name](
        datasets.Dataset.from_dict(
            {"input_ids": [[1, 2], [3, 4, 5], [6]], "labels": [[-100, 2], [3, -100, 5], [6]]}
        )
    )
    rows = [
        {key: value if np.ndim(value) == 0 else np.asarray(value) for key, value in view[i].items()}
        for i in range(len(view))
    ]
    assert found(view) == found(rows)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"loss_mask": [0, 0, 1]}, "carry 'loss_mask', which is not read"),
        ({"segment_ids": [0, 0, 1]}, "carry 'segment_ids', which is not read"),
        # Other libraries have a name of their own each for where the sequences of a packed row begin.
        ({"any_name": [2, 1]}, "The column 'any_name' holds lists of integers, but is not read"),
        ({"images": ["a.png"]}, "The column 'images' beside input_ids is not read. Give pixel_values"),
        ({"labels": [1, -100, 3], "assistant_masks": [1, 1, 1]}, "which is not read"),
        ({"labels": [1, -100, 400]}, "label 400, but the model's vocabulary"),
        ({"next_label": 7}, "carries 'next_label', which only THDBatch"),
    ],
)
def test_columns_that_nobody_reads_are_refused_wherever_they_stand(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    row = {"input_ids": [1, 2, 3], **more}
    table = datasets.Dataset.from_list([row])
    table.to_parquet(str(tmp_path / "a.parquet"))
    as_columns = [table, tmp_path / "a.parquet"]
    arrays = [{key: np.array(value) for key, value in row.items()}]
    for source in as_columns if "The column" in message else [*as_columns, arrays, lambda: iter([row])]:
        with pytest.raises(ValueError, match=message):
            read(source, vocab_size=100)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_shards_of_a_stream_that_are_cut_are_refused(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a.jsonl.{suffix}"
    texts = [f"{k} {np.random.default_rng(k).bytes(10).hex()}" for k in range(300)]
    whole = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    packed = gzip.compress(whole) if suffix == "gz" else pytest.importorskip("zstandard").compress(whole)
    file.write_bytes(packed)
    assert len(read(Stream(str(file)))) == 300
    file.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match=r"a\.jsonl.*reading stopped.* end(s|ed) before"):
        read(Stream(str(file)))


class Wrapper:
    """Adds to the ids or the text of a dataset, and hands every other attribute on to it."""

    def __init__(self, dataset: Any) -> None:
        self._inner = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, i: int) -> dict[str, Any]:
        row = self._inner[i]
        if "input_ids" in row:
            return {"input_ids": [token + 5 for token in row["input_ids"]]}
        return {"text": row["text"] + "x"}


class Subclass(datasets.Dataset):  # type: ignore[misc]
    def __getitem__(self, key: Any) -> Any:
        row = super().__getitem__(key)
        return {"input_ids": [token + 5 for token in row["input_ids"]]}


def test_a_wrapper_or_subclass_decides_its_samples() -> None:
    table = datasets.Dataset.from_list([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    assert read(table) == [[1, 2, 3], [4, 5]]
    assert read(Wrapper(table)) == read(Subclass(table.data)) == [[6, 7, 8], [9, 10]]
    text = datasets.Dataset.from_list([{"text": "ab"}])
    assert read(text) == [[*b"ab", 257]]
    assert read(Wrapper(text)) == [[*b"abx", 257]]  # the fingerprint inside is not its own


@pytest.mark.parametrize("kind", ["int8", "bool"])
@pytest.mark.parametrize("as_list", [False, True])
def test_padded_rows_are_found_when_the_data_is_prepared(kind: str, as_list: bool) -> None:
    rows = [
        {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]},
        {"input_ids": [4, 5, 0], "attention_mask": [1, 1, 0]},
        {"input_ids": [6], "attention_mask": [1]},
    ]
    table = datasets.Dataset.from_list(rows).cast_column(
        "attention_mask", datasets.Sequence(datasets.Value(kind))
    )
    source = list(table) if as_list else table.select([2, 1, 0])
    with pytest.raises(ValueError, match=r"(Row|Sequence) 1 has 3 input_ids and an attention_mask of shape"):
        THDDataModule(source, capacity=16).setup("fit")
    with pytest.warns(UserWarning, match="1 bad rows are left out"):
        assert read(source, on_error="skip") == [[1, 2, 3], [6]]


def _stream(rows: int = 10, shards: int = 3) -> Any:
    """Return a stream of several shards, of ids that tell the row."""
    made = datasets.Dataset.from_dict({"input_ids": [[i + 1] * 2 for i in range(rows)]})
    return made.to_iterable_dataset(num_shards=shards)


ACROSS = {
    "skip": lambda: _stream().skip(4),
    "take": lambda: _stream().take(8),
    "interleave": lambda: datasets.interleave_datasets([_stream(10), _stream(4)]),
    "filter by row": lambda: _stream().filter(lambda row, i: i % 4 != 0, with_indices=True),
    "batches": lambda: _stream().map(
        lambda rows: {"input_ids": [np.concatenate(rows["input_ids"]).tolist()]},
        batched=True,
        batch_size=4,
        drop_last_batch=True,
    ),
}


@pytest.mark.parametrize("case", list(ACROSS))
def test_steps_that_look_at_several_shards(case: str) -> None:
    expected = sorted(row["input_ids"] for row in ACROSS[case]())
    with pytest.warns(
        UserWarning, match=r"counts rows over all its \d+ shards.* One process reads it, front to back"
    ):
        assert read(ACROSS[case](), empty="drop") == expected


@pytest.mark.parametrize("shards", [1, 3])
def test_shards_that_can_be_read_apart_are(shards: int) -> None:
    source = _stream(shards=shards).filter(lambda row: row["input_ids"][0] > 3).shuffle(seed=1, buffer_size=4)
    if shards == 1:
        source = source.skip(2).take(4)
    expected = sorted(row["input_ids"] for row in source)
    assert read(source) == expected


def _shifted(count: int = 3, length: int = 9) -> list[dict[str, list[int]]]:
    """Rows as loops of one's own have them: of n + 1 tokens the first n, and the last n as labels."""
    tokens = np.random.default_rng(0).integers(0, 50, (count, length + 1)).tolist()
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["list", "hf", "stream", "parquet"])
def test_labels_that_are_shifted_already_are_refused(tmp_path: Path, kind: str, masked: bool) -> None:
    rows = _shifted(length=24)
    if masked:
        rows = [{**row, "labels": [-100] * 5 + row["labels"][5:]} for row in rows]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    source = {
        "list": rows,
        "hf": table.with_format("torch"),
        "stream": table.to_iterable_dataset(),
        "parquet": tmp_path / "a.parquet",
    }[kind]
    with pytest.raises(ValueError, match="the labels are the next tokens, as if they were shifted already"):
        read(source, oversize="truncate")


def test_undoing_the_shift_as_the_message_says_keeps_every_target() -> None:
    rows = _shifted(length=24)
    undone = [
        {"input_ids": [*row["input_ids"], row["labels"][-1]], "labels": [-100, *row["labels"]]}
        for row in rows
    ]
    targets = THDBatch.collate(undone).targets
    assert targets[targets != -100].tolist() == [label for row in rows for label in row["labels"]]
    with pytest.raises(ValueError, match=r"input_ids=\[\*ids, labels\[-1\]\], labels=\[-100, \*labels\]"):
        read(rows, oversize="truncate")
    assert len(read(undone, oversize="own_pack")) == len(rows)


@pytest.mark.parametrize(
    "rows",
    [
        [{"input_ids": [7] * 20, "labels": [7] * 20}],  # both ways
        [{"input_ids": [1, 2, 3], "labels": [2, 3, 9]}],  # too few to tell
        [{"input_ids": list(range(20)), "labels": [-100] * 19 + [19]}],
        [{"input_ids": [i], "labels": [i + 1]} for i in range(20)],
    ],
)
def test_labels_that_are_not_shifted_are_taken(rows: Any) -> None:
    assert read(rows, oversize="own_pack") == sorted(row["input_ids"] for row in rows)


def test_the_module_serves_one_loop_after_another(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text("\n".join(json.dumps({"text": "x" * (n % 9)}) for n in range(40)))
    data = THDDataModule(file, capacity=16, cache_dir=tmp_path / "c")

    for ranks in (1, 4, 2):
        data.attach(ranks=ranks)
        data.setup("fit")
        made = data.train_dataloader().source.steps(Position(), None)
        tokens = sum(batch.stats.real_tokens for step in made for batch in step.batches)
        assert tokens == pytest.approx(int(data._sets["train"].index.lengths.sum()) / ranks, rel=0.3)
