"""Masks: never built, and refused where their pattern would be lost."""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import masking_utils

from lightning_thd.batch import THDBatch
from lightning_thd.boundaries import Boundaries
from lightning_thd.models import masks, register_thd
from lightning_thd.models.families import plain_masks
from lightning_thd.models.masks import shows_all
from lightning_thd.parallel.shard import shard_batch
from tests.models.families import FAMILIES, build
from tests.models.matrix import packs

register_thd()
NO_BLOCKS = torch.full((1, 6), -1)  # text through a multimodal model: -1 is a token of no image


def causal(window: int | None = None, attention: str = "thd", **arguments: Any) -> Any:
    config = transformers.LlamaConfig(hidden_size=16, num_attention_heads=2)
    config._attn_implementation = attention
    config.sliding_window = window
    positions = arguments.pop("position_ids", torch.tensor([[0, 1, 0, 1, 2, 3]]))
    mask = arguments.pop("attention_mask", None)
    embeds = torch.zeros(1, 6, 16)
    # By place, because 5.24 has another name for the cache, which is None here.
    return masking_utils.create_causal_mask(config, embeds, mask, None, positions, **arguments)


def test_a_mask_that_hides_nothing_more_is_none_or_unread() -> None:
    for kwargs in ({"position_ids": torch.arange(6)[None]}, {"attention_mask": torch.ones(1, 6)}):
        assert causal(**kwargs) is None
    # transformers may not leave out these: see UnreadMask
    for kwargs in ({}, {"block_sequence_ids": NO_BLOCKS}):
        assert isinstance(causal(**kwargs), masks.UnreadMask)
    assert not causal(attention="sdpa")[0, 0, 2, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])}, r"\(1, 6\) hiding tokens.*from_padded"),
        (
            {"or_mask_function": lambda row, head, query, key: key < 3},
            "LlamaConfig: this model needs a mask with a special pattern",
        ),
        ({"block_sequence_ids": torch.tensor([[-1, -1, -1, 0, 0, -1]])}, "mask with a special pattern"),
        (
            {
                "window": 2,
                "position_ids": torch.arange(6)[None],
                "or_mask_function": masking_utils.blockwise_overlay(NO_BLOCKS),
                "and_mask_function": masking_utils.sliding_window_overlay(2),
            },
            "window or chunk of 2, which only its mask carries",
        ),
    ],
)
def test_patterns_that_would_be_lost_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        causal(**dict(arguments))


READ: dict[str, Any] = {
    "added to scores": lambda mask: torch.zeros(1, 2, 6, 6) + mask,
    "added to": lambda mask: mask + 1.0,
    "cut": lambda mask: mask[..., :3],
    "joined": lambda mask: torch.cat([mask, torch.zeros(1, 1, 6, 2)], dim=-1),
    "chosen by": lambda mask: torch.zeros(1, 1, 6, 6).masked_fill(mask, -1.0),
    "its type": lambda mask: mask.dtype,
    "compared": lambda mask: mask == 0,
}


@pytest.mark.parametrize(
    "positions", [torch.arange(6), torch.tensor([0, 1, 0, 1, 2, 3])], ids=["row", "pack"]
)
@pytest.mark.parametrize("way", READ)
def test_a_model_that_reads_its_mask_is_refused(way: str, positions: torch.Tensor) -> None:
    """A model that reads it does not let transformers leave it out; positions may restart or not."""
    mask = causal(position_ids=positions[None], allow_is_causal_skip=False)
    with pytest.raises(ValueError, match=r"LlamaConfig: .* reads its mask.*register_family.*check_packing"):
        READ[way](mask)


class ReadsItsMask(transformers.LlamaModel):  # type: ignore[misc]
    """A family that nobody has listed: its layers get a mask to which a model has added."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        embeds = self.embed_tokens(input_ids)
        positions = kwargs["position_ids"]
        mask = masking_utils.create_causal_mask(
            self.config, embeds, None, None, positions, allow_is_causal_skip=False
        )
        return super().forward(inputs_embeds=embeds, attention_mask=mask * 2.0, **kwargs)


def test_a_family_that_is_not_listed_and_reads_its_mask_is_refused_on_a_pack() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=64, **sizes)
    model = ReadsItsMask._from_config(config, attn_implementation="thd")
    with pytest.raises(ValueError, match=r"LlamaConfig: this model reads its mask.*check_packing"):
        model(**packs()[0].hf_kwargs())


@pytest.mark.parametrize(
    "name", sorted((plain_masks.MODEL_TYPES | plain_masks.HYBRID_TYPES) & FAMILIES.keys())
)
def test_listed_families_build_masks_without_a_look_at_positions(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers searches positions for packs, which waits for a GPU."""
    seen: list[torch.Tensor] = []
    search = masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(
        masking_utils,
        "find_packed_sequence_indices",
        lambda positions: seen.append(positions) or search(positions),
    )
    model = build(name, "thd").eval()
    batch, _ = packs()
    got = model(**batch.hf_kwargs()).logits

    assert not seen
    for module in model.modules():
        module.__dict__.pop(plain_masks.PLAIN_MASKS, None)
    assert torch.equal(model(**batch.hf_kwargs()).logits, got)
    assert seen


def test_a_padding_mask_that_hides_nothing_is_looked_at_once_a_pack() -> None:
    pack = Boundaries.from_lengths([2, 1])
    shown = torch.zeros(1, 1, 1, 3)
    hidden = torch.tensor([[[[0.0, -1e9, 0.0]]]])
    assert shows_all(shown, pack)
    assert shows_all(shown, pack)
    assert pack.shown_mask is shown
    assert not shows_all(hidden, pack)
    assert shows_all(torch.ones(2, 1, 1, 3, dtype=torch.bool), None)
    assert not shows_all(torch.zeros(1, 1, 3, 3), pack)  # might be causal, and is not


SPARSE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 1,
}


def phimoe() -> Any:
    """A config of PhiMoE, whose sliding mask alone knows the window (transformers 5.23)."""
    return transformers.PhimoeConfig(**SPARSE, sliding_window=4, num_local_experts=2, initializer_range=0.2)


def test_a_window_that_only_the_mask_knows_is_refused_beyond_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(masks, "HANDS_MASKS_ON", ())  # as a family that nobody has read
    made = phimoe()
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="thd").eval()
    model(torch.arange(3, 7)[None], use_cache=False)
    with pytest.raises(ValueError, match=r"chunk of 4, which only its mask carries.*sequences of 9"):
        model(torch.arange(3, 12)[None], use_cache=False)


@pytest.mark.parametrize(
    "made",
    [
        phimoe(),
        transformers.Llama4TextConfig(
            **SPARSE,
            head_dim=8,
            intermediate_size_mlp=16,
            attention_chunk_size=4,
            num_local_experts=2,
            no_rope_layers=[1, 0],
            initializer_range=0.2,
        ),
    ],
    ids=lambda made: made.model_type,
)
def test_a_window_or_chunk_of_the_mask_alone_is_told_where_layers_hand_masks_on(
    made: Any,
) -> None:
    # A release before 5.23 gives both models the same config, and the later one's attention.
    model, stock = (
        transformers.AutoModelForCausalLM.from_config(copy.deepcopy(made), attn_implementation=name).eval()
        for name in ("thd", "eager")
    )
    stock.load_state_dict(model.state_dict())
    rows = [torch.arange(3, 3 + n) for n in (9, 1, 4, 13, 3)]
    batch = THDBatch.collate([{"input_ids": ids} for ids in rows])
    for ids, got in zip(rows, batch.unpack(model(**batch.hf_kwargs()).logits), strict=True):
        want = stock(ids[None], use_cache=False).logits
        torch.testing.assert_close(got, want[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model(ids[None], use_cache=False).logits, want, rtol=1e-4, atol=1e-5)


def test_a_window_that_no_layer_has_hides_nothing() -> None:
    """Qwen2-MoE's published configs switch the window off; its local mask then has a window of 0."""
    config = transformers.Qwen2MoeConfig(
        **SPARSE,
        use_sliding_window=False,
        num_experts=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        initializer_range=0.2,
    )
    assert set(config.layer_types) == {"full_attention"}
    model, stock = (
        transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=name).eval()
        for name in ("thd", "eager")
    )
    stock.load_state_dict(model.state_dict())
    rows = [torch.arange(3, 3 + n) for n in (9, 1, 4, 13, 3)]
    batch = THDBatch.collate([{"input_ids": ids} for ids in rows])

    for ids, logits in zip(rows, batch.unpack(model(**batch.hf_kwargs()).logits), strict=True):
        expected = stock(ids[None], use_cache=False).logits[0]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_the_longest_sequence_of_a_shard_is_that_of_the_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "HANDS_MASKS_ON", ())
    made = phimoe()
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="thd").eval()
    # A rank of two holds 4 tokens of a sequence of 8.
    batch = THDBatch.collate([{"input_ids": range(8)}], pad_to=20)
    assert batch.boundaries.longest == 8
    shard = shard_batch(batch, group=None, cp=2, rank=0)
    with pytest.raises(ValueError, match=r"only its mask carries.*sequences of 8"):
        model(**shard.hf_kwargs())


def test_a_config_without_a_source_file_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's cell and ``python -c`` define classes that have no file to read."""
    monkeypatch.setitem(sys.modules, "cell", ModuleType("cell"))
    config = type("Mine", (transformers.LlamaConfig,), {"__module__": "cell"})
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    made = config(vocab_size=8, **sizes)
    transformers.LlamaForCausalLM._from_config(made, attn_implementation="thd")
