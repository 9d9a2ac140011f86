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

from lightning_thd._pages import see
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

# A marker of a template, with the signs that strip blanks before and behind it.
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
        first, *others = text.split(self.token)
        images = sum(part.get("type") == "image" for message in messages for part in _parts(message))
        if len(others) != images:
            raise ValueError(
                f"the template writes {len(others)} times {self.token!r} for {images} images. "
                f"Remove {self.token!r} from the text, or take a template that writes one for each image."
            )
        # The first messages of a conversation are also rendered by themselves, with fewer images.
        counted = zip(self.counts, others, strict=False)
        return first + "".join(self.token * count + piece for count, piece in counted)


def _parts(message: Message) -> list[Any]:
    """Return the parts of a message's content; none if the content is text."""
    content = message.get("content")
    return content if isinstance(content, list) else []


@dataclass(frozen=True, slots=True)
class _Renderer:
    """A chat template, and all that it gets beside the messages."""

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
    """Encode messages with ``role`` and ``content``; those before number ``skip`` are not learned.

    Returns:
        The ids of the rendered conversation, and a mask bool ``[ids]``, True for those that are learned.

    Raises:
        ValueError: the template refuses the conversation or leaves a part of it out, or the answers cannot
            be found in the text.
    """
    _check(tokenizer, messages, skip, images=placeholders is not None)
    renderer = _Renderer(tokenizer, tools, options or {}, placeholders)
    template = str(tokenizer.get_chat_template(tools=tools))
    has_markers = _GENERATION.search(template) is not None
    if has_markers and not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            "the template marks {% generation %}, which only a fast tokenizer can follow. Use the fast one."
        )
    _refuse_unread_options(renderer.options, template)

    messages, text = _rendered(renderer, list(messages))
    if "\0" in text:
        raise ValueError("the conversation has a null character (\\u0000), so it is not text. Remove it.")
    _refuse_lost_thoughts(renderer, messages, text)
    _refuse_unwritten(renderer, messages, text)
    for message in messages:
        check_role(message["role"], template)

    if has_markers:
        return _encode_marked(renderer, messages, text, template, skip)
    return _encode_by_turns(renderer, messages, text, skip)


def _refuse_unread_options(options: Mapping[str, Any], template: str) -> None:
    for name in options:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise ValueError(
                f"chat_template_kwargs holds {name!r}, which the chat template does not read. "
                "Correct its name, or drop it."
            )


def _encode_by_turns(
    renderer: _Renderer, messages: list[Message], text: str, skip: int
) -> tuple[list[int], NDArray[np.bool_]]:
    """Encode a conversation whose template marks no answers, so that they are found by rendering."""
    tokenizer = renderer.tokenizer
    answers = _answers(messages, skip)
    spans = [_answer_span(renderer, messages, i, text) for i in answers]
    edges = sorted({edge for span in spans for edge in span})
    ids, token_at = _encode_with_edges(tokenizer, text, edges)
    mask = np.zeros(len(ids), bool)
    for i, (start, stop) in zip(answers, spans, strict=True):
        turn = text[start:stop]
        first = token_at[start]
        end = token_at[stop]
        _refuse_no_end(messages[i], turn, ids[end - 1], tokenizer)
        learned = _learned_tokens(ids[first:end], turn, messages[i], tokenizer)
        mask[first : first + learned] = True
    return ids, mask


def _rendered(renderer: _Renderer, messages: list[Message]) -> tuple[list[Message], str]:
    """Render messages; return them as they were rendered, and the text.

    Many templates take the arguments of calls only as a dict, so JSON is parsed for them. Some templates
    write a null content as the word None, and others need the null to recognise a call.
    """
    blank = [{**m, "content": ""} if m.get("content") is None else m for m in messages]
    text = ""
    blank_text = ""
    with suppress(ValueError):
        text = renderer.render(messages)
    with suppress(ValueError):
        blank_text = text if blank == messages else renderer.render(blank)
    if blank_text and (not text or text.count("None") > blank_text.count("None")):
        messages = blank
        text = blank_text

    with_dicts = [calls_read(message, text) for message in messages]
    if text and with_dicts == messages:
        return messages, text
    if not text and blank != messages:
        # Neither was rendered. Try both again with the arguments as dicts, or raise the template's error.
        if with_dicts != messages:
            return _rendered(renderer, with_dicts)
        return blank, renderer.render(blank)
    return with_dicts, renderer.render(with_dicts)


def _refuse_no_end(message: Message, turn: str, last: int, tokenizer: Any) -> None:
    """Raise if an answer's turn ends with its own words and no special token, so that no end is learned."""
    parts = _parts(message)
    content = parts[-1].get("text") if parts else message.get("content")
    words = content.strip() if isinstance(content, str) else ""
    if words and turn.endswith(words) and last not in tokenizer.all_special_ids:
        raise ValueError(
            f"the chat template writes nothing behind the answer {words[-24:]!r}, so its end would not be "
            f"learned. Let it end answers with a token. {see('chat-templates')}"
        )


def _learned_tokens(turn: list[int], text: str, message: Message, tokenizer: Any) -> int:
    """Return how many tokens of a turn are learned: those up to its last EOS, if that EOS ends the turn.

    What the template adds after that EOS is not learned. EOS tokens in the message's own text do not end the
    turn, nor does an EOS before words of the message. If no EOS ends the turn, all of it is learned.
    """
    eos = getattr(tokenizer, "eos_token", None)
    eos_in_message = str(message).count(eos) if eos else 0
    ends = [number + 1 for number, token in enumerate(turn) if token == tokenizer.eos_token_id]
    if len(ends) <= eos_in_message:
        return len(turn)

    text_after_eos = text.rpartition(eos)[2].strip() if eos else ""
    if text_after_eos and any(x in text_after_eos or text_after_eos in x for x in _words(message)):
        return len(turn)
    return ends[-1]


def _words(value: Any) -> Iterator[str]:
    """Yield the texts of a message or of a value in it, except roles and types."""
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
        # In the content, thoughts are what stands before the last ``_THOUGHT_END``.
        in_content, end, answer = str(content).rpartition(_THOUGHT_END)
        thoughts = {name: message.get(name) for name in THOUGHTS}
        thoughts["content"] = in_content if isinstance(content, str) else None
        for name, value in thoughts.items():
            if all(words in text for words in _words(value)):
                continue

            # Templates may drop the thoughts of all messages but the last. So render up to this one.
            up_to_here = messages[: i + 1]
            longer = f"{value} x{end}{answer}" if name == "content" else f"{value} x"
            rendered = renderer.render(up_to_here)
            if _renders_alike(renderer, up_to_here, i, {**message, name: longer}, rendered):
                where = f"before {_THOUGHT_END}" if name == "content" else f"under {name!r}"
                raise ValueError(
                    f"message {i} has thoughts {where}, which the chat template does not write. "
                    "Take a template that writes them, or remove them."
                )


def _check(tokenizer: Any, messages: Sequence[Message], skip: int, *, images: bool = False) -> None:
    """Refuse what cannot be rendered: no template, contents of other types, or nothing to learn."""
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
    if message.get("function_call"):
        raise ValueError("a message has a function_call, which is not read. Give it as tool_calls.")
    calls = message.get("tool_calls")
    if calls and not (isinstance(calls, list | tuple) and all(isinstance(call, dict) for call in calls)):
        raise ValueError(f"tool_calls is {calls!r:.40}; wanted a list of dicts. Parse it, or remove it.")
    for call in calls or ():
        _check_call(call)

    content = message.get("content")
    # Without content, a message has calls or thoughts, or words under a key that is looked for in its text.
    if content is None and (calls or unread(message, "message") or any(map(message.get, THOUGHTS))):
        return
    if not isinstance(content, str | list | dict):
        raise ValueError(
            f"a message of the role {message['role']!r} has the content {content!r}; wanted a string."
        )
    for part in _parts(message):
        _check_content_part(part, images)


def _check_call(call: dict[str, Any]) -> None:
    """Refuse a call without a name, and one whose arguments stand under another key."""
    inner = call.get("function") or call
    name = inner.get("name")
    if not isinstance(name, str):
        raise ValueError(f"a call in tool_calls has no name: {call!r:.60}. Name the tool that it calls.")
    other = unread(inner, "call")
    if inner.get("arguments") is None and other:
        raise unread_error(other, "call", f"the call of {name!r:.40}, which has no 'arguments',")


def _check_content_part(part: Any, images: bool) -> None:
    """Refuse a part that is neither text nor, if there are ``images``, the place of one."""
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
        _refuse_code(message, i, text)

    # A short word may be in the text by chance, so look for a sign that is added to each value.
    root = {"messages": messages, "tools": renderer.tools}
    claims = [*_claims_of_tools(renderer.tools), *_claims_of_messages(messages)]
    signs = [f" \ue000{number}\ue000" for number in range(len(claims))]
    signed_root = root
    for (path, _), sign in zip(claims, signs, strict=True):
        signed_root = _longer(signed_root, path, sign)
    signed_text = ""
    with suppress(ValueError):
        signed_text = _render_root(renderer, signed_root)

    # A template may read a value without writing it, or refuse a sign. So change those values one by one.
    for (path, error), sign in zip(claims, signs, strict=True):
        if sign in signed_text:
            continue
        with suppress(_Refused):
            if _render_root(renderer, _longer(root, path, " x")) == text:
                raise error


def _refuse_code(message: Message, i: int, text: str) -> None:
    """Raise if a template that takes only strings writes a list or dict of content as Python or JSON."""
    content = message.get("content")
    if isinstance(content, str) or not content:
        return
    parts = _parts(message)
    as_code = [str(value) for value in [*parts, content]]
    as_code += [json.dumps(part, ensure_ascii=False, default=str) for part in parts]
    if any(value in text for value in as_code):
        raise ValueError(
            f"the chat template writes the content of message {i} as code, because it takes only "
            "strings. Give the content as one string."
        )


class _Refused(ValueError):
    """A template refuses a changed conversation, so it does read what was changed."""


def _render_root(renderer: _Renderer, root: dict[str, Any]) -> str:
    """Render messages and tools that were changed; raise ``_Refused`` if the template refuses them."""
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
                error = ValueError(
                    f"the chat template leaves out message {i} of the role {message['role']!r}, which "
                    f"says {value!r:.40}. {see('chat-templates')}"
                )
                yield ("messages", i, *path), error

        for name in unread(message, "message"):
            if name == "name" and message["role"] in ("tool", "function"):
                continue  # the call before it has this name
            owner = f"message {i} of the role {message['role']!r}"
            yield ("messages", i, name), unread_error([name], "message", owner)


def _claims_of_call(call: dict[str, Any], path: Path, i: int) -> Iterator[tuple[Path, ValueError]]:
    """Yield each value of a call that must be in the text, and the error if it is not."""
    inner = call
    if isinstance(call.get("function"), dict):
        for name in unread(call, "call"):
            yield (*path, name), unread_error([name], "call", f"a call in message {i}")
        inner = call["function"]
        path = (*path, "function")

    left_out = ValueError(
        f"the chat template leaves out the call of {inner['name']!r:.40} in message {i}. "
        f"Take a template that writes tool_calls. {see('chat-templates')}"
    )
    yield (*path, "name"), left_out
    if not is_empty(inner.get("arguments")):
        yield (*path, "arguments"), left_out
    for name in unread(inner, "call"):
        yield (*path, name), unread_error([name], "call", f"the call of {inner['name']!r:.40} in message {i}")


def _claims_of_tools(tools: list[Any] | None) -> Iterator[tuple[Path, ValueError]]:
    """Yield each text of the tools that must be in the text, and the error if it is not."""
    for i, tool in enumerate(tools or ()):
        for path, value in _texts_of_tool(tool, ("tools", i)):
            error = ValueError(
                f"the chat template leaves out {value!r:.40} of tool {i} (under {path[-1]!r}). Give the "
                "tool in the form that the template reads, or take a template that writes all of it."
            )
            yield path, error


def _texts_of_tool(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the texts in a tool's description, with their paths, except those about the form of a value."""
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
    if not path:
        return {**value, more: more} if isinstance(value, dict) else f"{value}{more}"
    first, *rest = path
    changed: Any = list(value) if isinstance(value, list | tuple) else dict(value)
    changed[first] = _longer(value[first], tuple(rest), more)
    return changed


def _renders_alike(renderer: _Renderer, messages: list[Message], i: int, changed: Message, text: str) -> bool:
    """Return whether the template writes the same text if message ``i`` is replaced by ``changed``."""
    try:
        return renderer.render([*messages[:i], changed, *messages[i + 1 :]]) == text
    except ValueError:  # the template refuses the changed message, so it does read the changed part
        return False


def _encode_marked(
    renderer: _Renderer, messages: list[Message], text: str, template: str, skip: int
) -> tuple[list[int], NDArray[np.bool_]]:
    """Encode a conversation whose template marks the answers itself."""
    spans = _marked_spans(renderer, messages, text, template)
    of_assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    learned = _answers(messages, skip)
    if learned != of_assistant:
        # A span does not say which message it is of, so there must be one for each.
        if len(spans) != len(of_assistant):
            raise ValueError(
                f"{{% generation %}} marks {len(spans)} parts for {len(of_assistant)} messages of the "
                "assistant. Mark each message once."
            )
        spans = [span for i, span in zip(of_assistant, spans, strict=True) if i in learned]

    encoded = renderer.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids: list[int] = list(encoded["input_ids"])
    starts, stops = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
    mask = np.zeros(len(ids), bool)
    for start, stop in spans:
        # Take every token that overlaps the span: a blank that begins or ends it may be in no token.
        inside = np.flatnonzero((starts < stop) & (stops > start))
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
    # Render again with private-use characters in place of the markers.
    private_use = map(chr, range(0xE000, 0xF8FF))
    unused = (sign for sign in private_use if sign not in text and sign not in template)
    begin = next(unused)
    end = next(unused)

    def sign_for(marker: re.Match[str]) -> str:
        # A block, and not the bare sign, keeps the effect of "-" and "+" on the blanks around the marker.
        before, ends, after = marker.groups()
        return f"{{%{before} if true %}}{end if ends else begin}{{% endif {after}%}}"

    signed = renderer.render(messages, template=_GENERATION.sub(sign_for, template))
    spans: Spans = []
    plain = ""
    start = 0
    for piece in re.split(f"([{begin}{end}])", signed):
        if piece == begin:
            start = len(plain)
        elif piece == end:
            spans.append((start, len(plain)))
        else:
            plain += piece
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
            "answers with {% generation %}. "
            f"{see('chat-templates')}"
        )
    if not after.startswith(before):
        raise ValueError(
            f"the chat template ends a prompt for message {i} with {before[-24:]!r}, but does not write that "
            "before the answer. Mark answers with {% generation %}."
        )
    return len(before), len(after)


def _before_first(renderer: _Renderer, messages: list[Message], after: str) -> str:
    """Return the text before an answer that is message 0; a template may add a system prompt there."""
    # Templates cannot render zero messages. So take the header of an answer from a made-up question.
    question = [{"role": "user", "content": "x"}]
    bare = _Renderer(renderer.tokenizer, None, renderer.options)
    try:
        header = bare.render(question, prompt=True).removeprefix(bare.render(question))
    except ValueError:
        header = ""
    if header and header in after:
        return after[: after.find(header) + len(header)]

    # Without a header, the answer begins where the template writes its content.
    sign = "\ue000"
    content = [{"type": "text", "text": sign}] if _parts(messages[0]) else sign
    signed = renderer.render([{**messages[0], "content": content}])
    return after[: max(0, signed.find(sign))]


def _encode_with_edges(tokenizer: Any, text: str, edges: list[int]) -> tuple[list[int], dict[int, int]]:
    """Return a text's ids, and for each character position in ``edges`` the index of the token there."""

    def encode(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False)["input_ids"])

    # Mostly, the pieces between edges have the tokens of the whole text. To encode them takes as long as to
    # encode the text, while the beginnings below take longer with every turn.
    ids = encode(text)
    bounds = sorted({0, *edges, len(text)})
    pieces = [encode(text[start:stop]) for start, stop in pairwise(bounds)]
    if [token for piece in pieces for token in piece] == ids:
        tokens = np.cumsum([0, *map(len, pieces)]).tolist()
        return ids, dict(zip(bounds, tokens, strict=True))

    # A tokenizer may put a blank before any text, so encode each beginning of the text instead.
    token_at = {0: 0, len(text): len(ids)}
    for edge in edges:
        beginning = ids if edge == len(text) else encode(text[:edge])
        if ids[: len(beginning)] != beginning:
            around = text[max(0, edge - 12) :][:24]
            raise ValueError(
                f"a token crosses the edge of an answer, near {around!r}. "
                "Let the template put a special token there."
            )
        token_at[edge] = len(beginning)
    return ids, token_at
