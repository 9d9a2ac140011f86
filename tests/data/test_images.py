"""Images beside tokens: rendered, counted, bound in packs, and trained as if each sequence was alone."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lightning_thd import Packs, Sequences, THDBatch, THDDataModule, causal_lm_loss
from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDStep
from lightning_thd.batch.media import patch_table
from lightning_thd.data.read.vision_chat import VisionChat
from lightning_thd.data.store.index import build_index
from lightning_thd.data.streams import Stream
from lightning_thd.flops import FlopsModel
from lightning_thd.packing import Cost
from tests.data.support import batches_of, make_trainer
from tests.data.vision_chats import FAMILIES, chat, image, model, processor, write_chats
from tests.models.test_vision import IMAGE, build
from tests.models.test_vision import sample as make_sample

pytest.importorskip("transformers")
pytest.importorskip("PIL")


def opened(source: Any, family: str = "qwen2_5_vl", **how: Any) -> Any:
    data = THDDataModule(source, capacity=512, processor=processor(family), **how)
    data.setup("fit")
    return data._sets["train"]


def as_parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def oracle(family: str, record: dict[str, Any], folder: Path) -> Any:
    """The processor's own answer for a conversation."""
    messages = [{**m, "content": as_parts(m["content"])} for m in record["messages"]]
    parts = [part for m in messages for part in m["content"] if part["type"] == "image"]
    text = processor(family).apply_chat_template(messages, tokenize=False)
    images = [Image.open(folder / part["path"]).convert("RGB") for part in parts] or None
    return processor(family)(text=[text], images=images, return_tensors="pt")


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_the_processors_and_logits_those_of_one_at_a_time(tmp_path: Path, family: str) -> None:
    file = write_chats(tmp_path, 4)
    data = opened(file, family, cache_dir=tmp_path / "cache")
    one = model(family, "eager").eval()
    packed = model(family, "thd").eval()
    packed.load_state_dict(one.state_dict())
    rows = []
    logits = []

    for i, line in enumerate(file.read_text().splitlines()):
        row = data.dataset[i]
        want = oracle(family, json.loads(line), tmp_path)
        rows.append(row)
        assert row["input_ids"].tolist() == want["input_ids"][0].tolist()
        assert data.index.lengths[i] == len(row["input_ids"])
        images = {name: want[name] for name in ("pixel_values", "image_grid_thw") if name in want}
        for name, value in images.items():
            assert torch.equal(row[name], value)
        if "image_grid_thw" in images:
            positions, _ = one.model.get_rope_index(
                want["input_ids"], want["mm_token_type_ids"], image_grid_thw=want["image_grid_thw"]
            )
            assert row["position_ids"].tolist() == positions[:, 0].tolist()
            images["mm_token_type_ids"] = want["mm_token_type_ids"]
        with torch.no_grad():
            logits.append(one(input_ids=want["input_ids"], use_cache=False, **images).logits[0])

    with torch.no_grad():
        batch = THDBatch.collate(rows)
        of_pack = batch.unpack(packed(**batch.hf_kwargs()).logits)

    for own, other in zip(of_pack, logits, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def test_the_loss_counts_what_the_assistant_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = opened(write_chats(tmp_path, 4), cache_dir=tmp_path / "cache")
    decode = processor("qwen2_5_vl").tokenizer.decode
    rows = [data.dataset[i] for i in range(4)]
    said = [decode(row["input_ids"][row["labels"] != -100]).replace(" ", "") for row in rows]
    assert [x.split("<|im_end|>")[:-1] for x in said] == [["red"], ["green", "yes"], ["blue"], ["red", "yes"]]
    chats = VisionChat(processor("llava"))
    before = chats.fingerprint()
    monkeypatch.setattr(chats.processor, "num_additional_image_tokens", 0)  # gives other rows
    assert chats.fingerprint() != before


def test_a_rank_without_a_sequence_reads_no_bad_record(tmp_path: Path) -> None:
    file = write_chats(tmp_path, 1)
    file.write_text('{"messages": "bad"}\n' + file.read_text())
    data = THDDataModule(file, capacity=512, processor=processor("llava"), on_error="skip")
    data.attach(rank=1, ranks=2)
    with pytest.warns(UserWarning, match="1 bad rows are left out"):
        assert [len(batch) for batch in batches_of(data)] == [0]


def as_bytes(i: int) -> bytes:
    out = io.BytesIO()
    image(i).save(out, "PNG")
    return out.getvalue()


def test_every_way_to_give_an_image_is_the_same(tmp_path: Path) -> None:
    image(0).save(tmp_path / "a.png")
    data = as_bytes(0)
    plain = {"type": "text", "text": "what colour?"}
    place = {"type": "image"}
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
    streamed = THDDataModule(lambda: iter(ways), capacity=512, processor=processor("qwen2_5_vl"))  # type: ignore[arg-type]
    for batch in batches_of(streamed):
        for ids in batch.unpack(batch.input_ids):
            assert ids.tolist() == rows[0]["input_ids"].tolist()
        of_one = torch.cat([rows[0]["pixel_values"]] * len(batch))
        assert torch.equal(batch.extras["pixel_values"], of_one)


def test_bytes_in_columns_of_datasets_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    records = []

    for i in range(5):
        record = chat(i, *["x"] * (i % 3))
        for part in record["messages"][0]["content"]:
            part.pop("path", None)
        for message in record["messages"]:
            message["content"] = as_parts(message["content"])
        records.append({**record, "images": [{"bytes": as_bytes(i + k), "path": None} for k in range(i % 3)]})

    made = datasets.Dataset.from_list(records)
    made.to_parquet(tmp_path / "chats.parquet")
    source = made.cast_column("images", datasets.Sequence(datasets.Image()))
    from_columns = opened(source, cache_dir=tmp_path / "cache").dataset
    from_file = opened(tmp_path / "chats.parquet", cache_dir=tmp_path / "cache").dataset
    direct = opened(records).dataset

    for i in range(5):
        assert from_columns[i]["input_ids"].tolist() == direct[i]["input_ids"].tolist()
        if i % 3:
            for rows in (from_columns, from_file):
                assert torch.equal(rows[i]["pixel_values"], direct[i]["pixel_values"])

    image(1).save(tmp_path / "a.png")  # a path is relative to the folder of its file
    (tmp_path / "b").mkdir()
    image(4).save(tmp_path / "b" / "a.png")
    files = [tmp_path / "named.parquet", tmp_path / "b" / "named.parquet"]
    for file in files:
        datasets.Dataset.from_list([{**records[1], "images": ["a.png"]}]).to_parquet(file)
    named = opened(files).dataset

    for i, row in enumerate((direct[1], direct[4])):
        assert torch.equal(named[i]["pixel_values"], row["pixel_values"])


def asked(*content: Any, **more: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": "a"}
    return {"messages": [{"role": "user", "content": [*content]}, answer], **more}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (chat(0, "missing.png"), r"row 0: .*missing.png cannot be opened as an image"),
        (chat(0, b"no image"), "bytes of an image cannot be opened as an image"),
        (chat(0, "https://x.org/a.png"), "is an address. Download images"),
        (chat(0) | {"images": [as_bytes(0)]}, "the record has 1 images, but its messages have places for 0"),
        (asked({"type": "image"}), "more places than the 0 images given"),
        *((asked({"type": kind}), f"of type '{kind}', but only text") for kind in ("video", "input_audio")),
        (chat(0) | {"videos": ["a.mp4"]}, "the record holds 'videos', but only text and images are rendered"),
        (chat(0) | {"audio": "a.wav"}, "the record holds 'audio', .* audio cannot be packed"),
        ({"input_ids": [1, 2, 3]}, "the train data hold ids, and processor= renders conversations"),
        (asked({"type": "text", "text": "<|image_pad|>"}), r"writes 1 times '<\|image_pad\|>' for 0 images"),
        ({"text": "no chat"}, "is not a conversation, and processor= renders only"),
        ({"prompt": "a", "completion": "b"}, "row 0: the messages are .*; wanted a list of"),
        ({"messages": ["hi"]}, "row 0: the messages are .*; wanted a list of"),
    ],
)
def test_what_cannot_be_rendered_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        opened([record])


def test_processors_that_cannot_are_refused() -> None:
    with pytest.raises(ValueError, match="processor=object cannot render conversations for packs"):
        THDDataModule([chat(0)], capacity=512, processor=object()).setup("fit")
    with pytest.raises(ValueError, match="the messages are 'p'; wanted a list"):
        opened([chat(0) | {"prompt": "p", "completion": "c"}], records="prompt")
    with pytest.raises(ValueError, match=r"Both tokenizer= and processor= were given"):
        THDDataModule([chat(0)], capacity=512, processor=processor("llava"), tokenizer=str.encode)


COST = Cost(linear=1, quadratic=0, patch=1, patch_pair=0.01)


def rows(count: int = 40) -> list[dict[str, Any]]:
    """Rows of text, of one image, of two, and of a video of two frames, in turns."""
    samples: list[dict[str, Any]] = []
    for i in range(count):
        row: dict[str, Any] = {"input_ids": np.arange(5 + i % 7)}
        size = 2 * (1 + i % 5)
        grids = [[], [[1, size, 4]], [[1, 4, 4], [1, 2, size]], [[2, 4, size]]][i % 4]
        if grids:
            name = "video" if i % 4 == 3 else "image"
            patches = sum(t * h * w for t, h, w in grids)
            pixels = "pixel_values" + ("_videos" if name == "video" else "")
            row |= {f"{name}_grid_thw": np.array(grids), pixels: np.ones((patches, 2), np.float32)}
        samples.append(row)
    return samples


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


def test_images_of_one_size_are_counted_by_the_models_patch() -> None:
    rows = [
        {"input_ids": [1] * 4, "pixel_values": torch.zeros(n, 3, 28, 56)} if n else {"input_ids": [1]}
        for n in (0, 1, 3)
    ]
    sizes = build_index(rows).sizes
    assert patch_table(sizes, 14).tolist() == [[0, 0], [8, 64], [24, 3 * 64]]
    with pytest.raises(ValueError, match="max_patches=9, but images of the train data come as pixels"):
        plan(THDDataModule(rows, capacity=8, max_patches=9))
    stats = THDBatch.collate(rows, vision=FlopsModel.from_config(model("llava", "thd").config).vision).stats
    assert (stats.vision_patches, stats.vision_squares) == (32, 4 * 64)


def test_a_bound_on_patches_without_images_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        plan(THDDataModule(rows(), capacity=64, max_patches=100, cost=COST))
        assert "no effect" not in caplog.text
        plan(THDDataModule([{"input_ids": [1, 2]}] * 3, capacity=8, max_patches=9))
    assert "max_patches=9 has no effect: the train data have no images." in caplog.text


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
    index = plans[0].spans.index
    expected = plans[0].spans.lengths + np.array(PATCHES)[index] + 0.01 * squares[index]
    np.testing.assert_allclose(plans[0].span_work, expected)
    steps = cast("list[THDStep]", list(data.train_steps()))
    assert sum(batch.stats.vision_patches for step in steps for batch in step.microbatches) > 0


def test_what_rows_do_not_say_is_declared_by_a_function() -> None:
    rows = [{"input_ids": np.arange(6), "features": np.ones((i + 1, 2))} for i in range(12)]
    data = THDDataModule(
        rows,
        capacity=64,
        max_patches=20,
        extras_cost=lambda row: 2 * (len(row["features"]) % 6),
        cost=COST,
    )
    assert all(one.microbatch_patches.max() <= 20 for one in plan(data, 1))

    grids = THDDataModule(
        rows, capacity=80, extras_cost=lambda row: [[2, 3, len(row["features"])]], cost=COST
    )
    [one] = plan(grids, 1)
    assert one.patches.tolist() == [6 * (i + 1) for i in one.spans.index]
    with pytest.raises(ValueError, match=r"Sequence 0: extras_cost\(sample\)"):
        plan(THDDataModule(rows, capacity=64, extras_cost=lambda row: -1))
    for many in (2**40, [[1, 2**20, 2**20]]):
        with pytest.raises(ValueError, match="gives images .* Give patches, not pixels"):
            plan(THDDataModule(rows, capacity=64, extras_cost=lambda row, many=many: many))


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
    def loader_of(n: int, **how: Any) -> Any:
        data = THDDataModule(iter_rows, capacity=64, global_batch=Sequences(n), **how)
        data.attach()
        return data.train_steps()

    steps = zip(range(2), loader_of(20, max_patches=100, cost=COST), strict=False)
    stats = [batch.stats for _, step in steps for batch in step.microbatches]
    assert all(one.vision_patches <= 100 for one in stats)
    assert sum(one.vision_patches for one in stats) == sum(PATCHES)
    with pytest.raises(ValueError, match=r"row 1: 16 image patches but max_patches=10"):
        next(iter(loader_of(20, max_patches=10)))
    loader = loader_of(9, max_patches=10, oversize="drop")
    assert next(iter(loader)).microbatches[0].stats.vision_patches <= 10
    assert loader.counts["dropped"] > 0
    assert loader.counts["tokens_lost"] > loader.counts["dropped"]
    loader = loader_of(20, max_patches=10, oversize="own_pack")
    next(iter(loader))
    assert loader.counts["own_pack"] > 0


class KnowsLengths(list[Any]):
    lengths: list[int]


def test_a_bound_needs_the_patches_of_every_row() -> None:
    samples = KnowsLengths(rows())
    samples.lengths = [len(row["input_ids"]) for row in samples]
    with pytest.raises(ValueError, match="has `lengths`, so no row was read"):
        plan(THDDataModule(samples, capacity=64, max_patches=100))
    assert plan(THDDataModule(samples, capacity=64, max_patches=100, extras_cost=patches_of))
    with pytest.raises(ValueError, match=r"Sequence 3 has 64 image patches but max_patches=60"):
        plan(THDDataModule(rows(), capacity=64, max_patches=60))


def test_images_that_change_after_they_were_counted_are_refused() -> None:
    samples = rows(4)
    data = THDDataModule(samples, capacity=64, cost=COST)
    data.setup("fit")
    samples[1] = {**samples[1], "image_grid_thw": np.array([[1, 8, 8]])}
    with pytest.raises(ValueError, match=r"Sequence 1 has \(64, .*\) patches and pixels .* but \(16, "):
        list(data.train_dataloader())


GRIDS: list[list[Any]] = [[(1, 4, 4)], [], [(1, 4, 8), (1, 4, 4)], [(2, 4, 4)], [], [(1, 8, 4)]]


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
        ids = row["input_ids"][None]
        labels = row["labels"]
        images = {k: row[k] for k in ("pixel_values", "image_grid_thw") if k in row}
        if "position_ids" in row:
            images["position_ids"] = row["position_ids"][:, None]
        with torch.no_grad():
            logits = eager(input_ids=ids, use_cache=False, **images).logits[0]
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

    data = THDDataModule(image_samples(), capacity=31, oversize=oversize)
    data.attach(alignment=Alignment(sequence_multiple=4, total_multiple=16))  # of 31 slots, 16 can be used
    data.setup("fit")

    with pytest.raises(ValueError, match=message):
        data.train_steps()
    texts = image_samples(long=7)
    texts[4] = {"input_ids": np.arange(20)}  # text beside them may be cut

    assert batches_of(THDDataModule(texts, capacity=8, oversize=oversize))
    samples = KnowsLengths(image_samples())
    samples.lengths = [len(row["input_ids"]) for row in samples]

    with pytest.raises(ValueError, match=message):  # never read before: refused when it is
        batches_of(THDDataModule(samples, capacity=8, oversize=oversize))


def only_batch(source: Any, family: str) -> THDBatch:
    data = THDDataModule(source, capacity=512, processor=processor(family), global_batch=Packs(1))
    data.setup("fit")
    [batch] = data.train_dataloader()
    return batch


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
@pytest.mark.parametrize("container", ["list", "stream"])
def test_images_in_an_answer_are_not_learned(family: str, container: str, tmp_path: Path) -> None:
    image(0).save(tmp_path / "a.png")
    drawn = {"type": "image", "path": str(tmp_path / "a.png")}
    record = {
        "messages": [
            {"role": "user", "content": "draw it"},
            {"role": "assistant", "content": [*as_parts("see"), drawn, *as_parts("there")]},
        ]
    }
    batch = only_batch([record] if container == "list" else Stream(lambda: iter([record])), family)
    tokenizer = processor(family).tokenizer
    placeholder = tokenizer.convert_tokens_to_ids(processor(family).image_token)
    assert (batch.input_ids == placeholder).any(), "the answer has no image"
    learned = tokenizer.decode(batch.targets[batch.targets != -100])
    assert learned.replace(" ", "") == "seethere<|im_end|>"


def test_relative_paths_of_a_streams_file_start_at_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(("one", "two", "elsewhere")):
        (tmp_path / name).mkdir()
        image(number).save(tmp_path / name / "a.png")
        (tmp_path / name / "chats.jsonl").write_text(json.dumps(chat(0, "a.png")) + "\n")
    monkeypatch.chdir(tmp_path / "elsewhere")  # which has another image of this name
    for name in ("one", "two"):
        read = only_batch(Stream(tmp_path / name / "chats.jsonl"), "qwen2_5_vl")
        expected = only_batch([chat(0, str(tmp_path / name / "a.png"))], "qwen2_5_vl")
        assert torch.equal(read.extras["image_grid_thw"], expected.extras["image_grid_thw"])
        assert torch.equal(read.extras["pixel_values"], expected.extras["pixel_values"])
    other = only_batch([chat(0, "a.png")], "qwen2_5_vl")
    assert not torch.equal(other.extras["pixel_values"][:4], expected.extras["pixel_values"][:4])
