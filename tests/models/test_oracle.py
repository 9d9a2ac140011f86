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
from benchmarks.families import build
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
    "bart's row": (
        "bart",
        "BartForCausalLM",
        lambda patch: patch.setattr(positions, "_starts_at_zero", along_the_row),
        "differs between packed and alone|stock eager attention",
    ),
    "paligemma's mask": (
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        lambda patch: patch.setattr(attend, "_is_causal", as_the_layer_says),
        "lets tokens of a sequence see later ones",
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
        assert report.causality_leak == 0
        assert report.pad_error is not None
    switch_off(monkeypatch)
    with pytest.raises(PackingLeakError, match=verdict):
        check_packing(model)


def test_a_model_that_changes_its_embeddings_in_place_is_probed() -> None:
    assert check_packing(build("ctrl", "CTRLLMHeadModel", "thd")).ok


def test_lengths_reach_beyond_limits_that_are_near_and_name_those_that_are_far() -> None:
    model = build_rope("phi3 longrope", "thd")
    model.config.sliding_window = 40
    assert check_packing(model).lengths == (7, 1, 16, 3, 8, 45)
    model.config.sliding_window = 4096
    report = check_packing(model, grad=False)
    assert report.lengths == (7, 1, 16, 3, 8)
    assert report.skipped == ("sequences beyond sliding_window 4096: pass lengths=",)
    assert "not looked at               sequences beyond sliding_window 4096" in str(report)


def test_an_encoder_is_not_held_to_causality() -> None:
    report = check_packing(build("bert", "BertForMaskedLM", "thd"))
    assert report.causality_leak is None
    assert "later tokens: the model is not causal" in report.skipped


def test_attention_is_as_it_was_afterwards() -> None:
    model = build("llava", "LlavaForConditionalGeneration", "thd")
    before = [
        getattr(m.config, "_attn_implementation", None) for m in model.modules() if hasattr(m, "config")
    ]
    check_packing(model)
    assert before == [
        getattr(m.config, "_attn_implementation", None) for m in model.modules() if hasattr(m, "config")
    ]


def test_the_cheap_part_alone() -> None:
    report = check_packing(build("llama", "LlamaForCausalLM", "thd"), thorough=False)
    assert (report.reference_error, report.causality_leak, report.pad_error) == (None, None, None)
