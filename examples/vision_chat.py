"""Train a vision-language model on chats with images, from a file of chats and a processor.

python examples/vision_chat.py

The script writes images and chats about them. It builds a small Llava and its processor without a download.
"""

import argparse
import json
from pathlib import Path

import lightning as L
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, LlavaConfig, LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from lightning_thd import THDDataModule
from lightning_thd.module import CausalLMModule

PARTS = "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>" + PARTS + "</s>{% endfor %}"
LAYERS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def write_chats(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    with (folder / "chats.jsonl").open("w") as file:
        for i, colour in enumerate(["red", "green", "blue", "white"] * 50):
            Image.new("RGB", (24 + i % 40, 40), colour).save(folder / f"{i}.png")
            asked = [{"type": "image", "path": f"{i}.png"}, {"type": "text", "text": "Which colour?"}]
            chat = [("user", asked), ("assistant", [{"type": "text", "text": colour}])]
            messages = [{"role": role, "content": content} for role, content in chat]
            file.write(json.dumps({"messages": messages}) + "\n")
    return folder / "chats.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    L.seed_everything(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # its own order differs between processes
    signs = Tokenizer(models.BPE({sign: i for i, sign in enumerate(alphabet)}, []))
    signs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=signs, eos_token="</s>")
    tokenizer.add_tokens(["<user>", "<assistant>", "<image>"], special_tokens=True)
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    sizes = {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    processor = LlavaProcessor(images, tokenizer, chat_template=TEMPLATE, **sizes)
    vision = {**LAYERS, "model_type": "clip_vision_model", "patch_size": 14, "image_size": 28}
    text = {**LAYERS, "model_type": "llama", "vocab_size": len(tokenizer)}
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=processor.image_token_id)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="thd")
    data = THDDataModule(write_chats(Path("vision_chat")), processor=processor, capacity=512, max_patches=64)
    L.Trainer(max_steps=args.steps, log_every_n_steps=5).fit(CausalLMModule(model, lr=3e-3), data)


if __name__ == "__main__":
    main()
