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

# A record is of a kind if it has all keys of one of these sets; the first kind counts.
KEYS: dict[str, tuple[tuple[str, ...], ...]] = {
    "ids": (("input_ids",),),
    "messages": (("messages",),),
    "sharegpt": (("conversations",), ("conversation",)),
    "prompt": (("prompt", "completion"),),
    "alpaca": (("instruction", "output"),),
}
ALPACA_KEYS = ("instruction", "input", "output", "system")
# The speaker of a turn under "from" -> the role that chat templates know.
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
    tools = _parsed(record.get("tools")) or None
    options = _parsed(record.get("chat_template_kwargs")) or {}
    if not isinstance(tools, list | None) or not isinstance(options, dict):
        raise ValueError("tools must be a list, and chat_template_kwargs a dict, or JSON of them. Fix them.")

    keys, messages, skip = _messages(record, kind)
    check_record(record, keys)
    messages = [_with_content(without_keys(message, dropped)) for message in messages]
    return Conversation(messages, tools, skip, options)


def _messages(record: dict[str, Any], kind: Kind) -> tuple[tuple[str, ...], list[Message], int]:
    """Return the keys of a record that hold its conversation, the messages, and the length of the prompt."""
    if kind == "alpaca":
        keys = tuple(name for name in ALPACA_KEYS if name in record)
        question = {"role": "user", "content": alpaca_prompt(record)}
        answer = {"role": "assistant", "content": record["output"]}
        return keys, [*_system(record), question, answer], 0

    if kind == "sharegpt":
        key = "conversations" if "conversations" in record else "conversation"
        turns = _parsed(record.get(key))
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
            raise ValueError(f"{key} must be a list of {{'from': ..., 'value': ...}}. Fix it.")
        keys = (key, "system") if "system" in record else (key,)
        return keys, _system(record) + [_turn(turn) for turn in turns], 0

    if kind == "prompt":
        prompt = _turns(record["prompt"])
        completion = _turns(record["completion"])
        return ("prompt", "completion"), prompt + completion, len(prompt)

    return ("messages",), _turns(record["messages"]), 0


def _with_content(message: Message) -> Message:
    """Return a message with the key ``content``, so that a null content is the same in every container."""
    return message if "content" in message else {**message, "content": None}


def _parsed(value: Any) -> Any:
    """Parse JSON text, also as entries of a list: the package datasets stores mixed values like this."""
    if isinstance(value, str) and value.strip():
        value = parse_json(value)
    if not isinstance(value, list | tuple):
        return value
    return [parse_json(entry) if isinstance(entry, str) else entry for entry in value]


def _turns(messages: Any) -> list[Message]:
    """Return messages with ``from`` and ``value`` replaced by ``role`` and ``content``."""
    turns = _parsed(messages)
    if not isinstance(turns, list) or not all(_has_speaker(turn) for turn in turns):
        wanted = "a list of {'role': ..., 'content': ...}, each role a string"
        raise ValueError(f"the messages are {messages!r:.40}; wanted {wanted}. Fix or remove them.")
    return [_turn(turn) if "from" in turn else turn for turn in turns]


def _has_speaker(turn: Any) -> bool:
    return isinstance(turn, dict) and ("from" in turn or isinstance(turn.get("role"), str))


def calls_read(message: Message, text: str) -> Message:
    """Parse calls' arguments in JSON if ``text`` quotes them, or is empty because the template failed."""
    for number, call in _calls(message):
        arguments = call.get("arguments")
        parsed = parse_json(arguments) if isinstance(arguments, str) else None
        if isinstance(parsed, dict) and (not text or json.dumps(arguments, ensure_ascii=False) in text):
            message = _with_call(message, number, {**call, "arguments": parsed})
    return message


def _calls(message: Message) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each call of a message, and the dict that holds its name and arguments."""
    for number, call in enumerate(message.get("tool_calls") or ()):
        inner = call.get("function")
        yield number, inner if isinstance(inner, dict) else call


def _with_call(message: Message, number: int, call: dict[str, Any]) -> Message:
    """Return a copy of a message in which ``call`` holds the name and arguments of one call."""
    calls = list(message["tool_calls"])
    if "function" in calls[number]:
        calls[number] = {**calls[number], "function": call}
    else:
        calls[number] = call
    return {**message, "tool_calls": calls}


def alpaca_prompt(record: dict[str, Any]) -> str:
    """Return the instruction of an Alpaca record, followed by its input if it has one."""
    task = record.get("instruction")
    data = record.get("input") or ""
    if not isinstance(task, str) or not isinstance(data, str) or not isinstance(record.get("output"), str):
        raise ValueError("instruction, input and output must be strings. Fix or remove the record.")
    if record.get("history"):
        raise ValueError("'history' is not read. Give the whole conversation under 'messages'.")
    return f"{task}\n\n{data}" if data else task


def _system(record: dict[str, Any]) -> list[Message]:
    """Return the message of a record's system prompt, in a list that is empty without one."""
    text = record.get("system") or ""
    if not isinstance(text, str):
        raise ValueError(f"system is a {type(text).__name__}; wanted a string. Fix or remove the record.")
    return [{"role": "system", "content": text}] if text else []


def _turn(turn: dict[str, Any]) -> Message:
    """Return a turn of ShareGPT as a message; one that has a role already stays as it is."""
    if isinstance(turn.get("role"), str):
        return turn

    speaker = turn.get("from")
    value = turn.get("value")
    if not isinstance(speaker, str) or speaker not in _ROLES or not isinstance(value, str):
        raise ValueError(
            f"a turn is from {speaker!r} with a value of type {type(value).__name__}; "
            f"the value must be a string, 'from' one of {', '.join(_ROLES)}."
        )
    others = {key: x for key, x in turn.items() if key not in ("from", "value") and x is not None}
    if twice := sorted(others.keys() & {"role", "content"}):
        raise ValueError(f"a turn has {twice[0]!r} beside 'from' and 'value', which would be lost. Keep one.")
    return {**others, "role": _ROLES[speaker], "content": value}
