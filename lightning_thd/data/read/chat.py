"""A conversation and a tokenizer with a chat template -> ids, and which of them the assistant says.

A template with ``{% generation %}`` around the assistant's words marks them itself. With any other the
conversation is rendered once more up to each turn; that shows the assistant's part if the template is
prefix-stable: what it wrote of a turn does not change when more turns follow. What is not is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Message = dict[str, Any]


def encode_chat(
    tokenizer: Any, messages: Sequence[Message], *, tools: list[Any] | None = None, skip: int = 0
) -> tuple[list[int], NDArray[np.bool_]]:
    """Encode a conversation of ``role`` and ``content``; the first ``skip`` messages are a prompt.

    Returns:
        The ids ``[n]``, and bool ``[n]``, True where the assistant speaks: from the first token of its answer
        to the one that ends its turn.

    Raises:
        ValueError: for a tokenizer without a template, messages that are none, a conversation without an
            assistant, and a template whose assistant's part cannot be told apart.
    """
    _check(tokenizer, messages, skip)
    messages = list(messages)
    if _GENERATION.search(str(tokenizer.get_chat_template(tools=tools))):
        return _marked(tokenizer, messages, tools, skip)
    text = _render(tokenizer, messages, tools)
    bounds = [_turn(tokenizer, messages, i, text, tools) for i in _answers(messages, skip)]
    ids, cuts = _cut(tokenizer, text, sorted({edge for bound in bounds for edge in bound}))
    mask = np.zeros(len(ids), bool)
    for start, stop in bounds:
        first, last = cuts[start], cuts[stop]
        mask[first : _end_of_turn(ids, first, last, tokenizer.eos_token_id)] = True
    return ids, mask


def _check(tokenizer: Any, messages: object, skip: int) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"conversations need a tokenizer with a chat template, and {type(tokenizer).__name__} has none. "
            "Pass tokenizer=, the name of an instruction-tuned model or its tokenizer, or set its "
            "chat_template."
        )
    if (
        not isinstance(messages, list | tuple)
        or not messages
        or not all(isinstance(message, dict) and "role" in message for message in messages)
    ):
        raise ValueError("messages must be a list of {'role': ..., 'content': ...} with at least one entry.")
    for message in messages:
        content = message.get("content")
        _check_said(message, content)
        for part in content if isinstance(content, list) else []:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text":
                raise ValueError(
                    f"a message holds a part of type {kind!r}, and only text is tokenised here. Images and "
                    "video go through the model's processor, in a dataset of your own whose samples carry "
                    "pixel_values; audio cannot be packed."
                )
    if not _answers(messages, skip):
        raise ValueError(
            f"no message of the role 'assistant' was found among {[m['role'] for m in messages[skip:]]}, so "
            "there is nothing to learn. Remove the conversation."
        )


def _check_said(message: Message, content: object) -> None:
    """Refuse a message that a template would write as None, a number or a list."""
    role = message["role"]
    if not isinstance(role, str):
        raise ValueError(f"a message has the role {role!r}; wanted a string, as 'user'. Mend or remove it.")
    if content is None:  # as in a call of a tool, which says what it does under another key
        others = (message[key] for key in message.keys() - {"role", "name"})
        if any(hasattr(value, "__len__") and len(value) for value in others):
            return
    if not isinstance(content, str | list | dict):
        raise ValueError(
            f"a message of the role {role!r} has the content {content!r}; wanted a string, or a list of "
            "parts. Mend or remove it."
        )


def _answers(messages: Sequence[Message], skip: int) -> list[int]:
    return [i for i in range(skip, len(messages)) if messages[i]["role"] == "assistant"]


def _marked(
    tokenizer: Any, messages: list[Message], tools: list[Any] | None, skip: int
) -> tuple[list[int], NDArray[np.bool_]]:
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"the template marks {{% generation %}}, which only a fast tokenizer can follow, and "
            f"{type(tokenizer).__name__} is none. Take the markers out, or use the fast one."
        )
    encoded = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids: list[int] = encoded["input_ids"]
    mask = np.array(encoded["assistant_masks"], bool)
    if skip:
        text = _render(tokenizer, messages, tools)
        start, _ = _turn(tokenizer, messages, _answers(messages, skip)[0], text, tools)
        mask[: _cut(tokenizer, text, [start])[1][start]] = False
    if not mask.any():
        raise ValueError(
            "the chat template marked nothing of the conversation with {% generation %}. Put the markers "
            "around what the assistant says."
        )
    return ids, mask


def _render(tokenizer: Any, messages: list[Message], tools: list[Any] | None, *, prompt: bool = False) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompt
        )
    except Exception as err:  # templates refuse orders of roles in their own words, in jinja's exceptions
        raise ValueError(
            f"the chat template refuses the roles {[m['role'] for m in messages]} ({err}). Mend the "
            "conversation, or the template."
        ) from err
    return text


def _turn(
    tokenizer: Any, messages: list[Message], i: int, text: str, tools: list[Any] | None
) -> tuple[int, int]:
    """Return the first and last character of what the assistant says in message ``i`` of ``text``."""
    # Nothing can be rendered before the first message: the header of one counts as the assistant's.
    before = _render(tokenizer, messages[:i], tools, prompt=True) if i else ""
    after = _render(tokenizer, messages[: i + 1], tools)
    if not after.startswith(before) or not text.startswith(after):
        raise ValueError(
            f"the chat template writes the turns up to message {i} otherwise when more follow, so what the "
            "assistant says cannot be told apart (templates that drop earlier reasoning do so). Put "
            "{% generation %} and {% endgeneration %} around it in tokenizer.chat_template, or give one "
            "conversation for every answer."
        )
    return len(before), len(after)


def _cut(tokenizer: Any, text: str, edges: list[int]) -> tuple[list[int], dict[int, int]]:
    """Encode a text and return the token at which each character of ``edges`` begins.

    Pieces that are encoded alone and give the same ids show it in linear time. Tokenizers that write a first
    word in another way need the text up to each edge, which is also how the model will meet a prompt.
    """

    def encode(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False)["input_ids"])

    ids = encode(text)
    pieces = [encode(text[a:b]) for a, b in pairwise(sorted({0, *edges, len(text)}))]
    if [token for piece in pieces for token in piece] == ids:
        ends = np.cumsum([0, *map(len, pieces)]).tolist()
        return ids, dict(zip(sorted({0, *edges, len(text)}), ends, strict=True))
    cuts = {0: 0, len(text): len(ids)}
    for edge in edges:
        start = ids if edge == len(text) else encode(text[:edge])
        if ids[: len(start)] != start:
            raise ValueError(
                "a token reaches over the edge of the assistant's words, near "
                f"{text[max(0, edge - 12) :][:24]!r}. Let the template put a special token there."
            )
        cuts[edge] = len(start)
    return ids, cuts


def _end_of_turn(ids: list[int], first: int, last: int, eos: int | None) -> int:
    """Return the position after the end-of-turn token, which cuts off what the template adds behind it."""
    for at in range(last - 1, first - 1, -1):
        if ids[at] == eos:
            return at + 1
    return last
