"""The probe against families that were once silently wrong: right as they are, caught with their fix off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import lightning_thd.models.attend as attend
import lightning_thd.models.positions as positions
from benchmarks.families import build, families, samples
from lightning_thd import THDBatch
from lightning_thd.models import PackingLeakError, check_packing, register_thd
from lightning_thd.models.pack import Pack
from tests.models.support import build_rope

register_thd()
Patch = pytest.MonkeyPatch


def as_given(input_ids: Tensor, position_ids: Tensor, padding_idx: int, pack: Pack) -> Tensor:
    return position_ids


def along_the_row(pack: Pack) -> Tensor:
    return torch.arange(pack.slots)


def as_the_layer_says(module: Any, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def no_offset(patch: Patch) -> None:
    patch.setattr(positions, "padded_positions", as_given)


# Family, model class, its fix switched off, and what the probe then says.
WRONG: dict[str, tuple[str, str, Callable[[Patch], None], str]] = {
    "roberta's offset": (
        "roberta",
        "RobertaForCausalLM",
        no_offset,
        "differs between a pack and stock eager",
    ),
    "camembert's offset": ("camembert", "CamembertForCausalLM", no_offset, "stock eager attention"),
    "paligemma's mask": (
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        lambda patch: patch.setattr(attend, "_is_causal", as_the_layer_says),
        "stock eager attention",
    ),
    "minimax's blocks": (
        "minimax_m3_vl_text",
        "MiniMaxM3VLForCausalLM",
        lambda patch: patch.setattr(attend, "_INERT", attend._INERT | {"block_indices"}),
        "stock eager attention",
    ),
    "phi3's longrope": (
        "phi3 longrope",
        "",
        lambda patch: patch.setattr(positions, "_depends_on_length", lambda kind: False),
        "differs between packed and alone|sequences of a pack see each other|stock eager attention",
    ),
    "llama's dynamic rope": (
        "llama dynamic",
        "",
        lambda patch: patch.setattr(positions, "_depends_on_length", lambda kind: False),
        "differs between packed and alone|sequences of a pack see each other|stock eager attention",
    ),
    "gemma3n's pad": (
        "gemma3n_text",
        "Gemma3nForCausalLM",
        lambda patch: patch.setattr(positions, "_TINY", 0.0),
        "has other gradients, or none that are finite, with a trailing pad",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_right_as_it_is_and_caught_with_its_fix_off(case: str, monkeypatch: Patch) -> None:
    family, model_class, switch_off, verdict = WRONG[case]
    model = build(family, model_class, "thd") if model_class else build_rope(family, "thd")
    if case == "minimax's blocks":
        with pytest.raises(ValueError, match="passes block_indices"):
            check_packing(model)
    else:
        report = check_packing(model)
        assert report.ok
        assert report.reference_error is not None
        assert report.pad_error is not None
    switch_off(monkeypatch)
    with pytest.raises(PackingLeakError, match=verdict):
        check_packing(model)


def test_a_model_that_changes_its_embeddings_in_place_is_probed() -> None:
    assert check_packing(build("ctrl", "CTRLLMHeadModel", "thd")).ok


def test_lengths_reach_beyond_limits_that_are_near_and_lower_those_that_are_far() -> None:
    model = build_rope("phi3 longrope", "thd")
    model.config.sliding_window = 40
    assert check_packing(model).lengths == (7, 1, 16, 3, 8, 45)
    model.config.sliding_window = 4096
    report = check_packing(model, grad=False)
    assert report.lengths == (7, 1, 16, 3, 8)
    assert report.skipped == ()
    assert model.config.sliding_window == 4096


FAR = {"floor_scale": 8192, "attention_chunk_size": 8192, "no_rope_layers": [0, 1]}


@pytest.mark.parametrize("what", ["Llama 4's scales", "ESM's masked tokens"])
def test_what_depends_on_the_row_is_seen_behind_far_limits(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "ESM's masked tokens":
        model: Any = build("esm", "EsmForMaskedLM", "thd", {"token_dropout": True, "mask_token_id": 4})
        name, wrong = "_without_masked", lambda embeds, masked, _: embeds * (1 - masked.float().mean())
    else:
        model = build("llama4_text", "Llama4ForCausalLM", "thd", FAR)
        name, wrong = "_starts_at_zero", along_the_row
    assert check_packing(model).ok
    monkeypatch.setattr(positions, name, wrong)
    with pytest.raises(PackingLeakError):
        check_packing(model)


REFUSED = "config of Gemma2ForCausalLM was changed"
FULL = ["full_attention"] * 2
CHANGED: dict[str, tuple[str, Callable[[Any], None], str | None]] = {
    "window": ("gemma2", lambda config: setattr(config, "sliding_window", 3), REFUSED),
    "layers": ("gemma2", lambda config: setattr(config, "layer_types", FULL), REFUSED),
    "states": (
        "olmo_hybrid",
        lambda config: setattr(config, "layer_types", ["linear_attention"] * 2),
        "config of OlmoHybridForCausalLM was changed",
    ),
    "followed": ("mistral", lambda config: setattr(config, "sliding_window", 3), None),
    "both ways": ("mistral", lambda config: setattr(config, "is_causal", False), None),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_config_changed_after_construction_is_followed_or_refused(name: str) -> None:
    family, change, refused = CHANGED[name]
    models = [build(family, families("causal")[family], kind) for kind in ("eager", "thd")]
    docs = samples(lengths=(7, 1, 21, 9))
    for model in models:
        model.load_state_dict(models[0].state_dict())
        for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
            change(config)
    batch = THDBatch.collate([{"input_ids": ids} for ids in docs])
    if refused is not None:
        with pytest.raises(ValueError, match=refused):
            models[1](**batch.hf_kwargs())
        return
    found = batch.unpack(models[1](**batch.hf_kwargs()).logits)
    for ids, ours in zip(docs, found, strict=True):
        wanted = models[0](input_ids=ids[None], use_cache=False).logits[0]
        torch.testing.assert_close(ours.view_as(wanted), wanted, rtol=1e-4, atol=1e-5)


def test_a_window_put_on_a_layer_is_refused() -> None:
    model: Any = build("gemma2", "Gemma2ForCausalLM", "thd")
    model.model.layers[0].self_attn.sliding_window = None
    batch = THDBatch.collate([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    with pytest.raises(ValueError, match="Gemma2Attention was built with sliding_window=8 and now says None"):
        model(**batch.hf_kwargs())


def test_the_cheap_part_alone() -> None:
    report = check_packing(build("llama", "LlamaForCausalLM", "thd"), thorough=False)
    assert (report.reference_error, report.pad_error) == (None, None)
