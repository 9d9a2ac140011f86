"""Every family against two oracles: torch's counter on the meta device, and the masks the model builds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lightning_thd.flops import Chunk, FlopsModel, Member, SeqStats, join
from lightning_thd.flops.families import registry
from tests.data.vision_chats import TOWER
from tests.flops.families import (
    ENCODERS,
    FAMILIES,
    VISION,
    attended_flops,
    counted,
    encoder,
    meta_model,
    small_config,
    vision_config,
)

TOTAL = 32
TEXT = FlopsModel.from_config(small_config("llama"))
# never projections: scans and convolutions run as elementwise kernels or einsums of their own
_SCANS = ("scan", "conv", "delta")
# these build masks of their own and do not look the attention function up
_OWN_ATTENTION = ("bloom", "falcon", "gptj", "codegen", "mamba", "mamba2", "falcon_mamba", "gpt2")
# the choice of the indexer is folded into the mask by attention functions of their own
_SPARSE = ("glm_moe_dsa", "deepseek_v32")
_BLOCKS = "deepseek_v4"  # its indexer does not ask for the attention function
# products that torch counts as batched: of streams with streams, and of groups of heads
_BATCHED = ("altup_mix", "stream_mix", "out_groups")


# one of every kind runs always; the rest, which differ from these in sizes alone, with -m slow
_ALWAYS = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "gemma2", "gemma3_text"),
    *("phi3", "gpt2", "gpt_neox", "falcon", "bloom", "olmo2", "granitemoeshared", "glm4_moe", "deepseek_v3"),
    *("gpt_oss", "llama4_text", "qwen3_next", "mamba", "mamba2", "bamba", "granitemoehybrid", "falcon_h1"),
    *("nemotron_h", "jamba", "zamba2", "lfm2", "ernie4_5_moe"),
    *("gemma3n_text", "gemma4_text", "deepseek_v4"),
)


def marked(families: Iterable[str]) -> list[Any]:
    present = [family for family in families if family in CONFIG_MAPPING]  # transformers 5.19 lacks some
    return [
        family if family in _ALWAYS else pytest.param(family, marks=pytest.mark.slow) for family in present
    ]


def forward_by_name(model: FlopsModel, total: int) -> dict[str, int]:
    names: dict[str, int] = {}
    for layer in model.layers:
        for term in layer.terms:
            if term.basis == "token" and term.kind != "embedding":
                names[term.name] = names.get(term.name, 0) + term.forward * total
    return names


def test_every_family_that_is_known_is_tested() -> None:
    elsewhere = {"mllama_text_model", *(f"{name}_text" for name in VISION)}
    assert set(registry._FAMILIES) - set(FAMILIES) - set(ENCODERS) - elsewhere == set()
    assert len(FAMILIES) >= len(_ALWAYS) >= 20


# switches of single families that add projections or change their sizes
_SWITCHED: list[tuple[str, dict[str, Any]]] = [
    ("opt", {"word_embed_proj_dim": 48}),
    ("gpt_bigcode", {"multi_query": False}),
    ("zamba2", {"use_shared_attention_adapter": True}),
    ("cohere2_moe", {"num_shared_experts": 2}),
]


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)  # GPT-BigCode's, older
@pytest.mark.parametrize(("family", "switched"), _SWITCHED)
def test_projections_behind_a_switch_equal_torchs_counter(family: str, switched: dict[str, Any]) -> None:
    plain = small_config(family)
    config = small_config(family, **switched)
    names = forward_by_name(FlopsModel.from_config(config), TOTAL)
    ours = sum(names[name] for name in names if name not in (*_SCANS, "experts_up", "experts_down"))
    by_op = counted(meta_model(config), TOTAL)
    assert ours == by_op["mm"] + by_op["addmm"]
    assert names != forward_by_name(FlopsModel.from_config(plain), TOTAL)


@pytest.mark.parametrize("family", marked(FAMILIES))
def test_projections_and_logits_equal_torchs_counter(family: str) -> None:
    config = small_config(family)
    by_op = counted(meta_model(config), TOTAL)
    names = forward_by_name(FlopsModel.from_config(config), TOTAL)
    expert_flops = names.pop("experts_up", 0) + names.pop("experts_down", 0)
    ours = sum(flops for name, flops in names.items() if name not in (*_SCANS, *_BATCHED))
    assert ours == by_op["mm"] + by_op["addmm"]
    if family in ("mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "olmoe"):  # batched: experts are bmm
        model = FlopsModel.from_config(config, causal="full")
        stats = SeqStats.from_lengths([TOTAL], windows=model.windows)
        assert expert_flops == by_op["bmm"] - model.forward_flops(stats).attention


@pytest.mark.parametrize(
    "family", marked(family for family in FAMILIES if family not in (*_OWN_ATTENTION, *_SPARSE, _BLOCKS))
)
def test_attention_pairs_equal_the_models_own_masks(family: str) -> None:
    config = small_config(family)
    model = FlopsModel.from_config(config, causal="exact")
    lengths = [5, 40]  # below and above the windows and chunks of 16
    expected = attended_flops(config, lengths)
    assert expected > 0
    ours = model.forward_flops(SeqStats.from_lengths(lengths, windows=model.windows))
    assert ours.attention == expected


@pytest.mark.parametrize("family", ["bloom", "falcon", "gptj", "codegen", "gpt2"])
def test_full_attention_equals_torchs_counter_where_the_mask_cannot_be_read(family: str) -> None:
    config = small_config(family)
    by_op = counted(meta_model(config), TOTAL)
    model = FlopsModel.from_config(config, causal="full")
    assert model.forward_flops(SeqStats.from_lengths([TOTAL])).attention == by_op["bmm"] + by_op["baddbmm"]


@pytest.mark.parametrize("family", _SPARSE)
def test_sparse_attention_reads_at_most_top_k_keys_and_its_indexer_all(family: str) -> None:
    config = small_config(family)
    model = FlopsModel.from_config(config, causal="exact")
    lengths = [5, 40]
    chosen = sum(min(i + 1, config.index_topk) for n in lengths for i in range(n))
    scored = sum(i + 1 for n in lengths for i in range(n))
    layers = config.num_hidden_layers
    main = 2 * 6 * (20 + 18) * chosen * layers
    indexers = sum(kind != "shared" for kind in getattr(config, "indexer_types", None) or [""] * layers)
    stats = SeqStats.from_lengths(lengths, windows=model.windows)
    forward = model.forward_flops(stats)
    assert forward.attention == main + 2 * 3 * (20 + 1) * scored * indexers
    assert model.training_flops(stats).attention == forward.attention + 2 * main  # no gradient of a choice


def test_compressed_attention_equals_the_models_own_masks_and_torchs_counter() -> None:
    config = small_config(_BLOCKS)
    model = FlopsModel.from_config(config, causal="exact")
    lengths = [5, 40, 3]  # the last is shorter than a block
    scored = sum((i + 1) // 4 for n in lengths for i in range(n))
    choices = 2 * 2 * 3 * (16 + 1) * scored  # two layers choose, by 3 heads of 16 and their weighted sum
    stats = SeqStats.from_lengths(lengths, windows=model.windows)
    forward = model.forward_flops(stats)
    training = model.training_flops(stats)

    assert forward.attention == attended_flops(config, lengths) + choices
    assert training.attention == 3 * forward.attention - 2 * choices

    # on one row torch counts whole rectangles: 32 keys and the blocks of 4 or 8 of them
    by_op = counted(meta_model(config), TOTAL, backward=True)
    terms = [term for layer in model.layers for term in layer.terms if term.basis == "token"]
    products = (*_BATCHED, "experts_up", "experts_down")
    batched = sum(term.training for term in terms if term.name in products) * TOTAL
    plain = [term for term in terms if term.name not in products and term.kind not in ("embedding", "router")]
    keys = TOTAL * (4 * TOTAL + 2 * TOTAL // 4 + TOTAL // 8)
    squares = 3 * 2 * 6 * (24 + 24) * keys + 2 * 2 * 3 * 16 * TOTAL * TOTAL // 4

    assert by_op["bmm"] == batched + squares
    routers = 3 * 2 * 4 * 96 * 8 * TOTAL
    assert by_op["mm"] + by_op["addmm"] == sum(term.training for term in plain) * TOTAL + routers


@pytest.mark.parametrize("family", ["gemma4_text", "gemma4_unified_text"])
def test_global_layers_are_read_from_every_form_of_the_config(family: str) -> None:
    config = small_config(family)
    model = FlopsModel.from_config(config)
    stats = SeqStats.from_lengths([40], windows=model.windows)
    saved = config.to_dict()
    by_number = {**saved, "per_layer_config": {int(k): v for k, v in saved["per_layer_config"].items()}}
    by_kind = {**saved, "per_layer_config": {"full_attention": saved["per_layer_config"]["3"]}}
    older = {**saved, "global_head_dim": 32, "num_global_key_value_heads": 1}
    del older["per_layer_config"]
    for form in (saved, by_number, by_kind, older):
        assert FlopsModel.from_config(form).training_flops(stats) == model.training_flops(stats)


@pytest.mark.parametrize("family", ["modernbert", "eurobert", "gemma3_text"])
def test_windows_on_both_sides_equal_the_models_own_masks(family: str) -> None:
    embeds = family == "gemma3_text"  # as EmbeddingGemma
    changes = {"local_attention": 12} if family == "modernbert" else {}
    config = (
        small_config(family, use_bidirectional_attention=True) if embeds else encoder(family, **changes)[0]
    )
    lengths = [5, 40]
    for form in (config, config.to_dict()):
        model = FlopsModel.from_config(form)
        stats = SeqStats.from_lengths(lengths, windows=model.windows)
        assert model.forward_flops(stats).attention == attended_flops(config, lengths) > 0


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_see_both_ways(family: str) -> None:
    config, module = encoder(family)
    by_op = counted(module, TOTAL)
    model = FlopsModel.from_config(config)
    stats = SeqStats.from_lengths([TOTAL], windows=model.windows)
    forward = model.forward_flops(stats)
    assert forward.attention == by_op["bmm"]
    assert forward.linear + forward.logits == by_op["mm"] + by_op["addmm"]
    two = model.forward_flops(SeqStats.from_lengths([TOTAL // 2] * 2, windows=model.windows))
    assert (2 * two.attention, two.linear) == (forward.attention, forward.linear)
    trained = model.for_module(module)
    assert trained.training_flops(stats).model == pytest.approx(model.training_flops(stats).model, rel=0.02)


def test_llama4_routes_where_transformers_computes_every_expert() -> None:
    config = small_config("llama4_text")
    by_op = counted(meta_model(config), TOTAL)
    names = forward_by_name(FlopsModel.from_config(config), TOTAL)
    routed = names["experts_up"] + names["experts_down"]
    full = FlopsModel.from_config(config, causal="full")
    attention = 2 * 4 * 6 * 24 * 2 * TOTAL * TOTAL  # 2 FLOPs, 4 layers, 6 heads of 24, two products
    assert by_op["bmm"] == attention + config.num_local_experts * routed
    assert full.windows == (Chunk(16),)


def test_mamba2_equals_megatrons_formula() -> None:
    """2Th(2D + 2gN + nheads) + 7TDN + 2TDh with D = nheads x headdim, forward."""
    config = small_config("mamba2")
    hidden = 96
    heads = 12
    inner = 12 * 16
    state = 10
    groups = 2
    per_layer = 2 * hidden * (2 * inner + 2 * groups * state + heads) + 7 * inner * state + 2 * inner * hidden
    flops = FlopsModel.from_config(config).forward_flops(SeqStats.from_lengths([TOTAL]))
    assert flops.linear == config.num_hidden_layers * TOTAL * per_layer
    assert flops.attention == 0


def test_gated_delta_net_equals_megatrons_formula() -> None:
    """6T[h(2qk + 2v + 2nv) + k(2qk + v) + 4 nv dv^2 + hv] where key and value heads are of one size."""
    from lightning_thd.flops.families.parts import gated_delta

    hidden = 96
    qk_heads = 2
    v_heads = 4
    dim = 14
    kernel = 4
    qk = qk_heads * dim
    value = v_heads * dim
    formula = (
        hidden * (2 * qk + 2 * value + 2 * v_heads)
        + kernel * (2 * qk + value)
        + 4 * v_heads * dim**2
        + hidden * value
    )
    terms = gated_delta(hidden, qk_heads=qk_heads, qk_dim=dim, v_heads=v_heads, v_dim=dim, kernel=kernel)
    assert sum(term.training for term in terms) == 6 * formula


def test_latent_experts_work_in_the_smaller_size() -> None:
    config = small_config("nemotron_h")
    plain = forward_by_name(FlopsModel.from_config(config), 1)
    config.moe_latent_size = 12
    latent = forward_by_name(FlopsModel.from_config(config), 1)
    assert latent["experts_up"] * 96 == plain["experts_up"] * 12
    assert (latent["latent_in"], latent["latent_out"]) == (2 * 96 * 12, 2 * 96 * 12)
    by_op = counted(meta_model(config), TOTAL)
    ours = sum(flops for name, flops in latent.items() if name not in (*_SCANS, "experts_up", "experts_down"))
    assert by_op["mm"] + by_op["addmm"] == ours * TOTAL


def test_cross_attention_counts_queries_times_what_they_read() -> None:
    config = {
        "model_type": "mllama",
        "text_config": {
            "model_type": "mllama_text_model",
            "vocab_size": 211,
            "hidden_size": 96,
            "intermediate_size": 136,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "cross_attention_layers": [1],
        },
    }
    model = FlopsModel.from_config(config, causal="exact")
    queries = [3, 5]
    keys = [10, 4]
    flops = model.forward_flops(SeqStats.from_lengths(queries, cross_lengths=keys))
    pairs = sum(1 for q, k in zip(queries, keys, strict=True) for _ in range(q) for _ in range(k))
    own_pairs = sum(n * (n + 1) // 2 for n in queries)

    assert flops.attention == 2 * 6 * 32 * (pairs + 2 * own_pairs)
    no_image = model.forward_flops(SeqStats.from_lengths(queries, cross_lengths=[0, 0]))
    assert flops.linear - no_image.linear == 2 * 2 * 96 * 2 * 16 * sum(keys)


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


def test_llavas_tower_equals_torchs_counter() -> None:
    from transformers import AutoModelForImageTextToText, LlavaConfig

    text = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
    tower = {**TOWER, "image_size": 56}
    config = LlavaConfig(vision_config=tower, text_config={"model_type": "llama", **text})
    vision = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with FlopCounterMode(display=False) as training:
        torch.cat(vision.get_image_features(torch.zeros(5, 3, 56, 56)).pooler_output).sum().backward()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        vision.get_image_features(torch.zeros(5, 3, 56, 56))
    model = FlopsModel.from_config(config)
    stats = SeqStats.from_lengths([], image_grid_thw=[[5, 4, 4]])
    # The class token's work is spread over 16 patches and rounded.
    assert model.forward_flops(stats).vision == pytest.approx(counter.get_total_flops(), rel=1e-3)
    # The last layer of the tower has no backward pass, because Llava reads the output of the layer before.
    assert model.training_flops(stats).vision == pytest.approx(training.get_total_flops(), rel=1e-3)
    assert join([Member(name="", model=TEXT), Member(name="", model=model)]).vision.patch == 14
    assert model.for_module(vision).training_flops(stats).vision == model.training_flops(stats).vision
    vision.model.vision_tower.requires_grad_(False)
    frozen = model.for_module(vision).training_flops(stats).vision
    assert model.forward_flops(stats).vision < frozen < 0.6 * model.training_flops(stats).vision
