"""A conversation with images and a processor -> ids, labels, positions and pixels of one sample.

The processor's chat template writes the conversation, with a placeholder for each image. The placeholder is
repeated once for each token of the image, and the size of the image gives the number of these tokens. So the
tokens of a row are counted without decoding its images.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lightning_thd._checks import as_tensor, refuse_missing
from lightning_thd._imports import require
from lightning_thd._private import private_of
from lightning_thd.batch.keys import IGNORE_INDEX
from lightning_thd.data.read.chat import ImagePlaceholders, encode_chat
from lightning_thd.data.read.conversations import (
    Conversation,
    Kind,
    Records,
    is_kind,
    kind_of,
    messages_of,
)
from lightning_thd.data.read.encode import label_of
from lightning_thd.data.read.images import decode, open_image, size_of, with_images
from lightning_thd.data.read.text import tokenizer_fingerprint

_EDGES = ("<|vision_start|>", "<|vision_end|>")  # tokens around an image
IntArray = NDArray[np.int64]
CONVERSATIONS = ("messages", "sharegpt", "prompt", "alpaca")
_GRIDS = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor")  # an image is a grid of patches
_ONE_SIZE = ("LlavaProcessor",)  # all images are scaled to one size


class VisionChat:
    """Renders conversations with images, using a transformers processor, its name, or its saved folder."""

    def __init__(self, processor: Any, records: Records = "auto", metadata_keys: Sequence[str] = ()) -> None:
        self.records = records
        self.metadata_keys = tuple(metadata_keys)
        self.processor = _opened(processor)
        class_names = [kind.__name__ for kind in type(self.processor).__mro__]
        self.has_grids = any(name in class_names for name in _GRIDS)
        if not self.has_grids and not any(name in class_names for name in _ONE_SIZE):
            raise ValueError(
                f"processor={class_names[0]} cannot render conversations for packs. Use one of "
                f"{', '.join((*_GRIDS, *_ONE_SIZE))}."
            )

        self.images = self.processor.image_processor
        # A copy, because the processor's template may differ from that of the user's tokenizer.
        self.tokenizer = copy.copy(self.processor.tokenizer)
        template = getattr(self.processor, "chat_template", None)
        if template:
            self.tokenizer.chat_template = template

    @property
    def _image_ids(self) -> list[int]:
        """Return the ids that stand for an image or mark its edges; no answer writes them."""
        vocabulary = self.tokenizer.get_vocab()
        tokens = (self.processor.image_token, *_EDGES)
        return [vocabulary[token] for token in tokens if token in vocabulary]

    def fingerprint(self) -> str | None:
        """Return a text that identifies tokenizer and image settings; None if that is impossible."""
        tokenizer = tokenizer_fingerprint(self.tokenizer)
        if tokenizer is None:
            return None
        plain = {name: value for name, value in vars(self.processor).items() if isinstance(value, str | int)}
        settings = [self.records, self.metadata_keys, self.images.to_dict(), plain]
        text = json.dumps(settings, sort_keys=True, default=str)
        return f"{type(self.processor).__name__} {tokenizer} {text}"

    def sample(
        self, record: Mapping[str, Any], folder: Path | None, *, pixels: bool = True
    ) -> dict[str, Any]:
        """Render a record as a sample; without ``pixels``, images give their sizes and are not decoded."""
        kind = self.records if self.records in CONVERSATIONS else kind_of(dict(record), "text")
        if kind not in CONVERSATIONS or not is_kind(dict(record), kind):
            raise ValueError(
                f"the record ({sorted(record)[:8]}) is not a conversation, and processor= renders only those."
            )

        record = {name: x for name, x in record.items() if name not in self.metadata_keys}
        conversation = messages_of(record, cast("Kind", kind), self.metadata_keys)
        label = label_of(record)
        messages, sources = with_images(conversation.messages, record)

        images = [open_image(source, folder) for source in sources]
        try:
            sample = self._rendered(conversation._replace(messages=messages), images, pixels=pixels)
        finally:
            for image, source in zip(images, sources, strict=True):
                if image is not source:  # one that the user opened stays open
                    image.close()

        if label is not None:
            sample["label"] = label
        return sample

    def _rendered(self, conversation: Conversation, images: list[Any], *, pixels: bool) -> dict[str, Any]:
        """Return ids, labels and image inputs of a conversation; its messages have a part for each image."""
        sizes = [size_of(image) for image in images]
        grids = [self._grid(size) for size in sizes]
        encoded, mask = encode_chat(
            self.tokenizer,
            conversation.messages,
            tools=conversation.tools,
            skip=conversation.skip,
            options=conversation.options,
            placeholders=ImagePlaceholders(self.processor.image_token, self._tokens(sizes, grids)),
        )

        ids = np.asarray(encoded, np.int64)
        is_learned = mask & ~np.isin(ids, self._image_ids)
        sample: dict[str, Any] = {"input_ids": ids, "labels": np.where(is_learned, ids, IGNORE_INDEX)}
        if not images:
            return sample

        decoded = [decode(image) for image in images] if pixels else None
        return sample | self._inputs(ids, grids, decoded)

    def _grid(self, size: tuple[int, int]) -> tuple[int, int, int]:
        """Return the frames, rows and columns of patches of an image from its height and width."""
        if not self.has_grids:
            height, width = self._one_size
            patch = self.processor.patch_size
            return 1, height // patch, width // patch

        images: Any = self.images
        resize = sys.modules[type(images).__module__].smart_resize  # the function that the processor calls
        factor = images.patch_size * images.merge_size
        height, width = resize(
            *size, factor, min_pixels=images.size["shortest_edge"], max_pixels=images.size["longest_edge"]
        )
        return 1, height // images.patch_size, width // images.patch_size

    @property
    def _one_size(self) -> tuple[int, int]:
        """Return the height and width to which a processor without grids scales all images."""
        size = self.images.crop_size if self.images.do_center_crop else self.images.size
        return size["height"], size["width"]

    def _tokens(self, sizes: Sequence[tuple[int, int]], grids: Sequence[tuple[int, int, int]]) -> list[int]:
        """Return the number of tokens of each image."""
        if self.has_grids:
            return [rows * columns // self.images.merge_size**2 for _, rows, columns in grids]
        count = private_of(self.processor, "transformers.ProcessorMixin._get_num_multimodal_tokens")
        return list(count(image_sizes=sizes)["num_image_tokens"])

    def _inputs(
        self, ids: IntArray, grids: list[tuple[int, int, int]], images: list[Any] | None
    ) -> dict[str, Any]:
        """Return the model's inputs beside the ids; without ``images``, they hold no real pixels."""
        inputs: dict[str, Any] = {}
        if self.has_grids:
            token = self.tokenizer.convert_tokens_to_ids(self.processor.image_token)
            inputs["position_ids"] = image_positions(ids, token, grids, merge=self.images.merge_size)
            inputs["image_grid_thw"] = torch.tensor(grids)
        if images is None:
            if not self.has_grids:  # a tensor of the right shape that takes no memory
                inputs["pixel_values"] = torch.zeros(()).expand(len(grids), 3, *self._one_size)
            return inputs

        processed = self.images(images=images, return_tensors="pt")
        if self.has_grids and not torch.equal(processed["image_grid_thw"], inputs["image_grid_thw"]):
            raise ValueError(
                f"the processor made grids {processed['image_grid_thw']}, but {grids} were counted."
            )
        inputs["pixel_values"] = as_tensor(np.asarray(processed["pixel_values"]))
        return inputs


def image_positions(
    ids: IntArray, image_token: int, grids: Sequence[tuple[int, int, int]], *, merge: int
) -> IntArray:
    """Return M-RoPE positions (frame, row, column), int64 ``[3, n]``, of ids with placeholders of images.

    The three positions of a text token are equal, and count up. The tokens of an image, ``merge`` x ``merge``
    patches each, share one frame. Text after it begins at the image's first position plus its longer side.
    """
    positions = np.empty((3, len(ids)), np.int64)
    placeholders = np.flatnonzero(ids == image_token)
    next_grid = iter(grids)
    token = 0  # the first without positions
    position = 0  # the first that is free
    while token < len(ids):
        later = placeholders[placeholders >= token]
        image_start = int(later[0]) if len(later) else len(ids)
        positions[:, token:image_start] = position + np.arange(image_start - token)
        position += image_start - token
        if image_start == len(ids):
            break

        _, height, width = next(next_grid)
        rows = height // merge
        columns = width // merge
        token = image_start + rows * columns
        positions[:, image_start:token] = position + np.indices((1, rows, columns)).reshape(3, -1)
        position += max(rows, columns)
    return positions


def _opened(processor: Any) -> Any:
    """Open a processor by its name or path; return any other value as it is."""
    if not isinstance(processor, str | Path):
        return processor
    refuse_missing(str(processor), "Pass a folder that save_pretrained() wrote, or a processor's name.")
    transformers = require("transformers", feature=f"processor={str(processor)!r}")
    return transformers.AutoProcessor.from_pretrained(processor)


@dataclass(frozen=True, slots=True)
class ChatRows(Dataset[dict[str, Any]]):
    """A dataset of rendered conversations; ``measured`` gives a row without decoding its images."""

    records: Any  # ``[i]`` gives (place, record, folder of its images)
    chat: VisionChat

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.measured(i, pixels=True)

    def measured(self, i: int, *, pixels: bool = False) -> dict[str, Any]:
        """Return ids, labels and image sizes of a row, and with ``pixels`` also the pixels."""
        place, record, folder = self.records[i]
        try:
            return self.chat.sample(record, folder, pixels=pixels)
        except ValueError as err:
            raise ValueError(f"{place}: {err}") from err
