"""Chats with images from a file or a dataset: rendered, counted and packed as the processor itself would."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from PIL import Image

from lightning_thd import Sequences, THDBatch, THDDataModule
from tests.data.vision_chats import FAMILIES, chat, image, model, processor, write_chats


def opened(source: Any, family: str = "qwen2_5_vl", **how: Any) -> Any:
    data = THDDataModule(source, capacity=512, processor=processor(family), **how)
    data.setup("fit")
    return data._sets["train"]


def oracle(family: str, record: dict[str, Any], folder: Path) -> Any:
    """The processor's own answer for a conversation."""
    messages = [
        {
            **m,
            "content": [{"type": "text", "text": m["content"]}]
            if isinstance(m["content"], str)
            else m["content"],
        }
        for m in record["messages"]
    ]
    parts = [part for m in messages for part in m["content"] if part["type"] == "image"]
    text = processor(family).apply_chat_template(messages, tokenize=False)
    images = [Image.open(folder / part["path"]).convert("RGB") for part in parts] or None
    return processor(family)(text=[text], images=images, return_tensors="pt")


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_the_processors_and_packed_logits_those_of_one_at_a_time(
    tmp_path: Path, family: str
) -> None:
    file = write_chats(tmp_path, 4)
    data = opened(file, family, cache_dir=tmp_path / "cache")
    one, packed = model(family, "eager").eval(), model(family, "thd").eval()
    packed.load_state_dict(one.state_dict())
    rows, logits = [], []
    for i, line in enumerate(file.read_text().splitlines()):
        row, want = data.dataset[i], oracle(family, json.loads(line), tmp_path)
        rows.append(row)
        assert row["input_ids"].tolist() == want["input_ids"][0].tolist()
        assert data.index.lengths[i] == len(row["input_ids"])
        given = {name: want[name] for name in ("pixel_values", "image_grid_thw") if name in want}
        for name, value in given.items():
            assert torch.equal(row[name], value)
        if "image_grid_thw" in given:
            positions, _ = one.model.get_rope_index(
                want["input_ids"], want["mm_token_type_ids"], image_grid_thw=want["image_grid_thw"]
            )
            assert row["position_ids"].tolist() == positions[:, 0].tolist()
            given["mm_token_type_ids"] = want["mm_token_type_ids"]
        with torch.no_grad():
            logits.append(one(input_ids=want["input_ids"], use_cache=False, **given).logits[0])
    with torch.no_grad():
        batch = THDBatch.collate(rows)
        found = batch.unpack(packed(**batch.hf_kwargs()).logits)
    for own, other in zip(found, logits, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def test_the_loss_counts_what_the_assistant_says(tmp_path: Path) -> None:
    data = opened(write_chats(tmp_path, 4), cache_dir=tmp_path / "cache")
    said = [
        processor("qwen2_5_vl").tokenizer.decode(row["input_ids"][row["labels"] != -100]).replace(" ", "")
        for row in (data.dataset[i] for i in range(4))
    ]
    assert said == [
        "red<|im_end|>",
        "green<|im_end|>yes<|im_end|>",
        "blue<|im_end|>",
        "red<|im_end|>yes<|im_end|>",
    ]


def as_bytes(i: int) -> bytes:
    out = io.BytesIO()
    image(i).save(out, "PNG")
    return out.getvalue()


def test_every_way_to_give_an_image_is_the_same(tmp_path: Path) -> None:
    image(0).save(tmp_path / "a.png")
    data = as_bytes(0)
    plain, place = {"type": "text", "text": "what colour?"}, {"type": "image"}
    address = "data:image/png;base64," + base64.b64encode(data).decode()

    def record(*parts: Any, **more: Any) -> dict[str, Any]:
        content: Any = parts[0] if isinstance(parts[0], str) else [*parts]
        answer = {"role": "assistant", "content": "red"}
        return {"messages": [{"role": "user", "content": content}, answer], **more}

    ways = [
        record({"type": "image", "image": image(0)}, plain),
        record({"type": "image", "url": str(tmp_path / "a.png")}, plain),
        record({"type": "image_url", "image_url": {"url": address}}, plain),
        record(place, plain, images=[data]),
        record(place, plain, images=[{"bytes": data, "path": None}]),
        record("<image>\nwhat colour?", image=str(tmp_path / "a.png")),
        {
            "conversations": [
                {"from": "human", "value": "<image>\nwhat colour?"},
                {"from": "gpt", "value": "red"},
            ],
            "image": str(tmp_path / "a.png"),
        },
    ]
    rows = opened(ways).dataset
    for i in range(1, len(ways)):
        for name, value in rows[0].items():
            np.testing.assert_array_equal(np.asarray(value), np.asarray(rows[i][name]), err_msg=f"{i} {name}")


def test_bytes_in_columns_of_datasets_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    records = []
    for i in range(5):
        record = chat(i, *["x"] * (i % 3))
        for part in record["messages"][0]["content"]:
            part.pop("path", None)
        for message in record["messages"]:
            if isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
        records.append({**record, "images": [{"bytes": as_bytes(i + k), "path": None} for k in range(i % 3)]})
    made = datasets.Dataset.from_list(records)
    made.to_parquet(tmp_path / "chats.parquet")
    source = made.cast_column("images", datasets.Sequence(datasets.Image()))
    found = opened(source, cache_dir=tmp_path / "cache").dataset
    from_file = opened(tmp_path / "chats.parquet", cache_dir=tmp_path / "cache").dataset
    direct = opened(records).dataset
    for i in range(5):
        assert found[i]["input_ids"].tolist() == direct[i]["input_ids"].tolist()
        if i % 3:
            for rows in (found, from_file):
                assert torch.equal(rows[i]["pixel_values"], direct[i]["pixel_values"])
    image(1).save(tmp_path / "a.png")  # a path is relative to the folder of its file
    datasets.Dataset.from_list([{**records[1], "images": ["a.png"]}]).to_parquet(tmp_path / "named.parquet")
    named = opened(tmp_path / "named.parquet").dataset[0]
    assert torch.equal(named["pixel_values"], direct[1]["pixel_values"])


def test_workers_decode_and_patches_are_bounded(tmp_path: Path) -> None:
    data = THDDataModule(
        write_chats(tmp_path),
        capacity=512,
        global_batch=Sequences(6),
        processor=processor("qwen3_vl"),
        max_patches=200,
        num_workers=1,
        cache_dir=tmp_path / "cache",
    )
    data.attach(model=torch.nn.ModuleDict({"m": model("qwen3_vl", "thd")}))
    data.setup("fit")
    steps: Any = list(data.train_steps())
    batches = [batch for step in steps for batch in step.microbatches]
    assert sorted(i for batch in batches for i in batch.sequence_ids) == list(range(12))
    assert 0 < max(batch.stats.vision_patches for batch in batches) <= 200
    assert all(
        batch.stats.vision_patches == batch.extras.get("image_grid_thw", torch.zeros(0, 3)).prod(-1).sum()
        for batch in batches
    )


def test_a_stream_renders_too(tmp_path: Path) -> None:
    records = [chat(i, *[as_bytes(i)] * (i % 2)) for i in range(6)]
    data = THDDataModule(
        lambda: iter(records),  # type: ignore[arg-type]
        capacity=512,
        global_batch=Sequences(6),
        processor=processor("qwen2_5_vl"),
    )
    data.attach()
    step: Any = next(iter(data.train_steps()))
    assert sum(batch.stats.vision_patches for batch in step.microbatches) > 0
    rows = opened(records).dataset
    ids = [row.tolist() for batch in step.microbatches for row in batch.unpack(batch.input_ids)]
    assert sorted(ids) == sorted(rows[i]["input_ids"].tolist() for i in range(6))
    records[0] = {"input_ids": [1, 2, 3]}
    with pytest.raises(ValueError, match="is no conversation, which processor= renders"):
        next(iter(data.train_steps()))


def asked(*content: Any, **more: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": "a"}
    return {"messages": [{"role": "user", "content": [*content]}, answer], **more}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (chat(0, "missing.png"), r"row 0: .*missing.png cannot be opened as an image"),
        (chat(0, b"no image"), "bytes of an image cannot be opened as an image"),
        (chat(0, "https://x.org/a.png"), "is an address. Download images"),
        (chat(0) | {"images": [as_bytes(0)]}, "the record has 1 images, and its messages have places for 0"),
        (asked({"type": "image"}), "a place for an image beyond the 0"),
        *((asked({"type": kind}), f"of type '{kind}', and only text") for kind in ("video", "input_audio")),
        (chat(0) | {"videos": ["a.mp4"]}, "the record holds 'videos', and only text and images are rendered"),
        (chat(0) | {"audio": "a.wav"}, "the record holds 'audio', .* audio cannot be packed"),
        ({"input_ids": [1, 2, 3]}, "the train data hold ids, and processor= renders conversations"),
        (asked({"type": "text", "text": "<|image_pad|>"}), r"writes 1 times '<\|image_pad\|>' for 0 images"),
        ({"text": "no chat"}, "is no conversation, which processor= renders"),
    ],
)
def test_what_cannot_be_rendered_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        opened([record])


def test_processors_that_cannot_are_refused() -> None:
    with pytest.raises(ValueError, match="processor=object cannot render conversations for packs"):
        THDDataModule([chat(0)], capacity=512, processor=object()).setup("fit")
    with pytest.raises(ValueError, match=r"Both tokenizer= and processor= were given"):
        THDDataModule([chat(0)], capacity=512, processor=processor("llava"), tokenizer=str.encode)
