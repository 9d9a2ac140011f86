"""A conversation and a tokenizer with a chat template -> ids, and a mask that is True for learned answers.

A template with ``{% generation %}`` marks the answers itself. With any other template, the conversation is
rendered again up to each answer. It is refused if the text up to an answer changes when more turns follow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_thd.data.read.conversations import calls_read
from lightning_thd.data.read.message_keys import (
    THOUGHTS,
    Message,
    check_part,
    check_role,
    is_empty,
    is_learned,
    unread,
    unread_error,
)

_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_THOUGHT_END = "</think>"  # ends the thoughts if they are in the content
# Keys of a tool's schema whose texts a template may leave out, because they are about its form.
_SCHEMA_FORM = ("type", "title", "format", "pattern", "default", "examples", "required", "$schema", "$ref")
Spans = list[tuple[int, int]]
Path = tuple[str | int, ...]  # keys and indices from the root of a conversation to one of its values


@dataclass(frozen=True, slots=True)
class ImagePlaceholders:
    """The placeholder that a template writes for an image, and the number of tokens of each image."""

    token: str
    counts: Sequence[int]

    def fill(self, text: str, messages: Sequence[Message]) -> str:
        """Repeat the placeholder in a rendered text, once for each token of an image."""
        pieces = text.split(self.token)
        wanted = sum(part.get("type") == "image" for message in messages for part in _parts(message))
        if len(pieces) != wanted + 1:
            raise ValueError(
                f"the template writes {len(pieces) - 1} times {self.token!r} for {wanted} images. "
                f"Remove {self.token!r} from the text, or take a template that writes one for each image."
            )
        filled = zip(pieces[1:], self.counts, strict=False)
        return pieces[0] + "".join(self.token * count + piece for piece, count in filled)


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


@dataclass(frozen=True, slots=True)
class _Renderer:
    tokenizer: Any
    tools: list[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    placeholders: ImagePlaceholders | None = None

    def render(
        self, messages: Sequence[Message], *, prompt: bool = False, template: str | None = None
    ) -> str:
        """Render messages, and with ``prompt`` the header of an answer; raise ValueError if that fails."""
        replaced = {} if template is None else {"chat_template": template}
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tools=self.tools,
                tokenize=False,
                add_generation_prompt=prompt,
                **replaced,
                **self.options,
            )
        except Exception as err:  # templates refuse orders of roles with jinja's exceptions
            raise ValueError(
                f"the template refuses {[m['role'] for m in messages]} ({err}). Fix the conversation."
            ) from err
        return text if self.placeholders is None else self.placeholders.fill(text, messages)


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: list[Any] | None = None,
    skip: int = 0,
    options: Mapping[str, Any] | None = None,
    placeholders: ImagePlaceholders | None = None,
) -> tuple[list[int], NDArray[np.bool_]]:
    """Encode messages with ``role`` and ``content``; those before number ``skip`` are not learned."""
    _check(tokenizer, messages, skip, images=placeholders is not None)
    renderer = _Renderer(tokenizer, tools, options or {}, placeholders)
    template = str(tokenizer.get_chat_template(tools=tools))
    marked = _GENERATION.search(template) is not None
    if marked and not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            "the template marks {% generation %}, which only a fast tokenizer can follow. Use the fast one."
        )
    if unread := [x for x in renderer.options if not re.search(rf"\b{re.escape(x)}\b", template)]:
        raise ValueError(
            f"chat_template_kwargs holds {unread[0]!r}, which the chat template does not read. "
            "Correct its name, or drop it."
        )
    messages, text = _rendered(renderer, list(messages))
    if "\0" in text:
        raise ValueError("the conversation has a null character (\\u0000), so it is not text. Remove it.")
    _refuse_lost_thoughts(renderer, messages, text)
    _refuse_unwritten(renderer, messages, text)
    for message in messages:
        check_role(message["role"])
    if marked:
        return _encode_marked(renderer, messages, text, template, skip)
    answers = _answers(messages, skip)
    bounds = [_answer_span(renderer, messages, i, text) for i in answers]
    ids, cuts = _encode_with_edges(tokenizer, text, sorted({edge for bound in bounds for edge in bound}))
    mask = np.zeros(len(ids), bool)
    for i, (start, stop) in zip(answers, bounds, strict=True):
        _refuse_no_end(messages[i], text[start:stop], ids[cuts[stop] - 1], tokenizer)
        first, turn = cuts[start], ids[cuts[start] : cuts[stop]]
        mask[first : first + _learned_tokens(turn, text[start:stop], messages[i], tokenizer)] = True
    return ids, mask


def _rendered(renderer: _Renderer, messages: list[Message]) -> tuple[list[Message], str]:
    """Render messages; return them as they were rendered, and the text.

    Many templates take the arguments of calls only as a dict, so JSON is parsed for them. Some templates
    write a null content as the word None, and others need the null to recognise a call.
    """
    blank = [{**m, "content": ""} if m.get("content") is None else m for m in messages]
    given_text, blank_text = "", ""
    with suppress(ValueError):
        given_text = renderer.render(messages)
    with suppress(ValueError):
        blank_text = given_text if blank == messages else renderer.render(blank)
    if blank_text and (not given_text or given_text.count("None") > blank_text.count("None")):
        messages, given_text = blank, blank_text

    read = [calls_read(message, given_text) for message in messages]
    if given_text and read == messages:
        return messages, given_text
    if not given_text and blank != messages:
        return _rendered(renderer, read) if read != messages else (blank, renderer.render(blank))
    return read, renderer.render(read)


def _refuse_no_end(message: Message, turn: str, last: int, tokenizer: Any) -> None:
    """Raise if an answer's turn ends with its own words and no special token, so that no end is learned."""
    content = next((part.get("text") for part in _parts(message)[-1:]), message.get("content"))
    words = content.strip() if isinstance(content, str) else ""
    if words and turn.endswith(words) and last not in tokenizer.all_special_ids:
        raise ValueError(
            f"the chat template writes nothing behind the answer {words[-24:]!r}, so its end would not be "
            "learned. Let it end answers with a token. See docs/reference/messages.md#chat-templates."
        )


def _learned_tokens(turn: list[int], text: str, message: Message, tokenizer: Any) -> int:
    """Return how many tokens of a turn are learned: those up to its last EOS, if that EOS ends the turn.

    What the template adds after that EOS is not learned. EOS tokens in the message's own text do not end the
    turn, nor does an EOS before words of the message. If no EOS ends the turn, all of it is learned.
    """
    eos = getattr(tokenizer, "eos_token", None)
    eos_in_message = str(message).count(eos) if eos else 0
    after_eos = [at + 1 for at, token in enumerate(turn) if token == tokenizer.eos_token_id]
    if len(after_eos) <= eos_in_message:
        return len(turn)
    text_after_eos = text.rpartition(eos)[2].strip() if eos else ""
    if text_after_eos and any(x in text_after_eos or text_after_eos in x for x in _words(message)):
        return len(turn)
    return after_eos[-1]


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value.strip():
        yield value.strip()
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _words(entry if key not in ("role", "type") else None)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _words(entry)


def _refuse_lost_thoughts(renderer: _Renderer, messages: list[Message], text: str) -> None:
    """Raise if the template leaves out a message's thoughts even if that message is the last one."""
    for i, message in enumerate(messages):
        content = message.get("content")
        begun, end, answer = str(content).rpartition(_THOUGHT_END)
        values = {name: message.get(name) for name in THOUGHTS}
        for name, value in {**values, "content": begun if isinstance(content, str) else None}.items():
            if all(words in text for words in _words(value)):
                continue
            other = f"{value} x{end}{answer}" if name == "content" else f"{value} x"
            last = renderer.render(messages[: i + 1])
            if _renders_alike(renderer, messages[: i + 1], i, {**message, name: other}, last):
                where = f"before {_THOUGHT_END}" if name == "content" else f"under {name!r}"
                raise ValueError(
                    f"message {i} has thoughts {where}, which the chat template does not write. "
                    "Take a template that writes them, or remove them."
                )


def _check(tokenizer: Any, messages: Sequence[Message], skip: int, *, images: bool = False) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "conversations need a tokenizer with a chat template, but this tokenizer has none. "
            "Pass tokenizer= of an instruction-tuned model, or set the tokenizer's chat_template."
        )
    for message in messages:
        _check_content(message, images)
    if not _answers(messages, skip):  # this also refuses masks that cannot be followed
        raise ValueError(
            f"no learned message of the role 'assistant' among {[m['role'] for m in messages]}. "
            "Remove the conversation."
        )


def _check_content(message: Message, images: bool) -> None:
    """Refuse ``function_call``, bad ``tool_calls``, missing or numeric content, and parts it cannot read."""
    role, content = message["role"], message.get("content")
    if message.get("function_call"):
        raise ValueError("a message has a function_call, which is not read. Give it as tool_calls.")
    calls = message.get("tool_calls")
    if calls and not (isinstance(calls, list | tuple) and all(isinstance(call, dict) for call in calls)):
        raise ValueError(f"tool_calls is {calls!r:.40}; wanted a list of dicts. Parse it, or remove it.")
    for call in calls or ():
        if not isinstance((call.get("function") or call).get("name"), str):
            raise ValueError(f"a call in tool_calls has no name: {call!r:.60}. Name the tool that it calls.")
        inner = call.get("function") or call
        if inner.get("arguments") is None and (other := unread(inner, "call")):
            raise unread_error(other, "call", f"the call of {inner['name']!r:.40}, which has no 'arguments',")
    # Without content, a message has calls or thoughts, or words under a key that is looked for in its text.
    if content is None and (calls or unread(message, "message") or any(map(message.get, THOUGHTS))):
        return
    if not isinstance(content, str | list | dict):
        raise ValueError(f"a message of the role {role!r} has the content {content!r}; wanted a string.")
    for part in _parts(message):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" and not (images and kind == "image"):
            raise ValueError(
                f"a message holds a part of type {kind!r}, but only text is tokenised here. "
                "Pass processor= for images."
            )
        if kind == "text" and not isinstance(part.get("text"), str):
            raise ValueError("a part of type 'text' holds no string under 'text'. Fix or remove it.")
        check_part(part)


def _answers(messages: Sequence[Message], skip: int) -> list[int]:
    """Return which messages are learned: those of the assistant after the prompt that no mask excludes."""
    return [
        i
        for i, message in enumerate(messages)
        if is_learned(message, answer=message["role"] == "assistant" and i >= skip)
    ]


def _refuse_unwritten(renderer: _Renderer, messages: list[Message], text: str) -> None:
    """Raise if the template leaves out a tool, a message or a part of one, or writes content as code."""
    if renderer.tools and replace(renderer, tools=None).render(messages) == text:
        raise ValueError(
            "the chat template leaves out the tools. Take a template that writes tools, or drop them."
        )
    for i, message in enumerate(messages):
        content, parts = message.get("content"), _parts(message)
        as_json = [json.dumps(part, ensure_ascii=False, default=str) for part in parts]
        values = [] if isinstance(content, str) else [*map(str, [*parts, content]), *as_json]
        if any(content and value in text for value in values):
            raise ValueError(
                f"the chat template writes the content of message {i} as code, because it takes only "
                "strings. Give the content as one string."
            )

    # A short word may be in the text by chance, so look for a sign that is added to each value.
    root = {"messages": messages, "tools": renderer.tools}
    claims = [*_claims_of_tools(renderer.tools), *_claims_of_messages(messages)]
    signs = [f" \ue000{number}\ue000" for number in range(len(claims))]
    all_signed, signed = root, ""
    for (path, _), sign in zip(claims, signs, strict=True):
        all_signed = _longer(all_signed, path, sign)
    with suppress(ValueError):
        signed = _render_root(renderer, all_signed)
    for (path, error), sign in zip(claims, signs, strict=True):
        if sign in signed:
            continue
        with suppress(_Refused):
            if _render_root(renderer, _longer(root, path, " x")) == text:
                raise error


class _Refused(ValueError):
    """A template refuses a changed conversation, so it does read what was changed."""


def _render_root(renderer: _Renderer, root: dict[str, Any]) -> str:
    try:
        return replace(renderer, tools=root["tools"]).render(root["messages"])
    except ValueError as err:
        raise _Refused(str(err)) from err


def _claims_of_messages(messages: list[Message]) -> Iterator[tuple[Path, ValueError]]:
    """Yield each value of the messages that must be in the text, and the error if it is not."""
    for i, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        for k, call in enumerate(calls):
            yield from _claims_of_call(call, ("messages", i, "tool_calls", k), i)

        content = message.get("content")
        values: list[tuple[Path, Any]] = [(("content",), content)]
        if isinstance(content, list):
            values = [(("content", j, "text"), part.get("text")) for j, part in enumerate(content)]
        for path, value in values:
            if isinstance(value, dict) or (isinstance(value, str) and value.strip()):
                yield (
                    ("messages", i, *path),
                    ValueError(
                        f"the chat template leaves out message {i} of the role {message['role']!r}, which "
                        f"says {value!r:.40}. See docs/reference/messages.md#chat-templates."
                    ),
                )

        for name in unread(message, "message"):
            if name == "name" and message["role"] in ("tool", "function"):
                continue  # the call before it has this name
            owner = f"message {i} of the role {message['role']!r}"
            yield ("messages", i, name), unread_error([name], "message", owner)


def _claims_of_call(call: dict[str, Any], path: Path, i: int) -> Iterator[tuple[Path, ValueError]]:
    inner = call
    if isinstance(call.get("function"), dict):
        for name in unread(call, "call"):
            yield (*path, name), unread_error([name], "call", f"a call in message {i}")
        inner, path = call["function"], (*path, "function")
    left_out = ValueError(
        f"the chat template leaves out the call of {inner['name']!r:.40} in message {i}. "
        "Take a template that writes tool_calls. See docs/reference/messages.md#chat-templates."
    )
    yield (*path, "name"), left_out
    if not is_empty(inner.get("arguments")):
        yield (*path, "arguments"), left_out
    for name in unread(inner, "call"):
        yield (*path, name), unread_error([name], "call", f"the call of {inner['name']!r:.40} in message {i}")


def _claims_of_tools(tools: list[Any] | None) -> Iterator[tuple[Path, ValueError]]:
    for i, tool in enumerate(tools or ()):
        for path, value in _texts_of_tool(tool, ("tools", i)):
            yield (
                path,
                ValueError(
                    f"the chat template leaves out {value!r:.40} of tool {i} (under {path[-1]!r}). Give the "
                    "tool in the form that the template reads, or take a template that writes all of it."
                ),
            )


def _texts_of_tool(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, str) and value.strip():
        yield path, value
    elif isinstance(value, dict):
        for key, entry in value.items():
            if key not in _SCHEMA_FORM or isinstance(entry, dict):  # a parameter may have such a name
                yield from _texts_of_tool(entry, (*path, key))
    elif isinstance(value, list):
        for i, entry in enumerate(value):
            yield from _texts_of_tool(entry, (*path, i))


def _longer(value: Any, path: Path, more: str) -> Any:
    """Return a copy of a value in which the text at a path is longer, or the dict there has one more key."""
    if path:
        first, rest = path[0], path[1:]
        changed = list(value) if isinstance(value, list | tuple) else dict(value)
        changed[first] = _longer(value[first], rest, more)  # type: ignore[index]
        return changed
    return {**value, more: more} if isinstance(value, dict) else f"{value}{more}"


def _renders_alike(renderer: _Renderer, messages: list[Message], i: int, changed: Message, text: str) -> bool:
    """Return whether the template writes the same text if message ``i`` is replaced by ``changed``."""
    try:
        return renderer.render([*messages[:i], changed, *messages[i + 1 :]]) == text
    except ValueError:  # the template refuses the changed message, so it does read the changed part
        return False


def _encode_marked(
    renderer: _Renderer, messages: list[Message], text: str, template: str, skip: int
) -> tuple[list[int], NDArray[np.bool_]]:
    tokenizer, spans = renderer.tokenizer, _marked_spans(renderer, messages, text, template)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    learned = _answers(messages, skip)
    if learned != answers:
        if len(spans) != len(answers):
            raise ValueError(
                f"{{% generation %}} marks {len(spans)} parts for {len(answers)} messages of the assistant. "
                "Mark each message once."
            )
        spans = [span for i, span in zip(answers, spans, strict=True) if i in learned]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids: list[int] = list(encoded["input_ids"])
    edges = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2)
    mask = np.zeros(len(ids), bool)
    for start, stop in spans:
        # Take every token that overlaps the span: a blank that begins or ends it may be in no token.
        inside = np.flatnonzero((edges[:, 0] < stop) & (edges[:, 1] > start))
        if inside.size and start < stop:
            mask[inside[0] : inside[-1] + 1] = True
    if not mask.any():
        raise ValueError(
            "the chat template marks no text of the conversation with {% generation %}. "
            "Put the markers around the answers of the assistant."
        )
    return ids, mask


def _marked_spans(renderer: _Renderer, messages: list[Message], text: str, template: str) -> Spans:
    """Return ``(start, stop)``, in characters, of each part of ``text`` that the template marks."""
    unused = (sign for sign in map(chr, range(0xE000, 0xF8FF)) if sign not in text and sign not in template)
    begin, end = next(unused), next(unused)

    def sign(tag: re.Match[str]) -> str:
        before, ends, after = tag.groups()
        return f"{{%{before} if true %}}{end if ends else begin}{{% endif {after}%}}"

    signed = renderer.render(messages, template=_GENERATION.sub(sign, template))
    spans: Spans = []
    plain, at = "", 0
    for part in re.split(f"([{begin}{end}])", signed):
        if part == begin:
            at = len(plain)
        elif part == end:
            spans.append((at, len(plain)))
        else:
            plain += part
    if plain != text:
        raise ValueError(
            "the chat template writes another text when its {% generation %} markers are removed. "
            "Put the markers around text only, with no {% set %} between them."
        )
    return spans


def _answer_span(renderer: _Renderer, messages: list[Message], i: int, text: str) -> tuple[int, int]:
    """Return ``(start, stop)``, in characters of ``text``, of what the assistant says in message ``i``."""
    after = renderer.render(messages[: i + 1])
    before = renderer.render(messages[:i], prompt=True) if i else _before_first(renderer, messages, after)
    if not text.startswith(after):
        raise ValueError(
            f"the chat template writes the turns up to message {i} differently when more follow. Mark "
            "answers with {% generation %}. See docs/reference/messages.md#chat-templates."
        )
    if not after.startswith(before):
        raise ValueError(
            f"the chat template ends a prompt for message {i} with {before[-24:]!r}, but does not write that "
            "before the answer. Mark answers with {% generation %}."
        )
    return len(before), len(after)


def _before_first(renderer: _Renderer, messages: list[Message], after: str) -> str:
    """Return the text before an answer that is message 0; a template may add a system prompt there."""
    asked, bare = [{"role": "user", "content": "x"}], _Renderer(renderer.tokenizer, None, renderer.options)
    try:
        # Templates cannot render zero messages. So take the header of an answer from a made-up question.
        header = bare.render(asked, prompt=True).removeprefix(bare.render(asked))
    except ValueError:
        header = ""
    if header and header in after:
        return after[: after.find(header) + len(header)]
    content = [{"type": "text", "text": "\ue000"}] if _parts(messages[0]) else "\ue000"
    return after[: max(0, renderer.render([{**messages[0], "content": content}]).find("\ue000"))]


def _encode_with_edges(tokenizer: Any, text: str, edges: list[int]) -> tuple[list[int], dict[int, int]]:
    """Return a text's ids, and for each character position in ``edges`` the index of the token there."""

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
                "a token crosses the edge of an answer, near "
                f"{text[max(0, edge - 12) :][:24]!r}. Let the template put a special token there."
            )
        cuts[edge] = len(start)
    return ids, cuts
