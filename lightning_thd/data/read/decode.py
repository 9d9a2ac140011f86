"""Bytes of a record -> its text or parsed JSON, or a reason why they are neither."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Bad:
    """A record that cannot be read, and the reason."""

    reason: str


def parse_json(text: str | bytes) -> Any | Bad:
    """Parse JSON; return ``Bad`` for anything Python refuses, such as too deep or too large numbers."""
    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text)
    except UnicodeDecodeError as err:
        return Bad(not_text(err))
    except json.JSONDecodeError as err:
        return Bad(f"not JSON ({err.msg} at column {err.colno}). Mend or remove it.")
    except (RecursionError, ValueError) as err:
        return Bad(f"JSON that cannot be read ({err}). Remove it.")


def decode(data: bytes) -> str | Bad:
    """Decode UTF-8, with or without a byte-order mark; return ``Bad`` for other bytes."""
    try:
        text = data.removeprefix(b"\xef\xbb\xbf").decode()
    except UnicodeDecodeError as err:
        return Bad(not_text(err))
    if "\0" in text:
        return Bad(null_byte(text.index("\0")))
    return text


def null_byte(at: int) -> str:
    """Return the message on a null byte at a position of a text."""
    return f"holds a null byte at {at}, so it is no text. Leave it out."


def not_text(err: UnicodeDecodeError, start: int = 0) -> str:
    """Return the message on bytes that are no UTF-8, in a part that begins at byte ``start``."""
    byte = err.object[err.start]
    return f"not UTF-8 (byte 0x{byte:02x} at {start + err.start}). Write it anew in UTF-8, or leave it out."
