"""A document tokenised in pieces has the ids that it has when it is tokenised whole."""

from __future__ import annotations

import random

import pytest
from transformers import PreTrainedTokenizerFast

from lightning_thd.data import stdlib_documents
from lightning_thd.data.read.long_text import encode_long
from tests.data.chats import make_tokenizer


@pytest.mark.parametrize("piece", [700, 5_000, 40_000])
def test_pieces_give_the_same_ids(piece: int) -> None:
    tokenizer: PreTrainedTokenizerFast = make_tokenizer(None)
    documents = stdlib_documents(max_bytes=4_000)
    random.Random(0).shuffle(documents)
    text = "\n".join(documents)[:150_000]
    found = encode_long(tokenizer, text, piece=piece, overlap=400)
    assert found.tolist() == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("text", ["a" * 9_000, "ab " * 3_000, "\u4e00\U0001f600" * 3_000, " \n" * 5_000])
def test_texts_without_a_place_to_cut(text: str) -> None:
    tokenizer = make_tokenizer(None)
    assert encode_long(tokenizer, text, piece=1_000, overlap=200).tolist() == tokenizer(text)["input_ids"]
