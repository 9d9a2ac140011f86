# ruff: noqa: E501  (a table: one key a line)
"""Every key of public formats, in every container: read, masked, metadata, or refused by name.

The keys are those of OpenAI's fine-tuning files and logs, ShareGPT, Alpaca, Dolly, TRL, axolotl, ms-swift,
LLaMA-Factory, slime and prime-rl. "metadata" means that the ids are those of the record without the key.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from lightning_thd import Packs, THDDataModule
from lightning_thd.data.streams import Stream
from tests.data.chats import make_tokenizer

# Writes contents, calls, tools and names of speakers, as a strict template does: nothing by a general rule.
TEMPLATE = (
    "{{ loud }}{% if tools %}<|system|>\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.reasoning_content %}{{ m.reasoning_content }}</think>"
    "{% endif %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content or [] %}"
    "{{ part.text }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}{% set call = call.function or call %}"
    '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}'
    "{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
USER = {"role": "user", "content": "What colour?"}
ANSWER = {"role": "assistant", "content": "It is blue."}
TOOL = {"name": "paint", "description": "Paints a wall.", "parameters": {"type": "object"}}
MESSAGES = {"messages": [USER, ANSWER]}
LONGER = {"messages": [USER, {**ANSWER, "content": "First."}, USER, ANSWER]}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
TWO_ROUNDS = {"conversations": [dict(turn) for turn in 2 * SHAREGPT["conversations"]]}
ALPACA = {"instruction": "Name a colour.", "output": "Blue."}
PROMPT = {"prompt": "two plus two is", "completion": " four"}
TEXT = {"text": "a text and the end of it"}
RESULTS = ("tool_response", "observation", "function_response", "ipython")
WORDS = "zebra"  # is in no other text

Change = Callable[[dict[str, Any]], None]


def beside(key: str, value: Any) -> Change:
    return lambda record: record.update({key: value})


def inside(number: int, key: str, value: Any, name: str = "messages") -> Change:
    return lambda record: record[name][number].update({key: value})


def in_place_of_content(number: int, key: str, value: Any) -> Change:
    def change(record: dict[str, Any]) -> None:
        message = record["messages"][number]
        del message["content"]
        message[key] = value

    return change


def in_part(number: int, key: str, value: Any) -> Change:
    def change(record: dict[str, Any]) -> None:
        for message in record["messages"]:  # columns of Arrow hold either texts or lists
            message["content"] = [{"type": "text", "text": message["content"]}]
        record["messages"][number]["content"][0][key] = value

    return change


def result_under(role: str) -> Change:
    """Add a result of a call under another format's role."""
    return lambda record: record["messages"].extend([{"role": role, "content": WORDS}, ANSWER])


def in_call(**more: Any) -> Change:
    def change(record: dict[str, Any]) -> None:
        record["messages"][1]["tool_calls"] = [{"type": "function", **more}]

    return change


Case = tuple[str, str, dict[str, Any], Change, str]
# name of the key (also what a refusal must name), format, record, change, outcome
CASES: list[Case] = [
    # roles of results
    *((role, "ms-swift, LLaMA-Factory", MESSAGES, result_under(role), "refused") for role in RESULTS),
    # beside a text
    *((key, "text", TEXT, beside(key, WORDS), "refused") for key in ("answer", "response", "output", "text_pair")),
    ("answer", "text", TEXT, beside("answer", "of it"), "metadata"),
    ("prompt", "text", TEXT, beside("prompt", WORDS), "metadata"),
    ("summary", "text", TEXT, beside("summary", WORDS), "metadata"),
    # beside the messages
    ("tools", "OpenAI", MESSAGES, beside("tools", [{"type": "function", "function": {**TOOL, "description": WORDS}}]), "read"),
    ("tools", "LLaMA-Factory", SHAREGPT, beside("tools", json.dumps([{**TOOL, "description": WORDS}])), "read"),
    ("functions", "OpenAI", MESSAGES, beside("functions", [TOOL]), "refused"),
    ("tool_defs", "prime-rl", MESSAGES, beside("tool_defs", [TOOL]), "refused"),
    ("tool_definitions", "OpenAI logs", MESSAGES, beside("tool_definitions", [TOOL]), "refused"),
    ("parallel_tool_calls", "OpenAI", MESSAGES, beside("parallel_tool_calls", False), "metadata"),
    ("response_format", "OpenAI logs", MESSAGES, beside("response_format", {"type": "json_object"}), "refused"),
    ("choices", "OpenAI logs", MESSAGES, beside("choices", [{"message": ANSWER}]), "refused"),
    ("model", "OpenAI logs", MESSAGES, beside("model", "gpt"), "metadata"),
    ("temperature", "OpenAI logs", MESSAGES, beside("temperature", 0.5), "metadata"),
    ("usage", "OpenAI logs", MESSAGES, beside("usage", {"total_tokens": 5}), "metadata"),
    ("finish_reason", "OpenAI logs", MESSAGES, beside("finish_reason", "length"), "metadata"),
    ("id", "ShareGPT", SHAREGPT, beside("id", "abc_0"), "metadata"),
    ("system", "LLaMA-Factory", SHAREGPT, beside("system", WORDS), "read"),
    ("system", "Alpaca", ALPACA, beside("system", WORDS), "read"),
    ("system", "ms-swift", MESSAGES, beside("system", WORDS), "refused"),
    ("system_prompt", "ShareGPT", SHAREGPT, beside("system_prompt", WORDS), "refused"),
    ("system_prompt", "Alpaca", ALPACA, beside("system_prompt", WORDS), "refused"),
    ("system_message", "axolotl", MESSAGES, beside("system_message", WORDS), "refused"),
    ("context", "Dolly", ALPACA, beside("context", WORDS), "refused"),
    ("context", "Dolly", MESSAGES, beside("context", WORDS), "refused"),
    ("category", "Dolly", ALPACA, beside("category", "closed_qa"), "metadata"),
    ("input", "Alpaca", ALPACA, beside("input", WORDS), "read"),
    ("history", "LLaMA-Factory", ALPACA, beside("history", [["a", "b"]]), "refused"),
    ("text", "Alpaca", ALPACA, beside("text", "### Instruction: Name a colour. Blue."), "metadata"),
    ("objects", "ms-swift", MESSAGES, beside("objects", {"ref": ["dog"], "bbox": [[1, 2, 3, 4]]}), "refused"),
    ("channel", "ms-swift", MESSAGES, beside("channel", "code"), "metadata"),
    ("images", "ms-swift", MESSAGES, beside("images", ["a.png"]), "refused"),
    ("videos", "ms-swift", MESSAGES, beside("videos", ["a.mp4"]), "refused"),
    ("audios", "ms-swift", MESSAGES, beside("audios", ["a.wav"]), "refused"),
    ("rejected_response", "ms-swift", MESSAGES, beside("rejected_response", "It is red."), "refused"),
    ("rejected_messages", "ms-swift", MESSAGES, beside("rejected_messages", [USER, ANSWER]), "refused"),
    ("margin", "ms-swift", MESSAGES, beside("margin", 1.5), "refused"),
    ("label", "ms-swift", MESSAGES, beside("label", False), "refused"),
    ("label", "ms-swift", MESSAGES, beside("label", True), "refused"),
    ("label", "TRL", PROMPT, beside("label", False), "refused"),
    ("label", "ShareGPT", SHAREGPT, beside("label", False), "refused"),
    ("label", "Alpaca", ALPACA, beside("label", False), "refused"),
    ("label", "slime", MESSAGES, beside("label", WORDS), "refused"),
    ("kto_tag", "LLaMA-Factory", SHAREGPT, beside("kto_tag", False), "refused"),
    ("kto_tag", "LLaMA-Factory", ALPACA, beside("kto_tag", True), "refused"),
    ("chosen", "TRL", MESSAGES, beside("chosen", [ANSWER]), "refused"),
    ("rejected", "LLaMA-Factory", SHAREGPT, beside("rejected", {"from": "gpt", "value": "No"}), "refused"),
    ("metadata", "slime", MESSAGES, beside("metadata", {"rm_type": "math"}), "metadata"),
    ("reward", "prime-rl", MESSAGES, beside("reward", 0.0), "refused"),
    ("advantage", "prime-rl", MESSAGES, beside("advantage", -1.0), "refused"),
    ("chat_template_kwargs", "prime-rl", MESSAGES, beside("chat_template_kwargs", {"loud": WORDS}), "read"),
    ("prompt", "TRL", MESSAGES, beside("prompt", "What colour?"), "metadata"),
    ("prompt", "TRL", MESSAGES, beside("prompt", WORDS), "refused"),
    ("completion", "TRL", MESSAGES, beside("completion", WORDS), "refused"),
    ("output", "Alpaca", MESSAGES, beside("output", WORDS), "refused"),
    ("response", "Dolly", PROMPT, beside("response", WORDS), "refused"),
    ("weight", "OpenAI", MESSAGES, beside("weight", 0), "refused"),
    ("loss_mask", "slime", MESSAGES, beside("loss_mask", [0, 1]), "refused"),
    ("documents", "TRL", MESSAGES, beside("documents", [{"title": WORDS}]), "refused"),
    ("topics_of_ours", "own", MESSAGES, beside("topics_of_ours", WORDS), "refused"),
    ("topics_of_ours", "own", SHAREGPT, beside("topics_of_ours", 3), "refused"),
    # in a message
    ("name", "OpenAI", MESSAGES, inside(0, "name", "Zoe"), "refused"),
    ("reasoning_content", "OpenAI", MESSAGES, inside(1, "reasoning_content", WORDS), "read"),
    ("reasoning", "OpenAI logs", MESSAGES, inside(1, "reasoning", WORDS), "read or refused"),
    ("reasoning_details", "OpenAI logs", MESSAGES, inside(1, "reasoning_details", [{"text": WORDS}]), "refused"),
    ("refusal", "OpenAI logs", MESSAGES, inside(1, "refusal", WORDS), "refused"),
    ("refusal", "OpenAI logs", MESSAGES, in_place_of_content(1, "refusal", WORDS), "refused"),
    ("function_call", "OpenAI", MESSAGES, inside(1, "function_call", {"name": "f"}), "refused"),
    ("audio", "OpenAI logs", MESSAGES, inside(1, "audio", {"id": "a"}), "refused"),
    ("annotations", "OpenAI logs", MESSAGES, inside(1, "annotations", [{"type": "url"}]), "metadata"),
    ("timestamp", "OpenAI logs", MESSAGES, inside(0, "timestamp", 17), "metadata"),
    ("content", "OpenAI logs", MESSAGES, in_place_of_content(0, "timestamp", 17), "refused"),
    ("content", "OpenAI logs", MESSAGES, in_place_of_content(1, "id", "m_1"), "refused"),
    ("content", "OpenAI logs", MESSAGES, in_place_of_content(1, "metadata", {"a": "b"}), "refused"),
    ("content", "OpenAI logs", MESSAGES, in_place_of_content(0, "tool_call_id", "c_1"), "refused"),
    ("text", "own", MESSAGES, in_place_of_content(0, "text", WORDS), "refused"),
    ("parts", "own", MESSAGES, in_place_of_content(0, "parts", [{"text": WORDS}]), "refused"),
    ("value", "ShareGPT", MESSAGES, in_place_of_content(1, "value", WORDS), "refused"),
    ("message", "own", MESSAGES, in_place_of_content(0, "message", WORDS), "refused"),
    ("output", "OpenAI logs", MESSAGES, in_place_of_content(0, "output", WORDS), "refused"),
    ("tools", "own", MESSAGES, inside(0, "tools", [TOOL]), "refused"),
    ("images", "own", MESSAGES, inside(0, "images", ["a.png"]), "refused"),
    ("role", "ms-swift", MESSAGES, inside(0, "role", "tool_call"), "refused"),
    ("role", "ms-swift", MESSAGES, inside(0, "role", "human"), "refused"),
    ("weight", "OpenAI", LONGER, inside(1, "weight", 0), "masked"),
    ("train", "axolotl", LONGER, inside(1, "train", False), "masked"),
    ("training", "axolotl", LONGER, inside(1, "training", False), "masked"),
    ("loss", "ms-swift", LONGER, inside(1, "loss", False), "masked"),
    ("loss_scale", "ms-swift", LONGER, inside(1, "loss_scale", 0.0), "masked"),
    ("loss_mask", "slime", LONGER, inside(1, "loss_mask", 0), "masked"),
    ("step_loss_mask", "slime", LONGER, inside(1, "step_loss_mask", 0), "masked"),
    ("trainable", "own", LONGER, inside(1, "trainable", False), "masked"),
    ("loss_weight", "own", LONGER, inside(1, "loss_weight", 0), "masked"),
    ("step_loss_mask", "slime", LONGER, inside(1, "step_loss_mask", 1), "metadata"),
    ("loss_weight", "own", LONGER, inside(1, "loss_weight", 0.5), "refused"),
    ("loss_mask", "slime", LONGER, inside(1, "loss_mask", [0, 1]), "refused"),
    ("mask", "own", LONGER, inside(1, "mask", 1), "refused"),
    ("train_detail", "axolotl", MESSAGES, inside(1, "train_detail", [{"begin_offset": 0}]), "refused"),
    ("train", "axolotl", MESSAGES, inside(0, "train", True), "refused"),
    ("weight", "OpenAI", MESSAGES, inside(0, "weight", 1), "refused"),
    ("weight", "OpenAI", MESSAGES, inside(0, "weight", 0), "metadata"),
    ("loss_of_ours", "own", MESSAGES, inside(1, "loss_of_ours", 0), "refused"),
    ("train", "ShareGPT", TWO_ROUNDS, inside(1, "train", False, "conversations"), "masked"),
    ("text", "ShareGPT", SHAREGPT, inside(0, "text", WORDS, "conversations"), "refused"),
    ("content", "ShareGPT", SHAREGPT, inside(0, "content", WORDS, "conversations"), "refused"),
    # in a part of a content
    ("text", "OpenAI", MESSAGES, in_part(0, "text", WORDS), "read"),
    ("cache_control", "OpenAI logs", MESSAGES, in_part(0, "cache_control", {"type": "ephemeral"}), "metadata"),
    ("weight", "axolotl", MESSAGES, in_part(1, "weight", 0), "refused"),
    ("train_detail", "axolotl", MESSAGES, in_part(1, "train_detail", [{"train": False}]), "refused"),
    ("content", "own", MESSAGES, in_part(1, "content", WORDS), "refused"),
    # in a call
    ("arguments", "OpenAI", MESSAGES, in_call(function={"name": "paint", "arguments": {"of": WORDS}}), "read"),
    ("arguments", "own", MESSAGES, in_call(name="paint", arguments={"of": WORDS}), "read"),
    ("parameters", "own", MESSAGES, in_call(function={"name": "paint", "parameters": {"of": WORDS}}), "refused"),
    ("input", "own", MESSAGES, in_call(name="paint", input={"of": WORDS}), "refused"),
    ("custom", "OpenAI", MESSAGES, in_call(custom={"input": WORDS}, name="paint"), "refused"),
    ("name", "OpenAI", MESSAGES, in_call(function={"arguments": {"of": WORDS}}), "refused"),
]  # fmt: skip


def as_parquet(record: dict[str, Any], folder: Path) -> str:
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist([record]), folder / "a.parquet")
    return str(folder / "a.parquet")


def as_jsonl(record: dict[str, Any], folder: Path) -> str:
    (folder / "a.jsonl").write_text(json.dumps(record) + "\n")
    return str(folder / "a.jsonl")


def as_hugging_face(record: dict[str, Any], folder: Path) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list([record])


CONTAINERS: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "list": lambda record, _: [record],
    "jsonl": as_jsonl,
    "parquet": as_parquet,
    "dataset": as_hugging_face,
    "generator": lambda record, _: lambda: iter([copy.deepcopy(record)]),
    "iterable": lambda record, folder: as_hugging_face(record, folder).to_iterable_dataset(),
    "stream of jsonl": lambda record, folder: Stream(as_jsonl(record, folder)),
    "stream of parquet": lambda record, folder: Stream(as_parquet(record, folder)),
}


def read(record: dict[str, Any], container: str, folder: Path, **options: Any) -> tuple[list[int], list[int]]:
    """Return ids and targets of the only record of a source, or raise the error with which it is refused."""
    folder.mkdir(parents=True, exist_ok=True)
    source = CONTAINERS[container](record, folder)
    tokenizer = make_tokenizer(TEMPLATE)
    data = THDDataModule(
        source, tokenizer=tokenizer, capacity=1024, global_batch=Packs(1), cache_dir=folder, **options
    )
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    return batch.input_ids.tolist(), batch.targets.tolist()


def changed(record: dict[str, Any], change: Change) -> dict[str, Any]:
    copied = copy.deepcopy(record)
    change(copied)
    return copied


@cache
def _plain(record: str) -> tuple[list[int], list[int]]:
    with TemporaryDirectory() as folder:
        return read(json.loads(record), "list", Path(folder))


def outcome(case: Case, container: str, folder: Path) -> str:
    """Return what became of a key, in the words of ``CASES``, or a refusal that does not name it."""
    key, _, record, change, _ = case
    plain_ids, plain_targets = _plain(json.dumps(record))

    try:
        ids, targets = read(changed(record, change), container, folder / "changed")
    except ValueError as err:
        return "refused" if key in str(err) else f"refused, without naming {key}: {err}"

    learned = np.count_nonzero(np.array(targets) != -100)
    text = make_tokenizer(TEMPLATE).decode(ids)
    if WORDS in text:
        return "read"
    if ids != plain_ids:
        return f"other ids: {text}"
    if learned < np.count_nonzero(np.array(plain_targets) != -100):
        return "masked"
    return "metadata"


OFTEN = ("list", "parquet", "stream of jsonl")


@pytest.mark.parametrize(
    "container", [x if x in OFTEN else pytest.param(x, marks=pytest.mark.slow) for x in CONTAINERS]
)
def test_no_key_of_a_public_format_is_dropped(container: str, tmp_path: Path) -> None:
    wrong = []
    for number, case in enumerate(CASES):
        key, form, _, _, expected = case
        actual = outcome(case, container, tmp_path / str(number))
        if actual not in expected.split(" or "):  # transformers renames "reasoning" in later releases
            wrong.append(f"{key} ({form}, case {number}): {actual}, wanted {expected}")
    assert not wrong, "\n".join(wrong)


def test_there_are_eighty_keys() -> None:
    assert len({(key, form) for key, form, *_ in CASES}) >= 80


def test_a_user_lists_keys_that_may_be_dropped(tmp_path: Path) -> None:
    record = changed(MESSAGES, beside("topics_of_ours", WORDS))
    record["messages"][0]["mood"] = {"now": "good"}
    with pytest.raises(ValueError, match=r"'topics_of_ours', which would be lost.*metadata_keys="):
        read(record, "list", tmp_path)
    with pytest.raises(ValueError, match=r"message 0 of the role 'user' has 'mood', which would be lost"):
        read(record, "list", tmp_path, metadata_keys=("topics_of_ours",))
    for container in CONTAINERS:
        keys = ["topics_of_ours", "mood"]
        text = read(record, container, tmp_path / container, metadata_keys=keys)
        assert text == _plain(json.dumps(MESSAGES)), container
    with pytest.raises(TypeError, match="metadata_keys='mood'; wanted names of keys"):
        read(record, "list", tmp_path, metadata_keys="mood")
    with pytest.raises(ValueError, match="metadata_keys has 'content', which holds the conversation"):
        read(record, "list", tmp_path, metadata_keys=("content",))
