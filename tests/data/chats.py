"""Tokenizers with chat templates, trained here on local text, and a few conversations."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Calls of tools as Qwen 2.5 writes them, who takes arguments to be a dict.
CALLING = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{% set call = call.function or call %}"
    '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}'
    "{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Reasoning is written in the last turn alone, as some families do.
UNSTABLE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if loop.last and m.role == 'assistant' %}<think>{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# No line break and no special token at the edge of the answer: a token may reach over it.
GLUED = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"

TALKS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is two plus two?"}, {"role": "assistant", "content": "It is four."}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Another one, please."},
        {"role": "assistant", "content": "Red, or green."},
    ],
    [
        {"role": "user", "content": "Say nothing.\n"},
        {"role": "assistant", "content": "  "},
        {"role": "user", "content": "Now \u00e9crivez."},
        {"role": "assistant", "content": "D'accord \u2014 voil\u00e0."},
    ],
]


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = [m["content"] for talk in TALKS for m in talk] * 3 + ["two plus two is four, blue and red"] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return str(tokenizer.to_str())


def make_tokenizer(template: str | None = PLAIN, **kwargs: Any) -> PreTrainedTokenizerFast:
    """EOS and pad are the same token, as in many models."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()), eos_token="<|end|>", pad_token="<|end|>", **kwargs
    )
    tokenizer.chat_template = template
    return tokenizer
