from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_thd.flops import Chunk, FlopsBreakdown, FlopsModel, SeqStats
from lightning_thd.flops.terms import Causal, Layer, matmul, scores

LLAMA2_7B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
QWEN25_7B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "use_sliding_window": False,
    "sliding_window": 131072,
}
QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
MISTRAL_24B = {
    "model_type": "mistral",
    "vocab_size": 131072,
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": None,
}
# training FLOPs that verl computes for lengths [512, 1024, 2048] and [4096] * 3
VERL: dict[str, tuple[dict[str, Any], int, int]] = {
    "llama2-7b": (LLAMA2_7B, 149226491215872, 536372695793664),
    "qwen2.5-7b": (QWEN25_7B, 167073690943488, 591764889010176),
    "qwen3-8b": (QWEN3_8B, 180997438046208, 648394032807936),
    "qwen3-30b-a3b": (QWEN3_30B_A3B, 78593069678592, 306570470621184),
    "deepseek-v3-671b": (DEEPSEEK_V3, 848766538088448, 3145850406567936),
    "mistral-24b": (MISTRAL_24B, 512303699066880, 1787393589903360),
}
MIXED, EVEN = [512, 1024, 2048], [4096] * 3


@pytest.mark.parametrize("name", VERL)
def test_equals_verl_with_its_embedding_as_matmul_and_its_routers(name: str) -> None:
    config, mixed, even = VERL[name]
    model = FlopsModel.from_config(config, embedding=True, router=True)
    assert model.training_flops(SeqStats.from_lengths(MIXED)).model == mixed
    assert model.training_flops(SeqStats.from_lengths(EVEN)).model == even


@pytest.mark.parametrize("name", VERL)
def test_default_is_megatrons_which_leaves_embedding_and_routers_out(name: str) -> None:
    config, mixed, _ = VERL[name]
    stats = SeqStats.from_lengths(MIXED)
    embedding = 6 * config["vocab_size"] * config["hidden_size"] * stats.real_tokens
    experts = config.get("num_experts") or config.get("n_routed_experts") or 0
    sparse_layers = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0) if experts else 0
    routers = 6 * sparse_layers * experts * config["hidden_size"] * stats.real_tokens
    default = FlopsModel.from_config(config).training_flops(stats)
    assert default.model == mixed - embedding - routers


def test_dense_decoder_equals_megatrons_formula() -> None:
    """6 T (qkv + o, MLP, logits) + 6 L heads head_dim S2, written out."""
    stats = SeqStats.from_lengths(MIXED)
    projections = 4 * 4096 * 4096 + 3 * 4096 * 11008
    flops = FlopsModel.from_config(LLAMA2_7B).training_flops(stats)
    assert flops.linear == 6 * stats.real_tokens * 32 * projections
    assert flops.attention == 6 * 32 * 4096 * stats.sum_squares
    assert flops.logits == 6 * stats.real_tokens * 4096 * 32000
    assert flops.model == flops.linear + flops.attention + flops.logits == flops.hardware


def test_exact_adds_the_other_half_of_the_diagonal() -> None:
    stats = SeqStats.from_lengths(MIXED)
    flops = FlopsModel.from_config(LLAMA2_7B, causal="exact").training_flops(stats)
    assert flops.attention == 6 * 32 * 4096 * (stats.sum_squares + stats.real_tokens)
    full = FlopsModel.from_config(LLAMA2_7B, causal="full").training_flops(stats)
    assert full.attention == 12 * 32 * 4096 * stats.sum_squares


def test_slots_count_the_padding_in_linear_and_logits_but_never_in_attention() -> None:
    stats = SeqStats.from_lengths([3, 5], slots=16)
    real = FlopsModel.from_config(LLAMA2_7B).training_flops(stats)
    slots = FlopsModel.from_config(LLAMA2_7B, tokens="slots").training_flops(stats)
    assert (slots.linear, slots.logits, slots.attention) == (2 * real.linear, 2 * real.logits, real.attention)


def test_forward_is_a_third_of_training() -> None:
    model = FlopsModel.from_config(DEEPSEEK_V3)
    stats = SeqStats.from_lengths(MIXED)
    assert 3 * model.forward_flops(stats).model == model.training_flops(stats).model


def tiny(window: int | Chunk | None, causal: Causal = "half") -> FlopsModel:
    terms = (matmul("qkv", 10), scores(2, 4, 6, window=window), matmul("mlp", 7, last=True))
    return FlopsModel(name="tiny", layers=(Layer(path="layers.0", terms=terms),), causal=causal)


@given(lengths=st.lists(st.integers(0, 30), max_size=8), causal=st.sampled_from(["half", "exact", "full"]))
def test_a_window_no_sequence_reaches_changes_nothing(lengths: list[int], causal: Causal) -> None:
    windowed, whole = tiny(30, causal), tiny(None, causal)
    stats = SeqStats.from_lengths(lengths, windows=windowed.windows)
    assert windowed.training_flops(stats) == whole.training_flops(SeqStats.from_lengths(lengths))


@given(lengths=st.lists(st.integers(0, 30), max_size=8), size=st.integers(1, 31))
def test_windows_and_chunks_never_cost_more_than_whole_sequences(lengths: list[int], size: int) -> None:
    whole = tiny(None).training_flops(SeqStats.from_lengths(lengths)).attention
    for window in (size, Chunk(size)):
        stats = SeqStats.from_lengths(lengths, windows=(window,))
        assert tiny(window).training_flops(stats).attention <= whole


def test_windows_are_counted_per_sequence_where_the_mean_length_reports_more_than_full_attention() -> None:
    """32 sequences of 128 under a window of 128 are full attention, no more."""
    stats = SeqStats.from_lengths([128] * 32, windows=(128,))
    windowed = tiny(128).training_flops(stats)
    assert windowed == tiny(None).training_flops(SeqStats.from_lengths([128] * 32))
    one = SeqStats.from_lengths([32 * 128], windows=(128,))  # the pack as one sequence, windowed
    assert tiny(128).training_flops(one).attention > windowed.attention


@given(here=st.lists(st.integers(0, 99), max_size=6), there=st.lists(st.integers(0, 99), max_size=6))
def test_flops_of_a_sum_are_the_sum_of_flops(here: list[int], there: list[int]) -> None:
    model = tiny(8)
    one, two = (SeqStats.from_lengths(lengths, windows=(8,)) for lengths in (here, there))
    assert model.training_flops(one + two) == model.training_flops(one) + model.training_flops(two)


def test_recompute_policies() -> None:
    stats = SeqStats.from_lengths([4])
    model = tiny(None)
    forward = model.forward_flops(stats)
    last = 2 * 7 * 4
    assert model.training_flops(stats, recompute="full").recompute == forward.model
    assert model.training_flops(stats, recompute="early_stop").recompute == forward.model - last
    assert model.training_flops(stats, recompute="selective").recompute == forward.attention
    always = replace(model, recompute="full").training_flops(stats)
    assert always.hardware == always.model + forward.model


def test_logits_are_never_recomputed() -> None:
    flops = FlopsModel.from_config(LLAMA2_7B, recompute="full").training_flops(SeqStats.from_lengths(MIXED))
    assert flops.recompute == (flops.linear + flops.attention) // 3


# --- messages
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FlopsModel.from_config({"model_type": "nope"}), "for model_type='nope'. Register one with"),
        (
            lambda: FlopsModel.from_config({**LLAMA2_7B, "vocab_size": None}),
            "model_type='llama' has vocab_size=None. A size is wanted",
        ),
        *[
            (
                lambda field=field: FlopsModel.from_config(LLAMA2_7B, **{field: "other"}),
                f"{field}='other' is not",
            )
            for field in ("causal", "tokens", "recompute")
        ],
        (
            lambda: FlopsModel.from_config(LLAMA2_7B).training_flops(
                SeqStats.from_lengths([8], windows=(64,))
            ),
            r"count windows \[64\], but 'llama' has none",
        ),
        (
            lambda: tiny(4).training_flops(SeqStats.from_lengths([8])),
            r"'tiny' has attention windows \[4\], which the stats do not count",
        ),
        (lambda: FlopsModel.register("x", None), "wants a model_type and a function from config to layers"),  # type: ignore[arg-type]
        (lambda: FlopsModel(name="", layers=(), merge=0), "merge=0; wanted 1 or more. It is the patches"),
    ],
)
def test_says_what_is_wrong(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# --- register
def test_register_teaches_a_family() -> None:
    FlopsModel.register("two-matmuls", lambda config: [Layer(path="", terms=(matmul("w", config["n"]),))])
    flops = FlopsModel.from_config({"model_type": "two-matmuls", "n": 5}).training_flops(
        SeqStats.from_lengths([7])
    )
    assert flops == FlopsBreakdown(linear=6 * 5 * 7)
