"""Calls of tools, templates' own variables, and what a template makes of them: exact, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from lightning_thd import Packs, THDDataModule
from lightning_thd.data.read.chat import encode_chat
from lightning_thd.data.streams import Stream
from tests.data.chats import CALLING, MARKED, PLAIN, make_tokenizer
from tests.data.support import open_source

USER = {"role": "user", "content": "What colour?"}
ANSWER = {"role": "assistant", "content": "It is blue."}
RESULT = {"role": "system", "content": "blue"}


def call(arguments: Any, name: str = "colour") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict[str, Any], content: str | None = "") -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def learned(template: str, messages: list[Any], **kwargs: Any) -> str:
    tokenizer = make_tokenizer(template)
    ids, mask = encode_chat(tokenizer, messages, **kwargs)
    return str(tokenizer.decode(np.array(ids)[mask]))


@pytest.mark.parametrize(
    "template", [PLAIN, MARKED, CALLING.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")]
)
@pytest.mark.parametrize(
    "called",
    [
        calling(call({"of": "sky"}), call({"of": "sea"}, "depth")),
        calling(call({"of": "sky"}), {"name": "depth", "arguments": {}}, content=None),
    ],
)
def test_a_call_that_the_template_leaves_out(template: str, called: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="leaves out the call of '(colour|depth)' in message 1. Take"):
        learned(template, [USER, called, RESULT, ANSWER])


def test_a_template_that_looks_names_up_is_no_template_that_leaves_them_out() -> None:
    looks = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.function.name not in ['colour'] %}"
    )
    looks += "{{ raise_exception('unknown') }}{% endif %}{% endfor %}{% endfor %}"
    assert learned(looks + PLAIN, [USER, calling(call({}), content="colour()")]) == "colour()<|end|>"


@pytest.mark.parametrize("arguments", ['{"of": "sky", "n": 1}', '{"of":"\u00e9t\u00e9"}', "{}"])
def test_arguments_in_a_string_are_not_quoted_twice(arguments: str) -> None:
    """A model would learn to call with a string of JSON, where its tools are given an object."""
    read = json.loads(arguments)
    asked = [USER, calling(call(arguments)), RESULT, ANSWER]
    exact = [USER, calling(call(read)), RESULT, ANSWER]
    assert learned(CALLING, asked) == learned(CALLING, exact)
    assert json.dumps(read, ensure_ascii=False) in learned(CALLING, asked)
    assert asked[1]["tool_calls"][0]["function"]["arguments"] == arguments  # the record is left as it was


def test_arguments_stay_as_they_are_where_a_template_takes_strings() -> None:
    takes_strings = CALLING.replace("call.arguments | tojson", "call.arguments")
    assert learned(takes_strings, [USER, calling(call('{"of":"sky"}'))]) == (
        '{"name": "colour", "arguments": {"of":"sky"}}<|end|>'
    )
    assert '"arguments": "of the sky"' in learned(CALLING, [USER, calling(call("of the sky"))])


THINKS = PLAIN.replace(
    "<|assistant|>\n", "<|assistant|>\n{% if enable_thinking %}<think>{% endif %}"
).replace(
    "{{ m.content }}",
    "{% if enable_thinking and m.role == 'assistant' %}<think>hm</think>{% endif %}{{ m.content }}",
)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"enable_thinking": True}, "hm</think>It is blue.<|end|>"),
        ({"enable_thinking": False}, "It is blue.<|end|>"),
        (None, "It is blue.<|end|>"),
    ],
)
@pytest.mark.parametrize("form", ["messages", "prompt", "conversations"])
def test_variables_of_the_template_beside_a_conversation(
    tmp_path: Path, form: str, options: dict[str, Any] | None, wanted: str
) -> None:
    turns = [{"from": "human", "value": "What colour?"}, {"from": "gpt", "value": "It is blue."}]
    record: dict[str, Any] = {
        "messages": {"messages": [USER, ANSWER]},
        "prompt": {"prompt": turns[:1], "completion": turns[1:]},  # of from and value there, too
        "conversations": {"conversations": turns},
    }[form]
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({**record, "chat_template_kwargs": options}))
    tokenizer = make_tokenizer(THINKS)
    labels = open_source(file, tokenizer=tokenizer, cache_dir=tmp_path)[0]["labels"]
    assert tokenizer.decode(labels[labels >= 0]) == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("thinking", "argument after \\*\\* must be a mapping"),
        ({"tools": [], "tokenize": True}, "multiple values for keyword argument '(tools|tokenize)'"),
        ({"chat_template": "x"}, "chat_template_kwargs holds 'chat_template', which the chat template does"),
    ],
)
def test_variables_that_are_none(tmp_path: Path, options: Any, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": [USER, ANSWER], "chat_template_kwargs": options}))
    with pytest.raises(ValueError, match=message):
        open_source(file, tokenizer=make_tokenizer(PLAIN), cache_dir=tmp_path)


def test_a_template_that_opens_a_thought_of_its_own() -> None:
    opens = PLAIN.replace(
        "%}<|assistant|>\n{% endif %}", "%}<|assistant|>\n<think>{% endif %}"
    )  # of the prompt alone
    with pytest.raises(ValueError, match=r"asks for message 1 with '.*<think>' and begins the answer"):
        learned(opens, [USER, ANSWER])


@pytest.mark.parametrize("kind", ["rows", "parquet", "iterable", "stream of parquet", "generator"])
def test_null_keys_that_columns_of_structs_add_are_not_learned(tmp_path: Path, kind: str) -> None:
    """Arrow gives every call the arguments of all calls, and every tool the parameters of all, null."""
    datasets, pa = pytest.importorskip("datasets"), pytest.importorskip("pyarrow.parquet")
    records = [
        {"messages": [USER, calling(call({"of": "sky"}))], "tools": [{"name": "colour", "a": 1}]},
        {"messages": [USER, calling(call({"depth": 3}, "depth"))], "tools": [{"name": "depth", "b": 2}]},
        {"messages": [USER, ANSWER], "tools": None},
    ]
    made = datasets.Dataset.from_list(records)
    pa.write_table(made.data.table, tmp_path / "a.parquet")
    file = str(tmp_path / "a.parquet")
    source: Any = {
        "rows": lambda: made,
        "parquet": lambda: file,
        "iterable": made.to_iterable_dataset,
        "stream of parquet": lambda: Stream(file),
        "generator": lambda: lambda: iter(made.to_list()),
    }[kind]()
    tokenizer = make_tokenizer("{% if tools %}{{ tools | tojson }}{% endif %}" + CALLING)
    data = THDDataModule(source, tokenizer=tokenizer, capacity=512, global_batch=Packs(1), cache_dir=tmp_path)
    data.prepare_data()
    data.setup("fit")
    found = [ids for b in data.train_dataloader() for ids in b.unpack(b.input_ids)]
    wanted = [encode_chat(tokenizer, r["messages"], tools=r["tools"])[0] for r in records]
    assert sorted(ids.tolist() for ids in found) == sorted(wanted)


def test_marks_tell_where_a_prompt_ends_if_the_template_opens_a_thought_of_its_own() -> None:
    """Templates of models that think ask with an open thought, and write earlier answers without one."""
    opens = MARKED.replace("%}<|assistant|>\n{% endif %}", "%}<|assistant|>\n<think>{% endif %}")
    talk = [USER, ANSWER, {**USER, "content": "And two?"}, {**ANSWER, "content": "four"}]
    assert learned(opens, talk, skip=3) == "four<|end|>"
    assert learned(opens, talk, skip=1) == "It is blue.<|end|>four<|end|>"
    twice = opens.replace(
        "{{ m.content }}<|end|>{% endgen",
        "{{ m.content }}{% endgeneration %}{% generation %}<|end|>{% endgen",
    )
    with pytest.raises(ValueError, match="marks 4 parts with .* Mark each"):
        learned(twice, talk, skip=3)
