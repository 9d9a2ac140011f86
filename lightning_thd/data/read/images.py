"""A conversation with images -> messages whose content is a list of parts, and the source of each image.

A source is a path, a ``data:`` URL, bytes, an opened image, or a dict with ``bytes`` or ``path``. It is
under ``image``, ``path`` or ``url`` of a part ``{"type": "image"}``, or in ``{"image_url": {"url": ...}}``. A
part without a source takes the next entry of the record's ``images``, and so does each ``<image>`` in a text
if the record has ``images``.
"""

from __future__ import annotations

import base64
import io
import re
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lightning_thd._imports import require
from lightning_thd.batch.keys import names
from lightning_thd.data.read.message_keys import Message, check_part

_COLUMNS = ("images", "image")
_SOURCES = ("image", "path", "url", "image_url")
_ONLY_IMAGES = "{}, but only text and images are rendered; audio cannot be packed. Give video as images."
# A placeholder in a text, with the blank before and the line end behind it that datasets write around it.
_PLACE = re.compile(r"\s?<image>\n?")
_DATA = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
_ORIENTATION = 0x0112  # the EXIF tag with a number from 1 to 8; 5 to 8 swap the sides of an image


def with_images(messages: list[Message], record: Mapping[str, Any]) -> tuple[list[Message], list[Any]]:
    """Return messages whose content is a list of parts, and the source of each image, in order."""
    for name in names("raw", "audio"):
        if name not in _COLUMNS and record.get(name) is not None and record[name] != []:
            raise ValueError(_ONLY_IMAGES.format(f"the record holds {name!r}"))
    of_record = list(_images_of(record))
    unplaced = deque(of_record)
    sources: list[Any] = []
    changed: list[Message] = []
    for message in messages:
        content = message.get("content")
        if not isinstance(content, str | list):
            changed.append(message)
            continue
        parts = []
        for part in _parts(content, split=bool(of_record)):
            if part.get("type") == "text":
                parts.append(part)
                continue
            source = _source_of(part)
            if source is None:
                if not unplaced:
                    raise ValueError(
                        f"the messages have more places than the {len(of_record)} images given. Add one."
                    )
                source = unplaced.popleft()
            sources.append(source)
            parts.append({"type": "image"})
        changed.append({**message, "content": parts})

    if unplaced:
        raise ValueError(
            f"the record has {len(of_record)} images, but its messages have places for "
            f"{len(of_record) - len(unplaced)}. Add <image> for each."
        )
    return changed, sources


def _images_of(record: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the images that a record holds beside its messages."""
    for name in _COLUMNS:
        value = record.get(name)
        if value is not None:
            yield from value if isinstance(value, list | tuple) else [value]


def _source_of(part: Mapping[str, Any]) -> Any:
    """Return the source of the image in a content part; None if it is the next image of the record."""
    kind = part.get("type")
    if kind not in ("image", "image_url"):
        raise ValueError(_ONLY_IMAGES.format(f"a message holds a part of type {kind!r}"))
    check_part(part)
    source = next((part[name] for name in _SOURCES if part.get(name) is not None), None)
    if isinstance(source, Mapping) and "url" in source:
        source = source["url"]
    return source


def _parts(content: str | list[Any], *, split: bool) -> Iterator[dict[str, Any]]:
    """Yield the parts of a message's content; with ``split``, texts are cut at ``<image>``."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(part, dict) or (part.get("type") == "text" and not isinstance(text, str)):
            raise ValueError(f"a message holds the part {part!r:.60}, not a dict with 'type' and 'text'.")
        if not split or text is None or "<image>" not in text:
            yield part
            continue
        for number, words in enumerate(_PLACE.split(text)):
            if number > 0:  # there is a placeholder before each piece but the first
                yield {"type": "image"}
            if words:
                yield {"type": "text", "text": words}


def open_image(source: Any, folder: Path | None) -> Any:
    """Open an image with Pillow, without decoding its pixels; relative paths start at ``folder``."""
    pillow = require("PIL.Image", feature="images in conversations")
    if isinstance(source, Mapping):  # as datasets stores images
        has_bytes = source.get("bytes") is not None
        source = source["bytes"] if has_bytes else source.get("path")

    if hasattr(source, "convert") and hasattr(source, "size"):  # an opened image
        return source

    if isinstance(source, str | Path):
        source = _bytes_or_path(str(source), folder)
    if isinstance(source, bytes | bytearray | memoryview):
        source = io.BytesIO(bytes(source))
    if not isinstance(source, Path | io.BytesIO):
        raise ValueError(f"an image is given as {type(source).__name__}; wanted a path or bytes.")

    try:
        return pillow.open(source)
    except (OSError, ValueError, pillow.DecompressionBombError) as err:
        name = source if isinstance(source, Path) else "the bytes of an image"
        raise ValueError(f"{name} cannot be opened as an image ({err}). Fix or remove the record.") from err


def _bytes_or_path(text: str, folder: Path | None) -> bytes | Path:
    """Return the bytes of an image in a ``data:`` URL, or the path that a text names."""
    data_url = _DATA.match(text)
    if data_url:
        return base64.b64decode(text[data_url.end() :], validate=True)
    if "://" in text:
        raise ValueError(f"the image {text!r:.60} is an address. Download images and give their paths.")
    path = Path(text)
    return path if path.is_absolute() or folder is None else folder / path


def size_of(image: Any) -> tuple[int, int]:
    """Return the height and width of an opened image from its header, rotated as its EXIF data asks."""
    width, height = image.size
    orientation = image.getexif().get(_ORIENTATION, 1) if _has_exif(image) else 1
    swaps_sides = orientation >= 5
    return (width, height) if swaps_sides else (height, width)


def _has_exif(image: Any) -> bool:
    """Return whether EXIF data can be read without decoding; a PNG may store it after the pixels."""
    return image.format != "PNG" or "exif" in image.info


def decode(image: Any) -> Any:
    """Decode an opened image to RGB, rotated as its EXIF data asks."""
    ops = require("PIL.ImageOps", feature="images in conversations")
    try:
        upright = ops.exif_transpose(image) if _has_exif(image) else image
        return _in_eight_bits(upright).convert("RGB")
    except OSError as err:
        raise ValueError(f"an image cannot be decoded ({err}). Fix or remove the record.") from err


def _in_eight_bits(image: Any) -> Any:
    """Scale a grey image of 16 bits to 8 bits; Pillow would cut its values at 255."""
    if image.mode == "F":
        raise ValueError("an image has floating-point values, whose range is unknown. Save it in 8 bits.")
    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image).astype(np.int64)
    if image.mode == "I" and (values.min() < 0 or values.max() > 2**16 - 1):
        raise ValueError("an image has grey values of more than 16 bits. Save it in 8 or 16 bits.")
    pillow = require("PIL.Image", feature="images in conversations")
    return pillow.fromarray((values // 257).astype(np.uint8))  # 65,535 = 255 x 257
