"""Small processors of transformers, models and chats with images, made without any download."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tests.models import test_vision as towers

SPECIAL = ["<|im_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<image>"]
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAVA = QWEN.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>")
TOWER = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "patch_size": 14,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
}
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava")


@cache
def tokenizer() -> Any:
    letters = {sign: i for i, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|pad|>", additional_special_tokens=SPECIAL
    )


@cache
def processor(family: str) -> Any:
    if family == "llava":
        images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
        return transformers.LlavaProcessor(
            image_processor=images,
            tokenizer=tokenizer(),
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=LLAVA,
        )
    names = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
    base = getattr(transformers, f"{names[family]}Processor")

    class Small(base):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, name: str, value: Any) -> Any:
            """Allow for no video processor, which needs torchvision."""

    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=4096
    )
    return Small(image_processor=images, tokenizer=tokenizer(), chat_template=QWEN)


def model(family: str, attention: str) -> Any:
    """Return a small model whose vocabulary is the tokenizer's."""
    ids = {name: tokenizer().convert_tokens_to_ids(name) for name in SPECIAL}
    if family == "llava":
        text = {**towers.TEXT, "model_type": "llama", "vocab_size": len(tokenizer())}
        del text["rope_parameters"]
        config = transformers.LlavaConfig(
            vision_config=TOWER, text_config=text, image_token_id=ids["<image>"], image_seq_length=4
        )
    else:
        name, text, vision = towers.FAMILIES[family]
        config = getattr(transformers, name)(
            text_config={**text, "vocab_size": len(tokenizer())},
            vision_config=vision,
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
        )

    torch.manual_seed(0)
    return transformers.AutoModelForImageTextToText.from_config(config, attn_implementation=attention)


COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


def image(i: int) -> Image.Image:
    height = 12 + 9 * (i % 4)
    width = 40 - 7 * (i % 5)
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[2:, 3:] = [*COLOURS.values()][i % 3]
    return Image.fromarray(pixels)


def chat(i: int, *images: Any) -> dict[str, Any]:
    """A conversation about as many images as are given."""
    seen = [{"type": "image", "path": one} for one in images]
    colour = [*COLOURS][i % 3]
    return {
        "messages": [
            {"role": "user", "content": [*seen, {"type": "text", "text": "what colour?"}]},
            {"role": "assistant", "content": colour},
            *([{"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}] * (i % 2)),
        ]
    }


def write_chats(folder: Path, count: int = 12) -> Path:
    """Write images, and chats about none, one or two of them, their paths beside the file."""
    (folder / "pictures").mkdir()
    lines = []
    for i in range(count):
        names = [f"pictures/{i}-{k}.png" for k in range((1, 0, 2, 1)[i % 4])]
        for k, name in enumerate(names):
            image(i + k).save(folder / name)
        lines.append(json.dumps(chat(i, *names)))
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "chats.jsonl"
