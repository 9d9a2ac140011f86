"""A record -> its kind, by its keys, and the messages of a conversation whatever form it was written in.

Forms: ``messages`` (role and content), ShareGPT (``conversations`` of from and value), Alpaca
(``instruction``, ``input``, ``output``), ``prompt`` with ``completion``, text under a key, and token ids.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from lightning_thd.data.read.decode import Bad, parse_json

Kind = Literal["text", "ids", "prompt", "messages", "sharegpt", "alpaca"]
Records = Literal["auto", "text", "ids", "prompt", "messages", "sharegpt", "alpaca"]
Message = dict[str, Any]

KEYS: dict[str, tuple[tuple[str, ...], ...]] = {  # one of these sets of keys makes a record one of the kind
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
_CALLS = ("function_call", "tool_call")
# Keys by which data says that a message is not learned: of OpenAI, Axolotl and ms-swift.
LEARNED = ("weight", "train", "training", "loss")


def kind_of(record: dict[str, Any] | str, text_key: str) -> Kind | None:
    """Return the kind of a record by its keys; None for an unknown kind."""
    if isinstance(record, str):
        return "text"
    for kind, ways in KEYS.items():
        if any(all(key in record for key in way) for way in ways):
            return kind  # type: ignore[return-value]
    return "text" if isinstance(record.get(text_key), str) else None


def describe(kind: Kind, text_key: str) -> str:
    """Return a short text on how records of a kind are read, and how to choose another kind."""
    how = {
        "text": f"documents under {text_key!r}",
        "ids": "token ids under 'input_ids'",
        "prompt": "prompts with completions, loss on the completions",
        "messages": "conversations under 'messages', loss on what the assistant says",
        "sharegpt": "conversations of from and value (ShareGPT), loss on what the assistant says",
        "alpaca": "instructions with outputs (Alpaca), loss on the outputs",
    }[kind]
    others = [name for name in get_args(Kind) if name != kind]
    return f"{how}. To read them otherwise pass records=, one of {', '.join(others)}"


def messages_of(record: dict[str, Any], kind: Kind) -> tuple[list[Message], list[Any] | None, int]:
    """Return a conversation's messages, its tools, and how many messages at its start are prompt.

    Raises:
        ValueError: for what is no conversation of the kind.
    """
    tools = _tools(record.get("tools"))
    if kind == "alpaca":
        return _alpaca(record), tools, 0
    if kind == "sharegpt":
        return _sharegpt(record), tools, 0
    if kind == "prompt":
        return [*record["prompt"], *record["completion"]], tools, len(record["prompt"])
    return record["messages"], tools, 0


def alpaca_prompt(record: dict[str, Any]) -> str:
    """Return an Alpaca record's instruction, with its input below where there is one."""
    asked, given = record.get("instruction"), record.get("input") or ""
    if not isinstance(asked, str) or not isinstance(given, str) or not isinstance(record.get("output"), str):
        raise ValueError("instruction, input and output must be strings. Mend or remove the record.")
    return f"{asked}\n\n{given}" if given else asked


def _alpaca(record: dict[str, Any]) -> list[Message]:
    said, history = _system(record), record.get("history") or []
    for turn in history if isinstance(history, list | tuple) else [history]:
        if not isinstance(turn, list | tuple) or len(turn) != 2 or not all(isinstance(x, str) for x in turn):
            raise ValueError(
                "history must be a list of [question, answer], all strings. Mend or remove the record."
            )
        said += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    return [
        *said,
        {"role": "user", "content": alpaca_prompt(record)},
        {"role": "assistant", "content": record["output"]},
    ]


def _sharegpt(record: dict[str, Any]) -> list[Message]:
    turns = record.get("conversations", record.get("conversation"))
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("conversations must be a list of {'from': ..., 'value': ...}. Mend or remove it.")
    return _system(record) + [_turn(turn) for turn in turns]


def _system(record: dict[str, Any]) -> list[Message]:
    said = record.get("system") or ""
    if not isinstance(said, str):
        raise ValueError(f"system is a {type(said).__name__}; wanted a string. Mend or remove the record.")
    return [{"role": "system", "content": said}] if said else []


def _turn(turn: dict[str, Any]) -> Message:
    if "role" in turn:
        return turn
    who, value = turn.get("from"), turn.get("value")
    learned = {key: turn[key] for key in LEARNED if key in turn}
    if who in _CALLS:
        return {**learned, "role": "assistant", "content": "", "tool_calls": _calls(value)}
    if not isinstance(who, str) or who not in _ROLES or not isinstance(value, str):
        raise ValueError(
            f"a turn is from {who!r} with a value of type {type(value).__name__}. Known are "
            f"{', '.join((*_ROLES, *_CALLS))}, with strings. Rename it, or remove the record."
        )
    return {**learned, "role": _ROLES[who], "content": value}


def _calls(value: Any) -> list[dict[str, Any]]:
    found = parse_json(value) if isinstance(value, str) else value
    calls = found if isinstance(found, list) else [found]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise ValueError(
            "a function call holds no JSON of {'name': ..., 'arguments': ...}. Mend or remove the record."
        )
    return [{"type": "function", "function": call} for call in calls]


def _tools(value: Any) -> list[Any] | None:
    found = parse_json(value) if isinstance(value, str) and value.strip() else value
    if isinstance(found, Bad) or not isinstance(found, list | None):
        raise ValueError("tools are no list, nor JSON of one. Mend or remove the record.")
    return found or None
