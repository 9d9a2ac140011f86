"""Conversations and prompts: the loss is on what the assistant says, its last token included, and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from lightning_thd import THDBatch, THDDataModule
from lightning_thd.data.read.chat import encode_chat
from lightning_thd.data.read.encode import Encoder
from lightning_thd.data.read.text import tokenizer_fingerprint
from tests.data.chats import GLUED, MARKED, PLAIN, TALKS, UNSTABLE, make_tokenizer
from tests.data.support import open_source


def spoken(tokenizer: Any, ids: list[int], mask: np.ndarray) -> list[str]:
    """Text of every run of tokens with a loss."""
    runs: list[list[int]] = []
    for at, (token, inside) in enumerate(zip(ids, mask, strict=True)):
        if inside:
            if not at or not mask[at - 1]:
                runs.append([])
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("talk", TALKS)
def test_the_loss_is_on_the_answers_and_their_end(template: str, talk: list[dict[str, str]]) -> None:
    tokenizer = make_tokenizer(template)
    ids, mask = encode_chat(tokenizer, talk)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(talk, tokenize=False)
    assert spoken(tokenizer, ids, mask) == [
        m["content"] + "<|end|>" for m in talk if m["role"] == "assistant"
    ]


def test_a_tokenizer_that_writes_first_words_otherwise_is_followed() -> None:
    class PutsABlankFirst:
        """Like sentencepiece: a text alone begins with a blank that it has not inside another."""

        def __init__(self) -> None:
            self._inner = make_tokenizer(PLAIN)
            self.chat_template, self.eos_token_id = PLAIN, self._inner.eos_token_id
            self.apply_chat_template = self._inner.apply_chat_template
            self.get_chat_template = self._inner.get_chat_template

        def __call__(self, text: str, **kwargs: Any) -> Any:
            return self._inner(" " + text, **kwargs)

    ids, mask = encode_chat(PutsABlankFirst(), TALKS[1])
    assert spoken(make_tokenizer(), ids, mask) == ["Blue.<|end|>", "Red, or green.<|end|>"]


def test_eos_that_is_also_pad_is_a_target(tmp_path: Path) -> None:
    file = tmp_path / "talks.jsonl"
    file.write_text("\n".join(json.dumps({"messages": talk}) for talk in TALKS))
    tokenizer = make_tokenizer()
    assert tokenizer.eos_token_id == tokenizer.pad_token_id
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
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"prompt": "two plus two is", "completion": " four"}\n{"prompt": "", "completion": "x"}\n'
    )
    store = open_source(file, tokenizer=tokenizer, num_workers=num_workers)
    before, after = tokenizer("two plus two is")["input_ids"], tokenizer(" four")["input_ids"]
    end = tokenizer.eos_token_id
    assert store[0]["input_ids"].tolist() == [*before, *after, end]
    assert store[0]["labels"].tolist() == [*[-100] * len(before), *after, end]
    assert store[1]["labels"].tolist() == [*tokenizer("x")["input_ids"], end]
    assert store.loss_tokens.tolist() == [len(after) + 1, 1]  # type: ignore[attr-defined]
    own = open_source(file)  # bytes: EOS at the end, none between
    assert own[0]["input_ids"].tolist() == [*b"two plus two is four", 257]


def test_documents_end_with_eos_once() -> None:
    tokenizer = make_tokenizer(None)
    texts = [("a", "blue and red"), ("b", "four<|end|>")]
    ended = Encoder(tokenizer=tokenizer, kind="text").encode(texts)
    assert ended.tokens.tolist() == [
        *tokenizer("blue and red")["input_ids"],
        tokenizer.eos_token_id,
        *tokenizer("four")["input_ids"],
        tokenizer.eos_token_id,
    ]
    as_it_is = Encoder(tokenizer=tokenizer, kind="text", append_eos=False).encode(texts)
    assert as_it_is.lengths[0] == ended.lengths[0] - 1


def test_another_template_is_another_fingerprint() -> None:
    assert tokenizer_fingerprint(make_tokenizer(PLAIN)) == tokenizer_fingerprint(make_tokenizer(PLAIN))
    assert tokenizer_fingerprint(make_tokenizer(PLAIN)) != tokenizer_fingerprint(make_tokenizer(MARKED))
    assert tokenizer_fingerprint(lambda text: [1]) is None


USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}


@pytest.mark.parametrize(
    ("template", "record", "message"),
    [
        (None, {"messages": TALKS[0]}, r"line 1: conversations need a tokenizer with a chat template"),
        (UNSTABLE, {"messages": TALKS[1]}, r"writes the turns up to message 2 otherwise when more follow"),
        (GLUED, {"messages": [USER, ANSWER]}, "cannot be told apart|reaches over the edge"),
        (PLAIN, {"messages": [USER]}, r"no message of the role 'assistant' was found among \['user'\]"),
        (PLAIN, {"messages": "hello"}, "messages must be a list of"),
        (PLAIN, {"messages": [USER, ANSWER], "images": ["a.png"]}, "'images' was found: images go"),
        (PLAIN, {"messages": [USER, ANSWER], "audio": ["a.wav"]}, "'audio' was found: audio cannot be"),
        (
            PLAIN,
            {"messages": [{"role": "user", "content": [{"type": "audio"}]}, ANSWER]},
            "part of type 'audio'",
        ),
        (PLAIN, {"prompt": "a", "completion": [USER]}, "prompt and completion are str and list"),
        (PLAIN, {"conversations": []}, "conversations must be a list of"),
        ("{{ raise_exception('roles') }}", {"messages": [USER, ANSWER]}, "line 1: .*roles"),
    ],
)
def test_bad_conversations_are_refused(tmp_path: Path, template: Any, record: Any, message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=message):
        open_source(file, tokenizer=make_tokenizer(template))


def test_kinds_are_not_mixed(tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n{"text": "c"}\n')
    with pytest.raises(ValueError, match=r"line 2: a record of kind 'text' among those of kind 'prompt'"):
        open_source(file)
