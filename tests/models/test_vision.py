"""Vision-language models: images, M-RoPE positions and the vision tower inside a pack."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers

from lightning_thd.batch import THDBatch
from lightning_thd.loss import causal_lm_loss
from lightning_thd.models import packed, register_thd
from tests.models.matrix import Result, assert_same, checkpoint, result_of
from tests.wide import nothing_narrower

register_thd()
IMAGE = 60
VIDEO = 61
START = 62
END = 63
TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
}  # fmt: skip
VISION = {
    "depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "in_channels": 3,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.1,
    "intermediate_size": 48, "out_hidden_size": 32,
}  # fmt: skip
# Rows are T, H, W of the patches of every image; four patches are merged into one token.
GRIDS = ([(1, 4, 4)], [], [(1, 4, 8), (1, 4, 4)], [(2, 4, 4)])
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VLConfig", TEXT, {**VISION, "embed_dim": 32, "mlp_ratio": 2}),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", TEXT, {**VISION, "window_size": 16, "fullatt_block_indexes": [1]}),
    "qwen3_vl": (
        "Qwen3VLConfig",
        {**TEXT, "head_dim": 8},
        {**VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
}


def build(name: str, attention: str) -> Any:
    config_name, text, vision = FAMILIES[name]
    config = getattr(transformers, config_name)(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForImageTextToText.from_config(config, attn_implementation=attention)


def sample(grids: list[tuple[int, int, int]], generator: torch.Generator) -> dict[str, Tensor]:
    """One conversation: words, then every image between its markers, then words."""
    parts = [torch.randint(3, 50, (3,), generator=generator)]
    patches = []
    for t, h, w in grids:
        words = torch.randint(3, 50, (2,), generator=generator)
        parts += [torch.tensor([START]), torch.full((t * h * w // 4,), IMAGE), torch.tensor([END]), words]
        patches.append(torch.randn(t * h * w, 3 * 2 * 4 * 4, generator=generator))
    out = {"input_ids": torch.cat(parts)}
    if grids:
        out |= {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}
    return out


def samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [sample(grids, generator) for grids in GRIDS]


def pack(model: Any) -> THDBatch:
    rows = []
    for row in samples():
        ids = row["input_ids"][None]
        kinds = (ids == IMAGE).int()
        positions, _ = model.model.get_rope_index(ids, kinds, image_grid_thw=row.get("image_grid_thw"))
        rows.append({**row, "position_ids": positions[:, 0]})
    return THDBatch.collate(rows)


@cache
def oracle(name: str) -> tuple[dict[str, Any], Result]:
    model = build(name, "eager").eval()
    logits = []
    targets = []
    for row in samples():
        ids = row["input_ids"][None]
        kwargs = {key: value for key, value in row.items() if key != "input_ids"}
        out = model(input_ids=ids, mm_token_type_ids=(ids == IMAGE).int(), use_cache=False, **kwargs)
        logits.append(out.logits[0])
        targets.append(torch.cat([ids[0, 1:], torch.tensor([-100])]))
    return model.state_dict(), result_of(model, logits, targets)


def run(model: nn.Module) -> Result:
    batch = pack(model)
    assert batch.position_ids.shape == (3, batch.input_ids.shape[0])
    logits = batch.unpack(model(**batch.hf_kwargs()).logits)
    return result_of(model, logits, batch.unpack(batch.targets))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_equals_unpacked_with_images(name: str, checkpointing: bool) -> None:
    model = build(name, "thd")
    state, want = oracle(name)
    model.load_state_dict(state)
    model.train(checkpointing)
    if checkpointing:
        checkpoint(model, use_reentrant=False)
    assert any("visual" in key for key in want.gradients)
    assert_same(run(model), want, tolerance=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_changed_image_moves_no_other_sequence(name: str) -> None:
    model = build(name, "thd").eval()
    batch = pack(model)
    first = batch.lengths[0]
    patches = batch.extras["pixel_values"].clone()
    patches[:16] += 1
    with torch.no_grad(), packed(batch):
        before = model(**batch.hf_kwargs()).logits[0]
        changed = batch.replace(extras={**batch.extras, "pixel_values": patches})
        after = model(**changed.hf_kwargs()).logits[0]
    assert not torch.equal(before[:first], after[:first])
    assert torch.equal(before[first:], after[first:])


def rows_with_shared_images(model: Any) -> list[dict[str, Tensor]]:
    """Draw answers to four prompts, of which two differ in a picture only, and one longer conversation."""
    generator = torch.Generator().manual_seed(3)
    prompts = [sample(grids, generator) for grids in ([(1, 4, 4), (1, 4, 8)], [(2, 4, 4)], [])]
    other = torch.randn(prompts[0]["pixel_values"].shape, generator=generator)
    prompts.append({**prompts[0], "pixel_values": other})
    rows = [
        {**prompt, "input_ids": torch.cat([prompt["input_ids"], torch.randint(3, 50, (2 + n,))])}
        for prompt in prompts
        for n in range(3)
    ]
    turn = sample([(1, 4, 4)], generator)
    rows.append({key: torch.cat([rows[0][key], turn[key]]) for key in turn})

    for row in rows:
        ids = row["input_ids"][None]
        grids = row.get("image_grid_thw")
        row["mm_token_type_ids"] = (ids[0] == IMAGE).int()
        positions, _ = model.model.get_rope_index(ids, row["mm_token_type_ids"][None], image_grid_thw=grids)
        row["position_ids"] = positions[:, 0]
        row |= {key: value.double() for key, value in row.items() if value.is_floating_point()}

    return rows


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x == "qwen2_5_vl" else pytest.mark.slow) for x in FAMILIES]
)
def test_images_of_a_shared_prompt_run_through_the_tower_once(name: str) -> None:
    model = build(name, "thd").double().train()
    patches = list[int]()
    results = []
    tower = model.model.visual.patch_embed
    tower.register_forward_pre_hook(lambda _, given: patches.append(given[0].shape[0]))
    rows = rows_with_shared_images(model)

    with nothing_narrower():
        for share in (False, True):
            model.zero_grad()
            batch = THDBatch.collate(rows, share_prefixes=share)
            loss = causal_lm_loss(model, batch)
            loss.backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            results.append([loss.detach(), *gradients])

    # A conversation with one picture more than another shares none: they are in one tensor.
    assert patches == [3 * (48 + 32 + 48) + 64, 48 + 32 + 48 + 64]
    assert batch.stats.vision_patches == patches[1]

    scale = max(float(x.abs().max()) for x in results[0])
    for a, b in zip(*results, strict=True):
        assert float((a - b).abs().max()) <= 1e-9 * scale


def test_images_with_plain_positions_are_refused() -> None:
    model = build("qwen2_vl", "thd")
    batch = pack(model)
    kwargs = {**batch.hf_kwargs(), "position_ids": batch.position_ids[:1]}
    with pytest.raises(ValueError, match=r"images .* needs position_ids \[3, 1, T\].*get_rope_index"):
        model(**kwargs)
    with pytest.raises(ValueError, match="got pixels but no grid: add image_grid_thw"):
        model(**{**batch.hf_kwargs(), "image_grid_thw": None})
