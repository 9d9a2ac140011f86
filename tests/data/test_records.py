"""Rows with and without labels, cut rows, blank files, repeated keys: one answer in every container."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_thd import Packs, THDDataModule
from lightning_thd.data.read.images import decode
from lightning_thd.data.streams import Stream
from lightning_thd.warnings import DataWarning
from tests.data.chats import CALLING, make_tokenizer

LABELLED = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}
BARE = {"input_ids": [4, 5, 6]}
# Its targets are after token 16, at which it is cut.
LATE = {"input_ids": list(range(1, 21)), "labels": [-100] * 17 + [18, 19, 20]}


def as_jsonl(rows: list[Any], folder: Path) -> str:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "a.jsonl")


CONTAINERS: dict[str, Callable[[list[Any], Path], Any]] = {
    "list": lambda rows, _: rows,
    "jsonl": as_jsonl,
    "generator": lambda rows, _: lambda: iter([dict(row) for row in rows]),
    "stream": lambda rows, folder: Stream(as_jsonl(rows, folder)),
}


def read(source: Any, folder: Path, **options: Any) -> list[list[int]]:
    options = {"capacity": 16, "global_batch": Packs(1), "cache_dir": folder, **options}
    data = THDDataModule(source, **options)
    data.setup("fit")
    return sorted(ids.tolist() for b in data.train_dataloader() for ids in b.unpack(b.input_ids))


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([LABELLED, BARE, LABELLED], "labels"),
        ([BARE, BARE, LABELLED], "labels"),
        ([LABELLED, {**BARE, "labels": None}, LABELLED], "labels"),
        ([{**BARE, "labels": None}, {**BARE, "labels": None}], "null labels"),
        ([{**BARE, "weights": 2.0}, {**BARE, "weights": None}, {**BARE, "weights": 1.0}], "weights"),
    ],
)
def test_rows_without_targets_among_others_are_refused(
    container: str, rows: list[Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        read(CONTAINERS[container](rows, tmp_path), tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("container", CONTAINERS)
def test_rows_without_labels_are_skipped_if_the_user_says_so(container: str, tmp_path: Path) -> None:
    source = CONTAINERS[container]([LABELLED, BARE, LABELLED], tmp_path)
    assert read(source, tmp_path, on_error="skip") == [[1, 2, 3], [1, 2, 3]]


def test_sources_of_a_mixture_may_differ_in_labels(tmp_path: Path) -> None:
    for wrap in (lambda rows: rows, lambda rows: lambda: iter(rows)):
        sources = {"a": (wrap([LABELLED] * 2), 0.5), "b": (wrap([BARE] * 2), 0.5)}
        assert len(read(sources, tmp_path)) >= 4


TEXT = {"text": "abc"}
PROMPT = {"prompt": "ab", "completion": "c"}


@pytest.mark.parametrize("container", CONTAINERS)
def test_text_and_prompts_are_two_sources(container: str, tmp_path: Path) -> None:
    """Each token of a text is learned, and none of a prompt. Lists and files are of one kind."""
    words = "make text and prompts two sources of a mixture|no string under the key 'text', found"
    with pytest.raises(ValueError, match=words):
        read(CONTAINERS[container]([TEXT, TEXT, PROMPT], tmp_path), tmp_path)

    parts = {name: tmp_path / name for name in ("text", "prompts")}
    for part in parts.values():
        part.mkdir()
    texts = CONTAINERS[container]([TEXT] * 2, parts["text"])
    prompts = CONTAINERS[container]([PROMPT] * 2, parts["prompts"])
    data = THDDataModule(
        {"text": (texts, 0.5), "prompts": (prompts, 0.5)},
        capacity=16,
        global_batch=Packs(1),
        cache_dir=tmp_path,
    )
    data.setup("fit")
    learned = set()

    for batch in data.train_dataloader():
        ids = batch.unpack(batch.input_ids)
        targets = batch.unpack(batch.targets)
        learned |= {(len(row), int((of_row != -100).sum())) for row, of_row in zip(ids, targets, strict=True)}

    assert learned == {(4, 3), (4, 2)}  # "abc" and EOS; "c" and EOS behind a prompt


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_cut_sequence_without_targets_is_dropped_and_counted(container: str, tmp_path: Path) -> None:
    source = CONTAINERS[container]([LATE, LABELLED], tmp_path)
    data = THDDataModule(source, capacity=16, global_batch=Packs(1), cache_dir=tmp_path, oversize="truncate")
    data.setup("fit")
    loader = data.train_dataloader()
    sequences = [ids.tolist() for b in loader for ids in b.unpack(b.input_ids)]
    assert sequences[0] == [1, 2, 3]
    counts = loader.counts or data.counts["train"]
    assert counts["truncated_without_targets"] == 1
    assert (counts["truncated"], counts["tokens_lost"]) == (0, 20)
    with pytest.raises(ValueError, match="no token to learn|gave no step"):
        read(CONTAINERS[container]([LATE], tmp_path), tmp_path, oversize="truncate")


@pytest.mark.parametrize("text", ['{"text": "abc", "text": "x"}', '{"a": {"b": 1, "b": 2}, "text": "x"}'])
def test_a_key_that_is_there_twice_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(text + "\n")
    for source in (str(file), Stream(str(file))):
        with pytest.raises(ValueError, match=r"a.jsonl.*is there twice"):
            read(source, tmp_path)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("record", [{"text": "a\0b"}, {"prompt": "a\0", "completion": "c"}])
def test_null_characters_are_refused(container: str, record: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="null character"):
        read(CONTAINERS[container]([record], tmp_path), tmp_path)


def test_null_arguments_are_the_same_from_a_list_and_a_file(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {"a": None, "b": 1}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    rows = [{"messages": [{"role": "user", "content": "a"}, answer]}]
    tokenizer = make_tokenizer(CALLING)
    of_sources = [
        read(CONTAINERS[name](rows, tmp_path), tmp_path, tokenizer=tokenizer, capacity=256)
        for name in ("list", "jsonl", "stream")
    ]
    assert of_sources[0] == of_sources[1] == of_sources[2]
    assert '"a": null' in tokenizer.decode(of_sources[0][0])


def test_faults_of_files_are_named(tmp_path: Path) -> None:
    blank = tmp_path / "blank.jsonl"
    full = tmp_path / "full.jsonl"
    table = tmp_path / "a.csv"
    blank.write_text(" \n")
    full.write_text('{"text": "abc"}\n')
    table.write_text("text;label\nabc;1\n")

    with pytest.raises(ValueError, match=r"blank.jsonl has no record: it is empty or blank"):
        read(str(blank), tmp_path)
    with pytest.warns(DataWarning, match=r"1 of 2 files have no record.*blank.jsonl"):
        assert len(read([str(blank), str(full)], tmp_path)) == 1
    with pytest.raises(ValueError, match=r"a.csv: the first line, 'text;label', is one column"):
        read(str(table), tmp_path)

    full.write_text('{"text": "abc", "label": 1.0}\n{"text": "abc", "label": NaN}\n')
    with pytest.raises(ValueError, match=r"full.jsonl, line 2: 'label' is nan; wanted a finite number"):
        read(str(full), tmp_path)


def test_bos_is_not_added_to_a_text_that_begins_with_it(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(None)
    tokenizer.bos_token = "<|user|>"
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", bos)]
    )
    rows = read([{"text": "<|user|>blue"}, {"text": "blue"}], tmp_path, tokenizer=tokenizer)
    assert rows[0] == rows[1]
    rows = [{"prompt": f"{start}two", "completion": "four"} for start in ("<|user|>", "")]
    ids_of_rows = read(rows, tmp_path, tokenizer=tokenizer)
    assert ids_of_rows[0] == ids_of_rows[1]
    assert ids_of_rows[0].count(bos) == 1


def test_grey_images_of_sixteen_bits_keep_their_range() -> None:
    pillow = pytest.importorskip("PIL.Image")
    values = np.array([[0, 257 * 10], [257 * 128, 65535]], np.uint16)
    for image in (pillow.fromarray(values), pillow.fromarray(values.astype(np.int32))):
        assert np.asarray(decode(image))[..., 0].tolist() == [[0, 10], [128, 255]]
    with pytest.raises(ValueError, match="floating-point values"):
        decode(pillow.fromarray(values.astype(np.float32)))
