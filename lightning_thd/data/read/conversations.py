"""A record -> its kind, by its keys, and the messages of a conversation in any known format."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any, Literal, NamedTuple

from lightning_thd.batch.examples import is_example
from lightning_thd.data.read.message_keys import Message, check_record, without_keys
from lightning_thd.data.read.records import parse_json

Kind = Literal["text", "ids", "prompt", "messages", "sharegpt", "alpaca", "pairs"]
Records = Literal["auto", "text", "ids", "prompt", "messages", "sharegpt", "alpaca", "pairs"]

KEYS: dict[str, tuple[tuple[str, ...], ...]] = {
    "ids": (("input_ids",),),
    "messages": (("messages",),),
    "sharegpt": (("conversations",), ("conversation",)),
    "prompt": (("prompt", "completion"),),
    "alpaca": (("instruction", "output"),),
}
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
    "system": "system",
}


def is_kind(record: dict[str, Any], kind: str) -> bool:
    """Return whether a record has the keys of a kind, with values."""
    return any(all(record.get(key) is not None for key in keys) for keys in KEYS.get(kind, ()))


def kind_of(record: dict[str, Any] | str, text_key: str) -> Kind | None:
    """Return the kind of a record by its keys; None if they match no kind."""
    if isinstance(record, str):
        return "text"
    for kind in KEYS:
        if is_kind(record, kind):
            return kind  # type: ignore[return-value]
    if isinstance(record.get(text_key), str):
        return "text"
    return "pairs" if is_example(record) else None


class Conversation(NamedTuple):
    """The conversation of a record, with its tools and template variables."""

    messages: list[Message]  # dicts with ``role`` and ``content``
    tools: list[Any] | None  # tools that the assistant may call
    skip: int  # number of messages at the start that are a prompt
    options: dict[str, Any]  # ``chat_template_kwargs``, variables of the chat template


def messages_of(record: dict[str, Any], kind: Kind, dropped: Collection[str] = ()) -> Conversation:
    """Read a record as a conversation, without its ``dropped`` keys; refuse keys that would be lost."""
    record = {name: x for name, x in record.items() if x is not None and name not in dropped}
    tools, options = _listed(record.get("tools")) or None, _listed(record.get("chat_template_kwargs")) or {}
    if not isinstance(tools, list | None) or not isinstance(options, dict):
        raise ValueError("tools must be a list, and chat_template_kwargs a dict, or JSON of them. Fix them.")
    own, messages, skip = _messages(record, kind)
    check_record(record, own)
    kept = [without_keys(message, dropped) for message in messages]
    return Conversation([_with_content(message) for message in kept], tools, skip, options)


def _messages(record: dict[str, Any], kind: Kind) -> tuple[tuple[str, ...], list[Message], int]:
    """Return the keys of a record that hold its conversation, the messages, and the length of the prompt."""
    if kind == "alpaca":
        prompt, answer = alpaca_prompt(record), record["output"]
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        own = tuple(name for name in ALPACA_KEYS if name in record)
        return own, _system(record) + turns, 0
    if kind == "sharegpt":
        key = "conversations" if "conversations" in record else "conversation"
        talk = _listed(record.get(key))
        if not isinstance(talk, list) or not talk or not all(isinstance(turn, dict) for turn in talk):
            raise ValueError(f"{key} must be a list of {{'from': ..., 'value': ...}}. Fix it.")
        own = (key, "system") if "system" in record else (key,)
        return own, _system(record) + [_turn(turn) for turn in talk], 0
    if kind == "prompt":
        before, after = _turns(record["prompt"]), _turns(record["completion"])
        return ("prompt", "completion"), before + after, len(before)
    return ("messages",), _turns(record["messages"]), 0


def _with_content(message: Message) -> Message:
    """Return a message with the key ``content``, so that a null content is the same in every container."""
    return message if "content" in message else {**message, "content": None}


def _listed(value: Any) -> Any:
    """Parse JSON text, also as entries of a list: the package datasets stores mixed values like this."""
    value = parse_json(value) if isinstance(value, str) and value.strip() else value
    if not isinstance(value, list | tuple):
        return value
    return [parse_json(entry) if isinstance(entry, str) else entry for entry in value]


def _turns(messages: Any) -> list[Message]:
    """Return messages with ``from`` and ``value`` replaced by ``role`` and ``content``."""
    turns = _listed(messages)
    if not isinstance(turns, list) or not all(
        isinstance(turn, dict) and ("from" in turn or isinstance(turn.get("role"), str)) for turn in turns
    ):
        wanted = "a list of {'role': ..., 'content': ...}, each role a string"
        raise ValueError(f"the messages are {messages!r:.40}; wanted {wanted}. Fix or remove them.")
    return [_turn(turn) if "from" in turn else turn for turn in turns]


ALPACA_KEYS = ("instruction", "input", "output", "system")


def calls_read(message: Message, text: str) -> Message:
    """Parse calls' arguments in JSON if ``text`` quotes them, or is empty because the template failed."""
    for place, call in _calls(message):
        given = call.get("arguments")
        found = parse_json(given) if isinstance(given, str) else None
        if isinstance(found, dict) and (not text or json.dumps(given, ensure_ascii=False) in text):
            message = _with_call(message, place, {**call, "arguments": found})
    return message


def _calls(message: Message) -> Iterator[tuple[int, dict[str, Any]]]:
    for place, call in enumerate(message.get("tool_calls") or ()):
        inner = call.get("function")
        yield place, inner if isinstance(inner, dict) else call


def _with_call(message: Message, place: int, call: dict[str, Any]) -> Message:
    calls = list(message["tool_calls"])
    calls[place] = {**calls[place], "function": call} if "function" in calls[place] else call
    return {**message, "tool_calls": calls}


def alpaca_prompt(record: dict[str, Any]) -> str:
    """Return the instruction of an Alpaca record, followed by its input if it has one."""
    task, data = record.get("instruction"), record.get("input") or ""
    if not isinstance(task, str) or not isinstance(data, str) or not isinstance(record.get("output"), str):
        raise ValueError("instruction, input and output must be strings. Fix or remove the record.")
    if record.get("history"):
        raise ValueError("'history' is not read. Give the whole conversation under 'messages'.")
    return f"{task}\n\n{data}" if data else task


def _system(record: dict[str, Any]) -> list[Message]:
    text = record.get("system") or ""
    if not isinstance(text, str):
        raise ValueError(f"system is a {type(text).__name__}; wanted a string. Fix or remove the record.")
    return [{"role": "system", "content": text}] if text else []


def _turn(turn: dict[str, Any]) -> Message:
    if isinstance(turn.get("role"), str):
        return turn
    who, value = turn.get("from"), turn.get("value")
    if not isinstance(who, str) or who not in _ROLES or not isinstance(value, str):
        given = f"a turn is from {who!r} with a value of type {type(value).__name__}"
        raise ValueError(f"{given}; the value must be a string, 'from' one of {', '.join(_ROLES)}.")
    others = {key: x for key, x in turn.items() if key not in ("from", "value") and x is not None}
    if twice := sorted(others.keys() & {"role", "content"}):
        raise ValueError(f"a turn has {twice[0]!r} beside 'from' and 'value', which would be lost. Keep one.")
    return {**others, "role": _ROLES[who], "content": value}
