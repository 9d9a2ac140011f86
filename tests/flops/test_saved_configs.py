"""The content of a config.json is counted as the model transformers builds of it, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_thd.flops import FlopsModel, SeqStats
from lightning_thd.flops.families import sizes as saved
from lightning_thd.flops.families.registry import _FAMILIES
from tests.flops.families import counted, meta_model

LENGTHS = [9000, 300, 1]
_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "vocab_size": 128}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_expand": 2}
# as files of these families are published: a period, a pattern or a list of indices says the kinds
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma2": {**_SIZES, **_HEADS, "sliding_window": 512},
    "gemma3_text": {**_SIZES, **_HEADS, "sliding_window": 512, "sliding_window_pattern": 6},
    "gpt_oss": {
        **_SIZES, **_HEADS, "sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2
    },
    "bamba": {**_SIZES, **_HEADS, **_MAMBA, "attn_layer_indices": [2, 5]},
    "jamba": {**_SIZES, **_HEADS, "attn_layer_period": 4, "attn_layer_offset": 1, "mamba_dt_rank": 6},
    "lfm2": {**_SIZES, **_HEADS, "full_attn_idxs": [2, 5]},
    "nemotron_h": {
        **_SIZES, **_HEADS, "hybrid_override_pattern": "M-M*M-M-", "mamba_num_heads": 8, "mamba_head_dim": 16
    },
    "mamba": {
        "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "time_step_rank": 6, "state_size": 8
    },
    "qwen2": {
        **_SIZES, **_HEADS, "use_sliding_window": True, "sliding_window": 512, "max_window_layers": 5
    },
    "qwen3": {**_SIZES, **_HEADS, "sliding_window": 512},  # off, unless it says otherwise
    "hunyuan_v1_moe": {**_SIZES, **_HEADS, "num_experts": 4, "moe_topk": [1] * 8},
    "hy_v3": {**_SIZES, **_HEADS, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def flops_of(config: Any) -> Any:
    model = FlopsModel.from_config(config)
    return model.training_flops(SeqStats.from_lengths(LENGTHS, windows=model.windows))


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_published_file_counts_as_its_class(family: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    content = {"model_type": family, **PUBLISHED[family]}
    before = json.dumps(content)
    flops = flops_of(content)
    assert flops == flops_of(CONFIG_MAPPING[family](**PUBLISHED[family]))
    assert json.dumps(content) == before  # the user's dict stays his
    assert flops.linear > 0


def test_every_family_counts_the_same_from_its_saved_file() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    seen = 0
    for family in _FAMILIES:
        if family == "deepseek_v2" or family not in CONFIG_MAPPING:  # its defaults lack the number of experts
            continue
        config = CONFIG_MAPPING[family]()
        assert flops_of(json.loads(config.to_json_string())) == flops_of(config), family
        seen += 1
    assert seen > 80


def test_parts_of_a_multimodal_file_take_the_defaults_of_their_classes() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 7, "sliding_window": 512}
    content = {"model_type": "gemma3", "text_config": text, "vision_config": {"num_hidden_layers": 2}}
    assert flops_of(content) == flops_of(CONFIG_MAPPING["gemma3"](**json.loads(json.dumps(content))))


def test_without_transformers_kinds_left_out_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "available", lambda name: False)
    whole = flops_of({"model_type": "llama", **_SIZES, **_HEADS})
    assert whole.model > 0
    gemma2 = {"model_type": "gemma2", **PUBLISHED["gemma2"]}
    with pytest.raises(ValueError, match=r"'gemma2' has no layer_types, which gives .* pip install"):
        FlopsModel.from_config(gemma2)
    hy_v3 = {"model_type": "hy_v3", **PUBLISHED["hy_v3"]}
    with pytest.raises(ValueError, match=r"'hy_v3' has no mlp_layer_types, which gives"):
        FlopsModel.from_config(hy_v3)
    kinds = ["sliding_attention", "full_attention"] * 4
    assert flops_of({**gemma2, "layer_types": kinds}).attention > 0
    with pytest.raises(ValueError, match="No FLOP count is known for model_type='nope'"):
        FlopsModel.from_config({"model_type": "nope"})


def test_frozen_projections_of_another_width_equal_torchs_counter() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = {**_SIZES, "ffn_dim": 96, "num_attention_heads": 4, "word_embed_proj_dim": 48, "dropout": 0.0}
    config = CONFIG_MAPPING["opt"](**sizes, max_position_embeddings=64)
    for frozen in ((), ("project_out",), ("embed", "project_in"), ("embed", "project_in", "layer")):
        module = meta_model(config)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not any(key in name for key in frozen))
        by_op = counted(module, 32, backward=True)
        model = FlopsModel.from_config(config, causal="full").for_module(module)
        ours = model.training_flops(SeqStats.from_lengths([32]))
        assert ours.linear + ours.logits == by_op["mm"] + by_op["addmm"], frozen
