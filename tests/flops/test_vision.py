from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_thd.flops import FlopsModel, SeqStats
from tests.data.test_patches import TOWER
from tests.flops.families import VISION, vision_config

GRID = [[1, 6, 10], [2, 8, 4]]  # an image, and a video of two frames


def tower_flops(config: Any) -> Counter[str]:
    """Torch's count of one forward pass of the vision tower and projector, by operator."""
    from transformers import AutoModelForImageTextToText

    config.vision_config._attn_implementation = "eager"
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    visual = model.model.visual
    patches = sum(frames * rows * columns for frames, rows, columns in GRID)
    width = 3 * config.vision_config.temporal_patch_size * 14 * 14
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        visual(torch.zeros(patches, width), grid_thw=torch.tensor(GRID))
    by_op: Counter[str] = Counter()
    for op, flops in counter.get_flop_counts()["Global"].items():
        by_op[str(op).split(".")[-1]] += flops
    return by_op


@pytest.mark.parametrize("family", VISION)
def test_patches_tower_and_projector_equal_torchs_counter(family: str) -> None:
    config = vision_config(family)
    model = FlopsModel.from_config(config)
    stats = SeqStats.from_lengths([], image_grid_thw=GRID, vision_windows=model.vision_windows)
    by_op = tower_flops(config)
    attention = matmuls = 0
    for layer in model.layers:
        for term in layer.terms if layer.path.startswith("visual") else ():
            one = FlopsModel(name="", layers=(type(layer)(path="", terms=(term,)),), merge=model.merge)
            flops = one.forward_flops(stats).vision
            attention += flops if term.name == "vision_attention" else 0
            matmuls += flops if term.name != "vision_attention" else 0
    assert attention > 0
    assert by_op["convolution"] > 0
    assert matmuls == by_op["mm"] + by_op["addmm"] + by_op["convolution"]
    assert attention == by_op["bmm"]


def test_equals_the_published_formula() -> None:
    """3{depth[(8h^2 + 4hI)P + 4h sum p^2] + (1 + deepstack) merged (2(h m^2)^2 + 2 h m^2 out)}, patches."""
    model = FlopsModel.from_config(vision_config("qwen3_vl"))
    stats = SeqStats.from_cu_seqlens(None, shape=(0, 0), image_grid_thw=GRID)
    hidden, inner, depth, merge, out = 48, 56, 3, 2, 96
    patches, squares = 60 + 64, 60**2 + 2 * 32**2
    wide = hidden * merge**2
    expected = 3 * (
        depth * ((8 * hidden**2 + 4 * hidden * inner) * patches + 4 * hidden * squares)
        + (1 + 2) * (patches // merge**2) * (2 * wide**2 + 2 * wide * out)
    )
    expected += 2 * 2 * (3 * 2 * 14 * 14) * hidden * patches  # forward and weight gradient of the convolution
    flops = model.training_flops(stats)
    assert (flops.vision, flops.linear, flops.attention) == (expected, 0, 0)


def test_llavas_tower_equals_torchs_counter() -> None:
    from transformers import AutoModelForImageTextToText, LlavaConfig

    text = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
    config = LlavaConfig(vision_config=TOWER, text_config={"model_type": "llama", **text})
    vision = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        vision.get_image_features(torch.zeros(5, 3, 56, 56))
    model = FlopsModel.from_config(config)
    stats = SeqStats.from_lengths([], image_grid_thw=[[5, 4, 4]])
    # The class token's work is spread over 16 patches and rounded.
    assert model.forward_flops(stats).vision == pytest.approx(counter.get_total_flops(), rel=1e-3)
    assert model.vision.patch == 14
    assert model.for_module(vision).training_flops(stats).vision == model.training_flops(stats).vision
    vision.model.vision_tower.requires_grad_(False)
    frozen = model.for_module(vision).training_flops(stats).vision
    assert model.forward_flops(stats).vision < frozen < 0.6 * model.training_flops(stats).vision
