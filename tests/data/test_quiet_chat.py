"""Conversations and tokenizers that trained on other tokens than they say, without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from lightning_thd.data.read.chat import encode_chat
from lightning_thd.data.read.encode import Encoder
from tests.data.chats import MARKED, PLAIN, TALKS, make_tokenizer
from tests.data.support import open_source

USER, ANSWER = {"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello to you"}
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


def _words() -> PreTrainedTokenizerFast:
    """A tokenizer that has no token for blanks and line ends."""
    words = ["[UNK]", "user", "assistant", "hello", "there", "good", "bye", "end", "what", "now", ":"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


@pytest.mark.parametrize(("before", "after"), [(" ", "\n"), ("\n \n", "\n"), ("", " \n\n")])
def test_markers_with_blanks_at_their_edges(before: str, after: str) -> None:
    tokenizer = _words()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} :{% if m.role == 'assistant' %}{% generation %}{{ '"
        + repr(before)[1:-1]
        + "' }}{{ m.content }} end{{ '"
        + repr(after)[1:-1]
        + "' }}{% endgeneration %}{% else %} {{ m.content }} end\n{% endif %}{% endfor %}"
    )
    talk = [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "good"},
        {"role": "user", "content": "what now"},
        {"role": "assistant", "content": "bye"},
    ]
    ids, mask = encode_chat(tokenizer, talk)
    assert np.array(tokenizer.convert_ids_to_tokens(ids))[mask].tolist() == ["good", "end", "bye", "end"]


@pytest.mark.parametrize(
    "tags",
    ["{%- generation -%} {}{%- endgeneration -%}", "{% generation %}\n{}{% endgeneration %}\n"],
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


def test_markers_that_change_what_is_written() -> None:
    template = (
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{% endgeneration %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ x }}"
    )
    with pytest.raises(ValueError, match="writes something else inside of {% generation %}"):
        encode_chat(make_tokenizer(template), [USER, ANSWER])


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("key", [("weight", 0), ("weight", 0.0), ("train", False), ("loss", False)])
def test_messages_that_are_not_to_be_learned(template: str, key: tuple[str, Any]) -> None:
    tokenizer = make_tokenizer(template)
    talk = [dict(message) for message in TALKS[1]]
    whole, _ = encode_chat(tokenizer, talk)
    talk[2][key[0]], talk[4][key[0]] = key[1], 1  # type: ignore[assignment]
    ids, mask = encode_chat(tokenizer, talk)
    assert list(ids) == list(whole)
    assert tokenizer.decode(np.array(ids)[mask]) == "Red, or green.<|end|>"


def test_turns_of_sharegpt_that_are_not_to_be_learned(tmp_path: Path) -> None:
    said = [("human", "a", 0), ("gpt", "four", 0), ("human", "b", 0), ("gpt", "red", 1)]
    turns = [{"from": who, "value": what, "weight": weight} for who, what, weight in said]
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"conversations": turns}))
    tokenizer = make_tokenizer(PLAIN)
    labels = open_source(file, tokenizer=tokenizer, cache_dir=tmp_path)[0]["labels"]
    assert tokenizer.decode(labels[labels >= 0]) == "red<|end|>"


@pytest.mark.parametrize(
    ("template", "messages", "why"),
    [
        (PLAIN, [USER, {**ANSWER, "weight": 0.5}], "has weight=0.5; wanted 0 or 1"),
        (PLAIN, [USER, {**ANSWER, "train": "no"}], "has train='no'; wanted 0 or 1"),
        (PLAIN, [USER, {**ANSWER, "train": False}], "no message of the role 'assistant' .* that is learned"),
        (
            PLAIN,
            [{**USER, "content": [{"type": "text", "text": "Hi"}]}, ANSWER],
            "writes the content of message 0 as Python does, .*Give the content as one string",
        ),
        (PLAIN, [{**USER, "content": {"a": 1}}, ANSWER], "the content of message 0 as Python does"),
        (PLAIN, [{**USER, "content": [{"type": "text"}]}, ANSWER], "holds no string under 'text'"),
        (NOTHING_MARKED, [USER, ANSWER], r"template marked nothing of the conversation with \{% generation"),
        (KNOWN_ROLES, [{**USER, "role": "Human"}, ANSWER], "leaves out message 0 of the role 'Human', which"),
        (OF_PARTS, [USER, ANSWER], "leaves out message 0 of the role 'user', which says 'Hi there'"),
        (
            MARKED.replace(
                "{{ m.content }}<|end|>{% endgen",
                "{{ m.content }}{% endgeneration %}{% generation %}<|end|>{% endgen",
            ),
            [USER, ANSWER, USER, {**ANSWER, "weight": 0}],
            "marks 4 parts with {% generation %}, and the assistant has 2 messages",
        ),
    ],
)
def test_what_a_template_does_not_write_as_meant(template: str, messages: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        encode_chat(make_tokenizer(template), messages)


WITH_A_SYSTEM_PROMPT = (
    "{% if messages[0].role != 'system' %}<|system|>\nBe brief.<|end|>\n{% endif %}" + PLAIN
)


@pytest.mark.parametrize("template", [PLAIN, WITH_A_SYSTEM_PROMPT, WITH_A_SYSTEM_PROMPT.replace(ASKS, "")])
def test_an_answer_that_comes_first(template: str) -> None:
    tokenizer = make_tokenizer(template)
    ids, mask = encode_chat(tokenizer, [ANSWER, USER, {**ANSWER, "content": "four"}])
    learned = tokenizer.decode(np.array(ids)[mask])
    if ASKS in template:
        assert learned == "Hello to you<|end|>four<|end|>"
    else:  # the template says nothing of where an answer begins
        assert learned == "Hello to you<|end|><|assistant|>\nfour<|end|>"


@pytest.mark.parametrize(("eos", "ends"), [("<|end|>", "<|end|>"), ("<|system|>", "<|end|>\n")])
def test_an_answer_that_holds_the_eos(eos: str, ends: str) -> None:
    tokenizer = make_tokenizer(PLAIN)
    tokenizer.eos_token = eos
    said = f"four{eos}red"
    ids, mask = encode_chat(tokenizer, [USER, {**ANSWER, "content": said}])
    assert tokenizer.decode(np.array(ids)[mask]) == said + ends


def test_completions_that_are_not_wanted_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "completion": "b", "label": false}\n')
    with pytest.raises(ValueError, match=r"line 1: a label of true or false beside a prompt .*\(KTO\)"):
        open_source(file, cache_dir=tmp_path)


def test_a_prompt_keeps_the_end_that_it_has_itself() -> None:
    tokenizer = make_tokenizer(None)
    record = {"prompt": "two<|end|>", "completion": "four"}
    rows = Encoder(tokenizer=tokenizer, kind="prompt").encode([("a", record)])
    end = tokenizer.eos_token_id
    before, after = tokenizer("two<|end|>")["input_ids"], tokenizer("four")["input_ids"]
    assert before[-1] == end
    assert rows.tokens.tolist() == [*before, *after, end]
    assert rows.labels is not None
    assert rows.labels.tolist() == [*[-100] * len(before), *after, end]


def test_a_prompt_loses_the_end_that_the_tokenizer_adds() -> None:
    tokenizer, prompt = ByT5Tokenizer(), "ab"
    end = tokenizer.eos_token_id
    bare = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    rows = Encoder(tokenizer=tokenizer, kind="prompt").encode([("a", {"prompt": prompt, "completion": "c"})])
    assert rows.tokens.tolist() == [*bare, *tokenizer("c", add_special_tokens=False)["input_ids"], end]


def test_a_tokenizer_that_splits_special_tokens_has_another_fingerprint(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "two<|end|>four"}\n')
    for splits in (False, True):
        tokenizer = make_tokenizer(None)
        tokenizer.split_special_tokens = splits
        row = open_source(file, tokenizer=tokenizer, cache_dir=tmp_path)[0]["input_ids"].tolist()
        assert row == [*tokenizer("two<|end|>four")["input_ids"], tokenizer.eos_token_id]
