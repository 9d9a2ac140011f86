"""Conversations and prompts: the loss is on what the assistant says, its end included, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from lightning_thd import Packs, THDBatch, THDDataModule
from lightning_thd.data.read.chat import encode_chat
from lightning_thd.data.read.encode import Encoder
from lightning_thd.data.read.text import tokenizer_fingerprint
from lightning_thd.data.streams import Stream
from tests.data.chats import CALLING, GLUED, MARKED, PLAIN, TALKS, UNSTABLE, make_tokenizer
from tests.data.support import open_source

USER = {"role": "user", "content": "What colour?"}
ANSWER = {"role": "assistant", "content": "It is blue."}
RESULT = {"role": "system", "content": "blue"}
ASKS = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
# Of messages by users and assistants alone, as templates with an `elif` for each known role are.
KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<|{{ m.role }}|>\n{{ m.content }}"
    "<|end|>\n{% endif %}{% endfor %}" + ASKS
)
# Of lists of parts alone, as those of image models are.
OF_PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}<|end|>\n{% endfor %}" + ASKS
)
NOTHING_MARKED = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if 0 %}{% generation %}{% endgeneration %}{% endif %}"
)
MARKS_CHANGE = (
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{% endgeneration %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ x }}"
)
MARKED_TWICE = MARKED.replace(
    "{{ m.content }}<|end|>{% endgen", "{{ m.content }}{% endgeneration %}{% generation %}<|end|>{% endgen"
)
AS_JSON = PLAIN.replace("m.content", "m.content if m.content is string else m.content | tojson")
# A switch whose name holds that of a key, and a template that writes no thought, as that of DeepSeek R1.
SWITCHED = "{% set enable_thinking = true %}" + PLAIN
CUTS = PLAIN.replace("m.content", "m.content.split('</think>')[-1]")
# As templates of models that think, it asks with an open thought and writes earlier answers without one.
OPENS_A_THOUGHT = "%}<|assistant|>\n{% endif %}", "%}<|assistant|>\n<think>{% endif %}"
WITH_A_SYSTEM_PROMPT = (
    "{% if messages[0].role != 'system' %}<|system|>\nBe brief.<|end|>\n{% endif %}" + PLAIN
)


def learned(template: str, messages: list[Any], **kwargs: Any) -> str:
    tokenizer = make_tokenizer(template)
    ids, mask = encode_chat(tokenizer, messages, **kwargs)
    return str(tokenizer.decode(np.array(ids)[mask]))


def call(arguments: Any, name: str = "colour") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict[str, Any], content: str | None = "") -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def write(folder: Path, *records: Any) -> Path:
    file = folder / "a.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("talk", TALKS)
def test_the_loss_is_on_the_answers_and_their_end(template: str, talk: list[dict[str, str]]) -> None:
    tokenizer = make_tokenizer(template)
    ids, mask = encode_chat(tokenizer, talk)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(talk, tokenize=False)
    edges = np.flatnonzero(np.diff(np.r_[False, mask, False])).reshape(-1, 2).tolist()
    assert [tokenizer.decode(ids[start:stop]) for start, stop in edges] == [
        m["content"] + "<|end|>" for m in talk if m["role"] == "assistant"
    ]


def test_a_tokenizer_that_writes_first_words_otherwise_is_followed() -> None:
    class PutsABlankFirst:
        """Like sentencepiece: a text alone begins with a blank that it has not inside another."""

        def __init__(self) -> None:
            self._inner = make_tokenizer(PLAIN)
            self.chat_template = PLAIN
            self.eos_token_id = self._inner.eos_token_id
            self.apply_chat_template = self._inner.apply_chat_template
            self.get_chat_template = self._inner.get_chat_template

        def __call__(self, text: str, **kwargs: Any) -> Any:
            return self._inner(" " + text, **kwargs)

    ids, mask = encode_chat(PutsABlankFirst(), TALKS[1])
    assert make_tokenizer().decode(np.array(ids)[mask]) == "Blue.<|end|>Red, or green.<|end|>"


def test_eos_that_is_also_pad_is_a_target(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.eos_token_id == tokenizer.pad_token_id
    file = write(tmp_path, *({"messages": talk} for talk in TALKS))
    data = THDDataModule(file, capacity=256, tokenizer=tokenizer)
    data.setup("fit")
    [batch] = data.train_dataloader()
    assert isinstance(batch, THDBatch)
    ends = int((batch.targets == tokenizer.eos_token_id).sum())
    assert ends == sum(m["role"] == "assistant" for talk in TALKS for m in talk)
    expected = sum(int(encode_chat(tokenizer, talk)[1].sum()) for talk in TALKS)
    assert batch.loss_tokens == expected
    assert batch.loss_scale == 1 / expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_prompts_and_completions(tmp_path: Path, num_workers: int) -> None:
    tokenizer = make_tokenizer(None)
    record = {"prompt": "two plus two is", "completion": " four"}
    file = write(tmp_path, record, {"prompt": "", "completion": "x"})
    store: Any = open_source(file, tokenizer=tokenizer, num_workers=num_workers)
    before = tokenizer("two plus two is")["input_ids"]
    after = tokenizer(" four")["input_ids"]
    end = tokenizer.eos_token_id
    assert store[0]["input_ids"].tolist() == [*before, *after, end]
    assert store[0]["labels"].tolist() == [*[-100] * len(before), *after, end]
    assert store[1]["labels"].tolist() == [*tokenizer("x")["input_ids"], end]
    assert store.loss_tokens.tolist() == [len(after) + 1, 1]
    assert open_source(file)[0]["input_ids"].tolist() == [*b"two plus two is four", 257]  # EOS at the end
    added: Any = open_source(file, tokenizer=lambda text: [1, *text.encode(), 2])  # BOS, EOS; no eos_token_id
    assert added[0]["input_ids"].tolist() == [1, *b"two plus two is four", 2]


@pytest.mark.parametrize("asked", ["two plus", "two plus "])
def test_a_completion_begins_without_the_blank_that_a_tokenizer_puts_before_a_text(asked: str) -> None:
    """Tokenizers of the kind of sentencepiece do, those of Llama 2 and Mistral among them."""
    inner = Tokenizer(models.BPE({sign: i for i, sign in enumerate(dict.fromkeys("\u2581\natwoplusfr"))}, []))
    blank = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    inner.normalizer = normalizers.Sequence(blank)
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    record = {"prompt": asked, "completion": "four"}
    rows = Encoder(tokenizer=tokenizer, kind="prompt").encode([("a", record)])
    assert tokenizer.decode(rows.tokens) == f"{asked}four</s>"


def test_documents_and_completions_end_with_eos_once() -> None:
    tokenizer = make_tokenizer(None)
    end = tokenizer.eos_token_id

    def ids(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    texts = [("a", "blue and red"), ("b", "four<|end|>")]
    ended = Encoder(tokenizer=tokenizer, kind="text").encode(texts)
    assert ended.tokens.tolist() == [*ids("blue and red"), end, *ids("four"), end]
    as_it_is = Encoder(tokenizer=tokenizer, kind="text", append_eos=False).encode(texts)
    assert as_it_is.lengths[0] == ended.lengths[0] - 1
    record = {"prompt": "two<|end|>", "completion": "four"}
    rows = Encoder(tokenizer=tokenizer, kind="prompt").encode([("a", record)])
    assert rows.tokens.tolist() == [*ids("two<|end|>"), *ids("four"), end]  # the prompt's own end stays
    adds = ByT5Tokenizer()  # an end to the prompt, too
    rows = Encoder(tokenizer=adds, kind="prompt").encode([("a", {"prompt": "ab", "completion": "c"})])
    bare = [adds(text, add_special_tokens=False)["input_ids"] for text in ("ab", "c")]
    assert rows.tokens.tolist() == [*bare[0], *bare[1], adds.eos_token_id]


def test_another_tokenizer_has_another_fingerprint() -> None:
    splits = make_tokenizer(PLAIN)
    splits.split_special_tokens = True
    fingerprints = [
        tokenizer_fingerprint(one) for one in (make_tokenizer(PLAIN), make_tokenizer(MARKED), splits)
    ]
    assert len({*fingerprints, tokenizer_fingerprint(make_tokenizer(PLAIN))}) == 3
    padded = make_tokenizer(PLAIN)
    padded(["some", "text"], padding=True, truncation=True, max_length=1)  # its state stays in the tokenizer
    assert tokenizer_fingerprint(padded) == fingerprints[0]
    assert tokenizer_fingerprint(lambda text: [1]) is None


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"instruction": "Hi", "input": "", "output": "Hello"},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {
            "prompt": [{"role": "user", "content": "Hi"}],
            "completion": [{"role": "assistant", "content": "Hello"}],
        },
    ],
)
def test_conversations_of_every_kind_become_the_same_ids(tmp_path: Path, record: dict[str, Any]) -> None:
    tokenizer = make_tokenizer()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    row = open_source(write(tmp_path, record), tokenizer=tokenizer)[0]
    assert row["input_ids"].tolist() == tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]
    answer = tokenizer("Hello<|end|>", add_special_tokens=False)["input_ids"]
    assert [label for label in row["labels"].tolist() if label != -100] == answer


@pytest.mark.parametrize(("before", "after"), [(" ", "\n"), ("\n \n", "\n"), ("", " \n\n")])
def test_markers_with_blanks_at_their_edges(before: str, after: str) -> None:
    """The tokenizer has no token for blanks and line ends."""
    words = ["[UNK]", "user", "assistant", "hello", "there", "good", "bye", "end", "what", "now", ":"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} :{% if m.role == 'assistant' %}{% generation %}{{ '"
        + repr(before)[1:-1]
        + "' }}{{ m.content }} end{{ '"
        + repr(after)[1:-1]
        + "' }}{% endgeneration %}{% else %} {{ m.content }} end\n{% endif %}{% endfor %}"
    )
    said = ("user", "hello there"), ("assistant", "good"), ("user", "what now"), ("assistant", "bye")
    ids, mask = encode_chat(tokenizer, [{"role": role, "content": words} for role, words in said])
    assert np.array(tokenizer.convert_ids_to_tokens(ids))[mask].tolist() == ["good", "end", "bye", "end"]


@pytest.mark.parametrize(
    "tags", ["{%- generation -%} {}{%- endgeneration -%}", "{% generation %}\n{}{% endgeneration %}\n"]
)
def test_markers_that_take_blanks_away(tags: str) -> None:
    begin, end = tags.split("{}")
    template = (
        "{% for m in messages %}<|{{ m.role }}|>\n  "
        "{% if m.role == 'assistant' %}" + begin + "{{ m.content }}<|end|>" + end + "{% else %}"
        "{{ m.content }}<|end|>{% endif %}{{ '\n' }}{% endfor %}"
    )
    tokenizer = make_tokenizer(template)
    encoded = tokenizer.apply_chat_template(
        TALKS[1], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = encode_chat(tokenizer, TALKS[1])
    assert ids == encoded["input_ids"]
    assert mask.tolist() == [bool(learned) for learned in encoded["assistant_masks"]]
    assert mask.any()


def test_marks_tell_where_a_prompt_ends_if_the_template_opens_a_thought_of_its_own() -> None:
    opens = MARKED.replace(*OPENS_A_THOUGHT)
    talk = [USER, ANSWER, {**USER, "content": "And two?"}, {**ANSWER, "content": "four"}]
    assert learned(opens, talk, skip=3) == "four<|end|>"
    assert learned(opens, talk, skip=1) == "It is blue.<|end|>four<|end|>"
    with pytest.raises(
        ValueError, match="marks 4 parts for 2 messages of the assistant. Mark each message once"
    ):
        learned(MARKED_TWICE, talk, skip=3)


def test_marks_may_leave_thoughts_out_of_earlier_turns() -> None:
    last = MARKED.replace(
        "{{ m.content }}<|end|>{% endg", "{{ m.thinking if loop.last }}{{ m.content }}{% endg"
    )
    answers = [{**ANSWER, "thinking": "Hm.", "content": "two"}, {**ANSWER, "thinking": "Oh.", "content": "4"}]
    assert learned(last, [USER, answers[0], USER, answers[1]]) == "twoOh.4"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("key", [("weight", 0.0), ("train", False), ("loss", False)])
def test_messages_that_are_not_to_be_learned(template: str, key: tuple[str, Any], tmp_path: Path) -> None:
    tokenizer = make_tokenizer(template)
    talk: list[dict[str, Any]] = [dict(message) for message in TALKS[1]]
    whole, _ = encode_chat(tokenizer, talk)
    talk[2][key[0]] = key[1]
    talk[4][key[0]] = 1
    ids, mask = encode_chat(tokenizer, talk)
    assert list(ids) == list(whole)
    assert tokenizer.decode(np.array(ids)[mask]) == "Red, or green.<|end|>"
    turns = [{**m, "from": m["role"], "value": m["content"]} for m in talk]
    turns = [{name: x for name, x in turn.items() if name not in ("role", "content")} for turn in turns]
    row = open_source(write(tmp_path, {"conversations": turns}), tokenizer=tokenizer)[0]
    assert tokenizer.decode(row["labels"][row["labels"] >= 0]) == "Red, or green.<|end|>"


@pytest.mark.parametrize("template", [PLAIN, WITH_A_SYSTEM_PROMPT, WITH_A_SYSTEM_PROMPT.replace(ASKS, "")])
def test_an_answer_that_comes_first(template: str) -> None:
    # without ASKS the template says nothing of where an answer begins
    header = "" if ASKS in template else "<|assistant|>\n"
    parts = [{"type": "text", "text": "a"}]
    of_parts = template.replace("m.content", "(m.content if m.content is string else m.content[0].text)")
    assert learned(of_parts, [{**ANSWER, "content": parts}, USER]) == "a<|end|>"
    for words in ("It is blue.", "a"):  # the header holds the second, too
        talk = [{**ANSWER, "content": words}, USER, {**ANSWER, "content": "four"}]
        assert learned(template, talk) == f"{words}<|end|>{header}four<|end|>"


def test_an_eos_inside_a_turn_hides_nothing_behind_it() -> None:
    for eos, ends in (("<|end|>", "<|end|>"), ("<|system|>", "<|end|>\n")):
        tokenizer = make_tokenizer(PLAIN)
        tokenizer.eos_token = eos
        ids, mask = encode_chat(tokenizer, [USER, {**ANSWER, "content": f"four{eos}red"}])
        assert tokenizer.decode(np.array(ids)[mask]) == f"four{eos}red{ends}"
    thinks = PLAIN.replace(
        "{{ m.content }}", "{% if m.reasoning %}{{ m.reasoning }}<|end|>{% endif %}{{ m.content }}"
    )
    talk = [USER, {**ANSWER, "reasoning": "Hm.", "content": "Red."}]
    assert learned(thinks, talk) == "Hm.<|end|>Red.<|end|>"
    assert learned(thinks.replace("{{ m.content }}<|end|>", "{{ m.content }}"), talk) == "Hm.<|end|>Red.\n"
    assert learned(PLAIN.replace("<|end|>\n", "<|end|>\n---\n"), [USER, ANSWER]) == "It is blue.<|end|>"
    assert learned(PLAIN, [USER, {**ANSWER, "reasoning_content": ""}]) == "It is blue.<|end|>"


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
    messages = [USER, calling(call(arguments)), RESULT, ANSWER]
    assert learned(CALLING, messages) == learned(CALLING, [USER, calling(call(read)), RESULT, ANSWER])
    assert json.dumps(read, ensure_ascii=False) in learned(CALLING, messages)
    needs_a_dict = CALLING.replace("call.arguments | tojson", "call.arguments | items | list")
    assert str([*read.items()]) in learned(needs_a_dict, messages)
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == arguments  # the record is left as it was
    takes_strings = CALLING.replace("call.arguments | tojson", "call.arguments")
    as_it_is = f'{{"name": "colour", "arguments": {arguments}}}<|end|>'
    assert learned(takes_strings, [USER, calling(call(arguments))]) == as_it_is


THINKS = PLAIN.replace(
    "<|assistant|>\n", "<|assistant|>\n{% if enable_thinking %}<think>{% endif %}"
).replace(
    "{{ m.content }}",
    "{% if enable_thinking and m.role == 'assistant' %}<think>hm</think>{% endif %}{{ m.content }}",
)
TURNS = [{"from": "human", "value": "What colour?"}, {"from": "gpt", "value": "It is blue."}]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER, ANSWER]},
        {"prompt": TURNS[:1], "completion": TURNS[1:]},  # of from and value there, too
        {"conversations": TURNS},
    ],
)
def test_variables_of_the_template_beside_a_conversation(tmp_path: Path, record: dict[str, Any]) -> None:
    tokenizer = make_tokenizer(THINKS)
    options = ['{"enable_thinking": true}', {"enable_thinking": False}, None]  # the first as a CSV has it
    file = write(tmp_path, *({**record, "chat_template_kwargs": one} for one in options))
    rows: Any = open_source(file, tokenizer=tokenizer)
    said = [tokenizer.decode(row["labels"][row["labels"] >= 0]) for row in rows]
    assert said == ["hm</think>It is blue.<|end|>", *["It is blue.<|end|>"] * 2]


@pytest.mark.parametrize("kind", ["rows", "parquet", "iterable", "stream of parquet", "generator"])
def test_null_keys_that_columns_of_structs_add_are_not_learned(tmp_path: Path, kind: str) -> None:
    """Arrow gives every call the arguments of all calls, and every tool the parameters of all, null."""
    datasets = pytest.importorskip("datasets")
    pa = pytest.importorskip("pyarrow.parquet")
    # Their keys are in alphabetical order, to which older releases of pyarrow sort them.
    records = [
        {"messages": [USER, calling(call({"of": "sky"}))], "tools": [{"name": "colour", "p": 1}]},
        {"messages": [USER, calling(call({"depth": 3}, "depth"))], "tools": [{"name": "depth", "q": 2}]},
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
    data.setup("fit")
    sequences = [ids for b in data.train_dataloader() for ids in b.unpack(b.input_ids)]
    expected = [encode_chat(tokenizer, r["messages"], tools=r["tools"])[0] for r in records]

    assert sorted(ids.tolist() for ids in sequences) == sorted(expected)


@pytest.mark.parametrize("kind", ["rows", "parquet", "iterable", "stream of parquet", "csv"])
def test_nulls_and_mixed_values_under_a_type_of_json_are_learned(tmp_path: Path, kind: str) -> None:
    """In this type `datasets` reads JSON lines whose arguments differ, and writes it to files as JSON."""
    datasets = pytest.importorskip("datasets")
    said = [{"of": None, "n": [1, {"x": None}]}, {"of": "sky", "n": 3}]
    records = [{"messages": [USER, calling(call(x))], "tools": [{"name": "colour"}]} for x in said]
    file = write(tmp_path, *records)
    made = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path))
    form = "csv" if kind == "csv" else "parquet"
    name = str(tmp_path / f"b.{form}")
    if kind == "csv":
        made = datasets.Dataset.from_list([{key: json.dumps(x) for key, x in r.items()} for r in records])
    getattr(made, f"to_{form}")(name)
    source = {"rows": made, "iterable": made.to_iterable_dataset(), "stream of parquet": Stream(name)}
    tokenizer = make_tokenizer("{% if tools %}{{ tools | tojson }}{% endif %}" + CALLING)
    data = THDDataModule(
        source.get(kind, name), tokenizer=tokenizer, capacity=512, global_batch=Packs(1), cache_dir=tmp_path
    )
    data.setup("fit")
    sequences = [ids.tolist() for b in data.train_dataloader() for ids in b.unpack(b.input_ids)]
    expected = [encode_chat(tokenizer, r["messages"], tools=r["tools"])[0] for r in records]

    assert sorted(sequences) == sorted(expected)


def talk(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


ALPACA = {"instruction": "a", "output": "b"}
CALLS_ALONE = CALLING.replace("m.content or ''", "m.content if not m.tool_calls")  # as that of Llama 3.1
ONE_CALL = CALLING.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
TWO_CALLS = calling(call({"of": "sky"}), call({"of": "sea"}, "depth"))
REFUSED: list[tuple[str | None, Any, str]] = [
    # templates
    (None, talk(*TALKS[0]), r"line 1: conversations need a tokenizer with a chat template"),
    (UNSTABLE, talk(*TALKS[1]), r"writes the turns up to message 2 differently when more follow"),
    (GLUED, talk(USER, ANSWER), "crosses the edge of an answer"),
    ("{{ raise_exception('roles') }}", talk(USER, ANSWER), "line 1: .*roles"),
    (MARKS_CHANGE, talk(USER, ANSWER), "writes another text when its {% generation %} markers"),
    (NOTHING_MARKED, talk(USER, ANSWER), r"template marks no text of the conversation with \{% generation"),
    (MARKED_TWICE, talk(USER, ANSWER, USER, {**ANSWER, "weight": 0}), "marks 4 parts for 2 messages"),
    (PLAIN.replace(*OPENS_A_THOUGHT), talk(USER, ANSWER), "ends a prompt for message 1 with '.*<think>'"),
    (KNOWN_ROLES, talk({**USER, "role": "Human"}, ANSWER), "leaves out message 0 of the role 'Human', which"),
    (OF_PARTS, talk(USER, ANSWER), "leaves out message 0 of the role 'user', which says 'What colour"),
    (PLAIN, talk({**USER, "content": [{"type": "text", "text": "Hi"}]}, ANSWER), "message 0 as code"),
    (AS_JSON, talk({**USER, "content": [{"type": "text", "text": "Hi"}]}, ANSWER), "message 0 as code"),
    (
        PLAIN,
        talk(USER, {**ANSWER, "reasoning_content": "Hm."}),
        "message 1 has thoughts under 'reasoning_content'",
    ),
    (SWITCHED, talk(USER, {**ANSWER, "thinking": "Hm."}), "message 1 has thoughts under 'thinking', which"),
    (
        CUTS,
        talk(USER, {**ANSWER, "content": "<think>Hm.</think>4"}),
        "message 1 has thoughts before </think>",
    ),
    (SWITCHED, talk(USER, ANSWER, chat_template_kwargs={"thinking": 1}), "'thinking', which the chat"),
    (
        KNOWN_ROLES,
        talk(USER, ANSWER, {**USER, "role": "tool", "content": "is"}, ANSWER),
        "leaves out message 2",
    ),
    (PLAIN, talk(USER, ANSWER, tools=[{"name": "colour"}]), "the chat template leaves out the tools"),
    (
        PLAIN.replace("<|end|>\n", ""),
        talk(USER, ANSWER),
        "nothing behind the answer 'It is blue.', so its end",
    ),
    (
        CALLS_ALONE,
        talk(USER, {**TWO_CALLS, "content": "I look."}),
        "message 1 of the role 'assistant', which says",
    ),
    (PLAIN, talk(USER, TWO_CALLS), "leaves out the call of 'colour' in message 1"),
    (MARKED, talk(USER, TWO_CALLS, RESULT, ANSWER), "leaves out the call of 'colour' in message 1"),
    (ONE_CALL, talk(USER, TWO_CALLS, RESULT, ANSWER), "leaves out the call of 'depth' in message 1"),
    (PLAIN, talk(USER, ANSWER, chat_template_kwargs={"enable_thinkin": 1}), "'enable_thinkin', which the"),
    (
        PLAIN,
        talk(USER, ANSWER, chat_template_kwargs={"tokenize": True}),
        "'tokenize', which the chat template does not",
    ),
    # what is learned
    (PLAIN, talk(USER), r"no learned message of the role 'assistant' among \['user'\]"),
    (PLAIN, talk(USER, {**ANSWER, "weight": 0.5}), "has weight=0.5; wanted 0 or 1"),
    (PLAIN, talk(USER, {**ANSWER, "train": False}), "no learned message of the role 'assistant'"),
    (PLAIN, {"prompt": "a", "completion": "b", "label": False}, r"a label of true or false .*\(KTO\)"),
    # records
    (PLAIN, talk(USER, ANSWER, images=["a.png"]), "'images' was found: images need"),
    (None, {"text": "a", "images": ["a.png"]}, "'images' was found: images need"),
    (PLAIN, talk(USER, ANSWER, audio=["a.wav"]), "'audio' was found: audio cannot be packed"),
    (PLAIN, talk({**USER, "content": [{"type": "audio"}]}, ANSWER), "part of type 'audio'"),
    (PLAIN, talk({**USER, "content": [{"type": "text"}]}, ANSWER), "holds no string under 'text'"),
    (PLAIN, talk({**USER, "content": 5}, ANSWER), "message of the role 'user' has the content 5;"),
    (PLAIN, talk(USER, {**ANSWER, "content": None}), "the role 'assistant' has the content None;"),
    (PLAIN, talk(USER, {**ANSWER, "function_call": {"name": "f"}}), "function_call, which is not read"),
    (
        CALLING,
        talk(USER, {**ANSWER, "tool_calls": "[{}]"}),
        r"tool_calls is '\[\{\}\]'; wanted a list of dicts",
    ),
    (PLAIN, talk(USER, ANSWER, system="a"), "'system' is beside messages"),
    (PLAIN, {"prompt": [USER], "completion": [ANSWER], "system": "a"}, "'system' is beside messages"),
    (
        PLAIN,
        {"prompt": "a", "completion": "b", "tools": [{"name": "f"}]},
        "'tools' beside a prompt would be left out",
    ),
    (None, {**ALPACA, "system": "x"}, "'system' beside a prompt would be left out"),
    (
        PLAIN,
        talk(USER, ANSWER, tools="no"),
        "tools must be a list, and chat_template_kwargs a dict, or JSON of them",
    ),
    (PLAIN, {"messages": "hello"}, "the messages are 'hello'; wanted a list of"),
    (PLAIN, {"prompt": "a", "completion": [USER]}, "prompt and completion must be two strings"),
    (PLAIN, {"conversations": [TURNS[0], {**TURNS[1], "reasoning": "Hm."}]}, "thoughts under 'reasoning'"),
    (
        PLAIN,
        talk(USER, ANSWER, chat_template_kwargs="no"),
        "and chat_template_kwargs a dict, or JSON of them",
    ),
    (PLAIN, {"conversations": []}, "conversations must be a list of"),
    (PLAIN, {"conversation": []}, "conversation must be a list of"),
    (PLAIN, {"conversations": [{"from": "alien", "value": "a"}]}, "a turn is from 'alien'"),
    (PLAIN, {**ALPACA, "input": 3}, "instruction, input and output must be strings"),
    (PLAIN, {**ALPACA, "history": [["q", "a"]]}, "'history' is not read"),
    (PLAIN, {**ALPACA, "system": ["x"]}, "system is a list; wanted a string"),
]


@pytest.mark.parametrize(("template", "record", "message"), REFUSED)
def test_what_cannot_be_learned_as_meant_is_refused(
    tmp_path: Path, template: str | None, record: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_source(write(tmp_path, record), tokenizer=make_tokenizer(template))


def test_kinds_are_not_mixed(tmp_path: Path) -> None:
    file = write(tmp_path, {"prompt": "a", "completion": "b"}, {"text": "c"})
    with pytest.raises(ValueError, match=r"line 2: a record of kind 'text' among records of kind 'prompt'"):
        open_source(file)
