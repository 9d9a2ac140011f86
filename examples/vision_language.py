"""Train a vision-language model on packs of images with captions; no image or caption sees another's.

python examples/vision_language.py

An image is a coloured square on black, of any height and width; its caption says where the square is. A
small Qwen2.5-VL and its image processor are built from configs, so that nothing has to be downloaded.
"""

import argparse
import random

import lightning as L
import numpy as np
import torch
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen2VLImageProcessorPil

from lightning_thd import THDDataModule, THDThroughputMonitor
from lightning_thd.data import ByteTokenizer
from lightning_thd.module import CausalLMModule
from lightning_thd.precision import fastest_precision

START, END, IMAGE, VIDEO, VOCAB = 260, 261, 262, 263, 264  # after the 260 ids of the byte tokenizer
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
PATCH = {"patch_size": 8, "temporal_patch_size": 2}


def make_model() -> torch.nn.Module:
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4},
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 128,
        "spatial_merge_size": 2,
        "window_size": 32,
        "fullatt_block_indexes": [1],
        **PATCH,
    }
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    marks = {"vision_start_token_id": START, "vision_end_token_id": END}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids, **marks)
    return AutoModelForImageTextToText.from_config(config, attn_implementation="thd").train()


class Squares(torch.utils.data.Dataset):
    """``[i]`` gives ids, labels, M-RoPE positions and patches of one image with its caption."""

    def __init__(self, count: int, model: torch.nn.Module) -> None:
        self.count, self.rope = count, model.model.get_rope_index
        self.processor = Qwen2VLImageProcessorPil(merge_size=2, min_pixels=256, max_pixels=65536, **PATCH)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        draw = random.Random(i)
        height, width = draw.randrange(32, 129, 16), draw.randrange(32, 129, 16)
        colour, down, right = draw.choice([*COLOURS]), draw.random() < 0.5, draw.random() < 0.5
        image = np.zeros((height, width, 3), np.uint8)
        y, x = height // 2 * down, width // 2 * right
        image[y : y + height // 2, x : x + width // 2] = COLOURS[colour]
        caption = f"a {colour} square at the {'bottom' if down else 'top'} {'right' if right else 'left'}"

        seen = self.processor(images=[image], return_tensors="pt")
        tokens = int(seen["image_grid_thw"].prod()) // 4  # two by two patches make a token
        words = torch.from_numpy(ByteTokenizer()(caption).astype(np.int64))
        ids = torch.cat([torch.tensor([START] + [IMAGE] * tokens + [END]), words])
        labels = torch.where(ids >= START, -100, ids)  # the loss counts only the caption
        kinds = (ids == IMAGE).int()[None]
        positions, _ = self.rope(ids[None], kinds, image_grid_thw=seen["image_grid_thw"])
        return {"input_ids": ids, "labels": labels, "position_ids": positions[:, 0], **seen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    L.seed_everything(0)
    model = make_model()
    monitor = THDThroughputMonitor(peak="measure", every_n_steps=5)
    precision = fastest_precision()  # bf16-mixed on a GPU that has it
    trainer = L.Trainer(max_steps=args.steps, precision=precision, callbacks=[monitor], log_every_n_steps=5)
    trainer.fit(CausalLMModule(model, lr=3e-3), THDDataModule(Squares(1000, model), capacity=2_048))
    print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
