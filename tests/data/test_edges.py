"""Edges where the data module once read, mixed or learned something else than it was given, unsaid."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_thd import Sequences, THDBatch, THDDataModule
from lightning_thd.data.read.chat import encode_chat
from lightning_thd.data.store.tokens import Rows as Rows_
from lightning_thd.data.store.tokens import TokenStore, cached_store
from lightning_thd.data.streams import Stream
from lightning_thd.packing.mixtures import share_out
from tests.data.chats import PLAIN, make_tokenizer
from tests.data.support import Rows, batches_of, read


def texts(train: Any, **how: Any) -> list[str]:
    return ["".join(map(chr, row[:-1])) for row in read(train, **how)]


def test_records_and_packed_hold_for_streams() -> None:
    both = Rows({"text": "hi", "prompt": "p", "completion": "c"})
    assert texts(both, records="text") == ["hi"]
    assert texts(both, records="prompt") == texts(both) == ["pc"]
    with pytest.raises(ValueError, match=r"a record of kind 'prompt' among those of kind 'ids'"):
        read(both, records="ids")
    with pytest.raises(ValueError, match=r"packed='packs' takes rows of several sequences apart, which a"):
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
    datasets = pytest.importorskip("datasets")

    def make(parts: list[int]) -> Iterator[Any]:
        return ({"input_ids": [part * 40 + i]} for part in parts for i in range(40))

    whole = datasets.IterableDataset.from_generator(make, gen_kwargs={"parts": [*range(shards)]})
    source = whole.shuffle(seed=3, buffer_size=20)

    def steps(state: Any = None) -> Any:
        loader = THDDataModule(
            Stream(source=source, window=4), capacity=8, global_batch=Sequences(3)
        ).train_steps()
        if state is not None:
            loader.load_state_dict(state)
        return loader

    def used(loader: Any, count: int = 99) -> list[int]:
        return [
            int(i)
            for _, step in zip(range(count), loader, strict=False)
            for b in step.microbatches
            for i in b.input_ids
        ]

    first = used(steps())
    source.set_epoch(1)
    again, begun = used(steps()), steps()
    assert again != first
    assert sorted(again) == sorted(first) == [*range(40 * shards)]
    assert used(begun, 7) + used(steps(begun.state_dict())) == again


def test_a_json_file_of_one_record_is_no_wrapper(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"body": "a document", "authors": [{"text": "x"}]}))
    assert texts(file, text_key="body") == ["a document"]
    with pytest.raises(ValueError, match=r"no string under the key 'text', found \['authors', 'body'\]"):
        texts(file)


@pytest.mark.parametrize("wrap", [str, lambda path: Stream(str(path))], ids=["files", "stream"])
def test_a_folder_with_brackets_in_its_name_is_read_as_it_is_written(wrap: Any, tmp_path: Path) -> None:
    for folder, text in (("d[x]", "one"), ("dx", "two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_text(json.dumps({"text": text}))
    for pattern in ("d[x]/a.jsonl", "d[x]/*.jsonl", "d[x]", "d[x]/**/*.jsonl"):
        assert texts(wrap(tmp_path / pattern)) == ["one"], pattern
    assert texts(wrap(tmp_path / "d[xy]" / "a.jsonl")) == ["two"]


class OneBuffer:
    """Hands out one buffer again and again."""

    def __init__(self, rows: np.ndarray, **others: np.ndarray) -> None:
        self._rows, self._others, self._buffer = rows, others, np.empty_like(rows[0])
        self._pixels = {} if others else {"pixel_values": torch.from_numpy(self._buffer)}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        self._buffer[:] = self._rows[i]
        return {"input_ids": self._buffer, **self._others, **self._pixels}


def test_a_buffer_that_is_handed_out_again_fills_no_other_sequence() -> None:
    rows = np.arange(240).reshape(4, 60)
    batches = batches_of(THDDataModule(OneBuffer(rows), capacity=64))
    assert sorted(batch.input_ids.tolist() for batch in batches) == rows.tolist()
    assert all(torch.equal(batch.extras["pixel_values"], batch.input_ids) for batch in batches)
    long = OneBuffer(np.arange(400).reshape(4, 100), attention_mask=np.ones(100, int))
    pieces = read(long, oversize="split", global_batch=Sequences(3))
    assert sorted(chain(*pieces)) == [*range(400)]
    packed = OneBuffer(rows, lengths=np.array([20, 40]))
    assert [*chain(*read(packed))] == rows.ravel().tolist()


@pytest.mark.parametrize(("kind", "found"), [(np.uint8, 156), (np.uint16, 65436)])
def test_labels_without_a_sign_hold_no_minus_100(kind: Any, found: int) -> None:
    pa, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    ids, labels = np.array([1, 2, 3]), np.array([-100, 2, 3]).astype(kind)
    row = {"input_ids": ids, "labels": labels}
    table = pa.table({"input_ids": [ids], "labels": pa.array([labels], pa.list_(pa.from_numpy_dtype(kind)))})
    tensors = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
    for given in ([row], [tensors], Rows(row), datasets.Dataset(table)):
        with pytest.raises(ValueError, match=f"the label {found} in {np.dtype(kind)}, which is what -100"):
            read(given)
    with pytest.raises(ValueError, match=f"the label {found} in"):
        TokenStore(ids, np.array([0, 3]), labels)
    with pytest.raises(ValueError, match=f"the label {found} in"):
        THDBatch.from_padded(ids[None], np.ones((1, 3), int), labels[None])


def spoken(template: str, **message: Any) -> str:
    tokenizer = make_tokenizer(template)
    asked, options = {"role": "user", "content": "Name a colour."}, message.pop("options", None)
    ids, mask = encode_chat(tokenizer, [asked, {"role": "assistant", **message}], options=options)
    return str(tokenizer.decode(np.array(ids)[mask]))


def test_an_eos_inside_a_turn_hides_nothing_behind_it() -> None:
    thinks = PLAIN.replace(
        "{{ m.content }}", "{% if m.reasoning %}{{ m.reasoning }}<|end|>{% endif %}{{ m.content }}"
    )
    assert spoken(thinks, reasoning="Hm.", content="Red.") == "Hm.<|end|>Red.<|end|>"
    no_end = thinks.replace("{{ m.content }}<|end|>", "{{ m.content }}")
    assert spoken(no_end, reasoning="Hm.", content="Red.") == "Hm.<|end|>Red.\n"
    closes = PLAIN.replace("<|end|>\n", "<|end|>\n---\n")
    assert spoken(closes, content="Red.") == "Red.<|end|>"


def test_what_a_template_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match=r"message 1 has 'reasoning_content', which the chat template does"):
        spoken(PLAIN, reasoning_content="Hm.", content="Red.")
    assert spoken(PLAIN, reasoning_content="", content="Red.") == "Red.<|end|>"
    with pytest.raises(ValueError, match=r"chat_template_kwargs holds 'enable_thinkin', which the chat"):
        spoken(PLAIN, content="Red.", options={"enable_thinkin": False})


def test_weights_far_apart_are_bounded() -> None:
    sizes = {"a": 10, "b": 10}
    for far in (1e-5, 1e-9, 1e-320):
        with pytest.raises(ValueError, match=r"more than 1,000 passes over 'b', which has 10 sequences"):
            share_out(sizes, {"a": far, "b": 1.0})
    assert share_out(sizes, {"a": 1.5e308, "b": 1.5e308}) == sizes


def test_feather_files_are_columns(tmp_path: Path) -> None:
    pa, feather = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.feather")
    feather.write_feather(pa.table({"input_ids": [[1, 2, 3]]}), str(tmp_path / "a.feather"))
    assert read(tmp_path / "a.feather") == read(Stream(str(tmp_path / "a.feather"))) == [[1, 2, 3]]


def test_a_job_that_is_resumed_with_other_tokens_of_the_same_lengths_is_refused() -> None:
    def loader(first: int) -> Any:
        data = THDDataModule([{"input_ids": [first + i] * 3} for i in range(9)], capacity=8)
        data.setup("fit")
        return data.train_steps()

    state = loader(0).state_dict()
    loader(0).load_state_dict(state)
    with pytest.raises(ValueError, match="same lengths and other tokens or labels"):
        loader(20).load_state_dict(state)


@pytest.mark.parametrize("as_stream", [False, True])
def test_records_of_text_keep_the_label_of_a_sequence(as_stream: bool, tmp_path: Path) -> None:
    def labels(*rows: Any) -> Any:
        file = tmp_path / "a.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = THDDataModule(Stream(str(file)) if as_stream else file, capacity=64, global_batch=Sequences(9))
        data.setup("fit")
        return next(iter(data.train_steps())).microbatches[0].extras["labels"]

    found = labels({"text": "a", "label": 3}, {"text": "bc", "label": 3})
    assert found.tolist() == [3, 3]
    assert found.dtype == torch.int64
    assert labels({"prompt": "a", "completion": "b", "label": 0.5}).dtype == torch.float32
    assert labels({"text": "a", "labels": 3}).tolist() == [3]
    with pytest.raises(ValueError, match=r"have a number under 'label', the others none|another shape than"):
        labels({"text": "a", "label": 3}, {"text": "bc", "label": "news"})
    with pytest.raises(ValueError, match="several numbers under 'label'"):
        labels({"text": "a", "label": [0, 1]})


def test_a_store_of_several_pieces_keeps_labels_of_sequences(tmp_path: Path) -> None:
    def piece(*label: float) -> Rows_:
        return Rows_(np.arange(len(label)), np.ones(len(label), int), label=np.array(label))

    pieces = [piece(1, 2), Rows_(np.arange(0), np.arange(0)), piece(0.5)]
    store = cached_store(None, lambda first: pieces, cache_dir=tmp_path)
    assert [row["label"] for row in store] == [1.0, 2.0, 0.5]


def test_links_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "b.jsonl").write_text('{"text": "b"}\n')
    (tmp_path / "all" / "in").mkdir(parents=True)
    (tmp_path / "all" / "a.jsonl").symlink_to(tmp_path / "far" / "b.jsonl")
    (tmp_path / "all" / "in" / "c.jsonl").write_text('{"text": "c"}\n')
    assert texts(str(tmp_path / "all")) == ["b", "c"]
    (tmp_path / "all" / "in" / "link").symlink_to(tmp_path / "far")
    with pytest.raises(ValueError, match="in/link is a link to a folder, which is not followed"):
        read(str(tmp_path / "all"))
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"Wanted suffixes: \.jsonl"):
        read(str(tmp_path / "none"))


def test_training_data_without_a_token_to_learn_warns() -> None:
    for nothing in ({"labels": [-100, -100]}, {"weights": 0.0}):
        with pytest.warns(UserWarning, match="no token is learned"):
            read([{"input_ids": [1, 2], **nothing}])
    assert read([{"input_ids": [1]}]) == [[1]]


def test_weights_and_labels_are_tensors_of_any_kind() -> None:
    weights = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    label = torch.ones((), dtype=torch.bfloat16)
    assert read([{"input_ids": [1, 2, 3], "weights": weights, "label": label}]) == [[1, 2, 3]]


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
