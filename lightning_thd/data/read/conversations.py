"""A record -> its kind, by its keys, and the messages of a conversation in any known format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from lightning_thd.data.read.records import parse_json

Kind = Literal["text", "ids", "prompt", "messages", "sharegpt", "alpaca"]
Records = Literal["auto", "text", "ids", "prompt", "messages", "sharegpt", "alpaca"]
Message = dict[str, Any]

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
# Keys by which the formats of OpenAI, Axolotl and ms-swift exclude a message from the loss.
LEARNED = ("weight", "train", "training", "loss")


def is_kind(record: dict[str, Any], kind: str) -> bool:
    """Return whether a record has the keys of a kind."""
    return any(all(key in record for key in keys) for keys in KEYS.get(kind, ()))


def kind_of(record: dict[str, Any] | str, text_key: str) -> Kind | None:
    """Return the kind of a record by its keys; None if they match no kind."""
    if isinstance(record, str):
        return "text"
    for kind in KEYS:
        if is_kind(record, kind):
            return kind  # type: ignore[return-value]
    return "text" if isinstance(record.get(text_key), str) else None


class Conversation(NamedTuple):
    """The conversation of a record, with its tools and template variables."""

    messages: list[Message]  # dicts with ``role`` and ``content``
    tools: list[Any] | None  # tools that the assistant may call
    skip: int  # number of messages at the start that are a prompt
    options: dict[str, Any]  # ``chat_template_kwargs``, variables of the chat template


def messages_of(record: dict[str, Any], kind: Kind) -> Conversation:
    """Read a record as a conversation."""
    tools, options = _listed(record.get("tools")) or None, _listed(record.get("chat_template_kwargs")) or {}
    if not isinstance(tools, list | None) or not isinstance(options, dict):
        raise ValueError("tools must be a list, and chat_template_kwargs a dict, or JSON of them. Fix them.")
    if kind == "alpaca":
        prompt, answer = alpaca_prompt(record), record["output"]
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        return Conversation(_system(record) + turns, tools, 0, options)
    if kind == "sharegpt":
        key = "conversations" if "conversations" in record else "conversation"
        talk = _listed(record.get(key))
        if not isinstance(talk, list) or not talk or not all(isinstance(turn, dict) for turn in talk):
            raise ValueError(f"{key} must be a list of {{'from': ..., 'value': ...}}. Fix it.")
        return Conversation(_system(record) + [_turn(turn) for turn in talk], tools, 0, options)
    if record.get("system"):
        raise ValueError("'system' is beside messages. Make it the first message.")
    if kind == "prompt":
        before, after = _turns(record["prompt"]), _turns(record["completion"])
        return Conversation(before + after, tools, len(before), options)
    return Conversation(_turns(record["messages"]), tools, 0, options)


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


def calls_read(message: Message, text: str) -> Message:
    """Parse calls' arguments in JSON if ``text`` quotes them, or is empty because the template failed."""
    for place, call in _calls(message):
        given = call.get("arguments")
        found = parse_json(given) if isinstance(given, str) else None
        if isinstance(found, dict) and (not text or json.dumps(given, ensure_ascii=False) in text):
            message = _with_call(message, place, {**call, "arguments": found})
    return message


def other_calls(message: Message) -> Iterator[tuple[str, Message]]:
    """Yield the name of each tool call, and a copy of the message with this name changed."""
    for place, call in _calls(message):
        if isinstance(name := call.get("name"), str):
            yield name, _with_call(message, place, {**call, "name": f"{name}x"})


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
    others = {key: x for key, x in turn.items() if key not in ("from", "value")}
    return {**others, "role": _ROLES[who], "content": value}
