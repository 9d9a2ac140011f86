from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_thd.flops import (
    Chunk,
    FlopsBreakdown,
    FlopsModel,
    Member,
    SeqStats,
    join,
    measure_flops,
    peak_flops,
    throughput,
)
from lightning_thd.flops.model import from_ints, num_ints, to_ints
from lightning_thd.flops.terms import Causal, Layer, matmul, scores
from tests.flops.families import small_config, vision_config

LLAMA2_7B = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
}  # fmt: skip
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}  # fmt: skip
# training FLOPs that verl computes for lengths [512, 1024, 2048] and [4096] * 3
VERL: dict[str, tuple[dict[str, Any], int, int]] = {
    "llama2-7b": (LLAMA2_7B, 149226491215872, 536372695793664),
    "qwen3-30b-a3b": (QWEN3_30B_A3B, 78593069678592, 306570470621184),
    "deepseek-v3-671b": (DEEPSEEK_V3, 848766538088448, 3145850406567936),
}
MIXED = [512, 1024, 2048]
EVEN = [4096] * 3


@pytest.mark.parametrize("name", VERL)
def test_equals_verl_with_its_embedding_as_matmul_and_its_routers(name: str) -> None:
    config, mixed, even = VERL[name]
    model = FlopsModel.from_config(config, embedding=True, router=True)
    stats = SeqStats.from_lengths(MIXED)
    assert model.training_flops(stats).model == mixed
    assert model.training_flops(SeqStats.from_lengths(EVEN)).model == even
    # The default is Megatron's, which leaves both out.
    embedding = 6 * config["vocab_size"] * config["hidden_size"] * stats.real_tokens
    experts = config.get("num_experts") or config.get("n_routed_experts") or 0
    sparse_layers = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0) if experts else 0
    routers = 6 * sparse_layers * experts * config["hidden_size"] * stats.real_tokens
    default = FlopsModel.from_config(config)
    assert default.training_flops(stats).model == mixed - embedding - routers
    assert 3 * default.forward_flops(stats).model == mixed - embedding - routers


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


def tiny(window: int | Chunk | None, causal: Causal = "half") -> FlopsModel:
    terms = (matmul("qkv", 10), scores(2, 4, 6, window=window), matmul("mlp", 7, last=True))
    return FlopsModel(name="tiny", layers=(Layer(path="layers.0", terms=terms),), causal=causal)


@given(lengths=st.lists(st.integers(0, 30), max_size=8), causal=st.sampled_from(["half", "exact", "full"]))
def test_a_window_no_sequence_reaches_changes_nothing(lengths: list[int], causal: Causal) -> None:
    windowed = tiny(30, causal)
    whole = tiny(None, causal)
    stats = SeqStats.from_lengths(lengths, windows=windowed.windows)
    assert windowed.training_flops(stats) == whole.training_flops(SeqStats.from_lengths(lengths))


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
    mixed = [replace(model, recompute=kind) for kind in ("selective", "full", "none")]
    joined = join([Member(name=each.recompute, model=each) for each in mixed]).training_flops(stats)
    assert joined.recompute == forward.attention + forward.model
    assert always.hardware == always.model + forward.model
    flops = FlopsModel.from_config(LLAMA2_7B, recompute="full").training_flops(SeqStats.from_lengths(MIXED))
    assert flops.recompute == (flops.linear + flops.attention) // 3  # logits never


GEMMA4, DEEPSEEK_V4 = (small_config(family).to_dict() for family in ("gemma4_text", "deepseek_v4"))
RATES = {"compress_rates": {"compressed_sparse_attention": 4}}
EIGHT = SeqStats.from_lengths([8])
IMAGES = SeqStats.from_lengths([], image_grid_thw=[[1, 6, 10], [2, 8, 4]])
read_config = FlopsModel.from_config


def llama(**how: Any) -> FlopsModel:
    return FlopsModel.from_config(LLAMA2_7B, **how)


def opaque_step() -> None:
    @torch.library.custom_op("lightning_thd_test::secret_product", mutates_args=())
    def secret(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    a = torch.randn(4, 4)
    (secret(a, a) @ a).sum()


def count_by_torch(run: Callable[[], object]) -> FlopsModel:
    return FlopsModel.from_module(nn.Identity(), run, stats=EIGHT)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: read_config({"model_type": "nope"}), "for model_type='nope'. Register one with"),
    (lambda: read_config({**LLAMA2_7B, "vocab_size": None}), "has vocab_size=None. A size is wanted"),
    (lambda: read_config({**LLAMA2_7B, "layer_types": ["retention"]}), "is a 'retention', for which no FLOP"),
    (lambda: read_config({**GEMMA4, "use_bidirectional_attention": "all"}), "sees both ways, for which no"),
    (lambda: read_config({**DEEPSEEK_V4, **RATES}), "_attention', for which compress_rates="),
    (lambda: read_config({"model_type": "gemma2", "num_attention_heads": "x"}), "transformers cannot read"),
    (lambda: llama(causal="other"), "causal='other'; wanted one of half"),
    (lambda: llama().training_flops(SeqStats.from_lengths([8], windows=(64,))), "count windows .64., but"),
    (lambda: tiny(4).training_flops(EIGHT), "has attention windows .4., which the stats do not count"),
    (lambda: read_config(vision_config("qwen2_5_vl")).training_flops(IMAGES), "has windows of .4. patches"),
    (lambda: llama().training_flops(IMAGES), "hold 124 image patches, but no vision tower is known for"),
    (lambda: FlopsModel(name="", layers=(), merge=0), "merge=0; wanted 1 or more. It counts the patches"),
    (lambda: count_by_torch(lambda: None), "torch counted 0 FLOPs of matmuls in Identity on 8 slots"),
    (lambda: count_by_torch(opaque_step), "torch has no formula for lightning_thd_test::secret_product"),
    (lambda: join([]), "No model was given to count. Give one or more members"),
    (
        lambda: join([Member(name="policy", model=llama()), Member(name="b", model=llama(causal="full"))]),
        "policy, b count under different conventions .*Build all of them with the same",
    ),
    (lambda: throughput(EIGHT, seconds=1.0, work="backward"), "work='backward'; wanted one of"),  # type: ignore[arg-type]
    (lambda: throughput(EIGHT, seconds=1.0, devices=0), "devices=0; wanted 1 or more"),
    *[
        (
            lambda s=s: throughput(EIGHT, seconds=s, model=llama()),
            "seconds=.*: a rate needs time that has passed",
        )
        for s in (0, -1.0, math.nan, math.inf)
    ],
    *[
        (lambda peak=peak: throughput(EIGHT, seconds=1.0, peak=peak), "is not a device's dense FLOP/s. Give")
        for peak in (0, -1e12, math.nan, math.inf, True, "fast")
    ],
    (lambda: throughput(EIGHT, seconds=1.0, peak="auto"), r"bf16, or what measure_flops\(\) returns"),  # type: ignore[arg-type]
    (lambda: measure_flops(dtype=torch.int8, device="cpu"), "dtype=torch.int8 is not a floating-point"),
    (lambda: peak_flops("NVIDIA H100", "bf17"), "dtype='bf17' is not a torch dtype or one of bf16"),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_says_what_is_wrong(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, UserWarning), match=message):
        call()


def test_register_teaches_a_family() -> None:
    FlopsModel.register("two-matmuls", lambda config: [Layer(path="", terms=(matmul("w", config["n"]),))])
    flops = FlopsModel.from_config({"model_type": "two-matmuls", "n": 5}).training_flops(
        SeqStats.from_lengths([7])
    )
    assert flops == FlopsBreakdown(linear=6 * 5 * 7)


TERMS = (matmul("w", 50), scores(1, 5, 5))
MODEL = FlopsModel(name="one", layers=(Layer(path="layers.0", terms=TERMS),))
STATS = SeqStats.from_lengths([60, 40], slots=125)


def test_every_key_and_value_on_one_device() -> None:
    linear = 6 * 50 * 100
    attention = 3 * 20 * (60**2 + 40**2) // 2
    flops = linear + attention

    assert throughput(STATS, seconds=2.0, model=MODEL, microbatches=1, peak=1e6, recompute="full") == {
        "device/items_per_sec": 62.5,
        "device/real_items_per_sec": 50.0,
        "device/samples_per_sec": 1.0,
        "device/batches_per_sec": 0.5,
        "device/flops_per_sec": flops / 2,
        "device/tflops_per_gpu": flops / 2 / 1e12,
        "device/mfu": flops / 2 / 1e6,
        "device/hfu": flops * 4 / 3 / 2 / 1e6,
        "packing/fill": 0.8,
        "packing/attention_fraction": attention / flops,
    }


def test_several_devices_share_the_work_and_add_the_sums() -> None:
    one = throughput(STATS, seconds=2.0, model=MODEL, peak=1e6)
    four = throughput(STATS, seconds=2.0, model=MODEL, peak=1e6, devices=4)
    assert four["device/mfu"] == one["device/mfu"] / 4
    assert four["flops_per_sec"] == one["device/flops_per_sec"] == 4 * four["device/flops_per_sec"]
    assert four["real_items_per_sec"] == 50.0
    rates = throughput(STATS, seconds=1.0)
    assert not any("flops" in key or "mfu" in key or "attention" in key for key in rates)
    assert "device/mfu" not in throughput(STATS, seconds=1.0, model=MODEL)


def test_counts_survive_the_trip_through_integers() -> None:
    terms = (scores(1, 5, 5, window=7), scores(1, 5, 5, window=Chunk(4)))
    model = FlopsModel(name="w", layers=(Layer(path="", terms=terms),))
    stats = SeqStats.from_lengths([3, 30], windows=model.windows, slots=64)
    assert from_ints(to_ints(stats, model), model) == stats
    assert len(to_ints(SeqStats(), model)) == num_ints(model) == num_ints(None) + 2
