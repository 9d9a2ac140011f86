from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lightning_thd.data.read.encode import _lists_of_ids

TEXTS = ["a b c", "", "<s> a <e>", "a\u00e9 \U0001f600  b\n", "c " * 500, "zz"]


def fast(cls: Any = PreTrainedTokenizerFast, **named: Any) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = cls(tokenizer_object=backend, bos_token="<s>", eos_token="<e>", **named)
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.bos_token_id)]
    )
    return made


def called(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return [tokenizer(text)["input_ids"] for text in texts]


@pytest.mark.parametrize("named", [{}, {"split_special_tokens": True}])
def test_ids_are_those_of_the_call(named: dict[str, Any]) -> None:
    wanted = called(fast(**named), TEXTS)
    assert _lists_of_ids(fast(**named), TEXTS) == wanted
    assert _lists_of_ids(fast(**named), TEXTS[:1]) == wanted[:1]


def test_an_earlier_truncation_and_padding_is_not_kept() -> None:
    tokenizer = fast(pad_token="<e>")
    tokenizer(TEXTS, truncation=True, max_length=3, padding=True)
    wanted = called(fast(), TEXTS)
    assert _lists_of_ids(tokenizer, TEXTS) == wanted
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert _lists_of_ids(tokenizer, TEXTS) == wanted


def test_a_call_of_its_own_is_called() -> None:
    class Own(PreTrainedTokenizerFast):  # type: ignore[misc]
        def __call__(self, text: Any, **named: Any) -> Any:
            texts = [text] if isinstance(text, str) else text
            return super().__call__([one.upper() for one in texts], **named)

    assert _lists_of_ids(fast(Own), TEXTS) == called(fast(), [text.upper() for text in TEXTS])
