"""The probe: it catches every class of leak in stock models and names the layer; it passes what is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from benchmarks.families import build as build_tiny
from lightning_thd import varlen_attention
from lightning_thd.batch import THDBatch
from lightning_thd.models import PackingLeakError, check_packing, register_thd
from tests.models.families import FAMILIES, VOCAB, build

register_thd()
Call = Callable[[Any, THDBatch], Any]


def with_positions(model: Any, batch: THDBatch) -> Any:
    """What a plain training loop does: position_ids, and the cache that is on by default."""
    return model(input_ids=batch.input_ids[None], position_ids=batch.position_ids[None])


def with_mask(model: Any, batch: THDBatch) -> Any:
    """What a tokenizer's output does: an all-ones mask beside the positions."""
    ids = batch.input_ids[None]
    ones = torch.ones_like(ids)
    return model(input_ids=ids, position_ids=batch.position_ids[None], attention_mask=ones, use_cache=False)


def with_everything(model: Any, batch: THDBatch) -> Any:
    """Everything that transformers asks for, short of kernels that are not installed."""
    return model(input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False)


def tokens_only(model: Any, batch: THDBatch) -> Any:
    """All that a pure state-space model takes."""
    return model(input_ids=batch.input_ids[None], use_cache=False)


TRAPS: dict[str, tuple[Call, dict[str, str]]] = {
    "cache trap": (
        with_positions,
        {"llama": "LlamaAttention", "qwen3": "Qwen3Attention", "gemma3": "Gemma3Attention"},
    ),
    "mask trap": (
        with_mask,
        {"llama": "LlamaAttention", "mixtral": "MixtralAttention", "gpt2": "GPT2Attention"},
    ),
    "state-space trap": (
        with_everything,
        {
            "bamba": "BambaMixer",
            "jamba": "JambaMambaMixer",
            "zamba2": "Zamba2MambaMixer",
            "nemotron_h": "NemotronHMamba2Mixer",
            "qwen3_next": "Qwen3NextGatedDeltaNet",
            "lfm2": "Lfm2ShortConv",
        },
    ),
    "state-space trap, no attention": (tokens_only, {"mamba": "MambaMixer", "mamba2": "Mamba2Mixer"}),
}
# Others leak in the same way as these.
SHARP = ("llama", "gemma3", "gpt2", "bamba", "jamba", "qwen3_next", "lfm2", "mamba")
CASES = [
    pytest.param(trap, name, marks=() if name in SHARP else pytest.mark.slow)
    for trap, (_, names) in TRAPS.items()
    for name in names
]


@pytest.mark.parametrize(("trap", "name"), CASES)
def test_the_stock_model_leaks_and_the_probe_names_the_layer(trap: str, name: str) -> None:
    call, layers = TRAPS[trap]
    stock = build(name, "eager")
    with pytest.raises(PackingLeakError, match=rf"layers?\.|h\.0.*{layers[name]}") as caught:
        check_packing(stock, forward=call)
    report = caught.value.report
    assert report.leaks
    assert report.leak > 1e-3
    assert report.gradient_leak is not None
    assert report.gradient_leak > 1e-3
    assert report.module is not None
    assert layers[name] in report.module


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral", "gpt2"])
def test_the_stock_model_called_right_passes(name: str) -> None:
    assert check_packing(build(name, "eager"), forward=with_everything).ok


KINDS = {family.kind: name for name, family in FAMILIES.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in KINDS.values() else pytest.mark.slow) for x in FAMILIES]
)
def test_thd_passes(name: str) -> None:
    report = check_packing(build(name, "thd"), lengths=(3, 1, 8), tolerance=1e-5)
    assert report.ok
    assert report.module is None
    assert report.attention == "thd"
    assert report.layers == FAMILIES[name].arguments.get("num_hidden_layers", 2)
    assert report.leak == 0 or FAMILIES[name].experts
    assert report.gradient_leak is not None
    assert report.gradient_leak <= 1e-6


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_is_probed_as_it_is_written(in_place: bool) -> None:
    model: Any = build("llama", "thd")
    if in_place:
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    assert check_packing(model).ok
    stock: Any = torch.compile(build("mamba", "eager"), backend="eager")
    with pytest.raises(PackingLeakError, match="MambaMixer"):
        check_packing(stock)


def test_the_model_is_left_as_it_was() -> None:
    model = build("llama", "thd").train()
    model.get_submodule("model.norm").eval()
    before = torch.random.get_rng_state()
    check_packing(model)
    assert model.training
    assert not model.get_submodule("model.norm").training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(before, torch.random.get_rng_state())
    assert not model.get_input_embeddings()._forward_hooks  # type: ignore[operator]


class Own(nn.Module):
    """A user's model without transformers, that may use its boundaries or not."""

    def __init__(self, leak: str | None = None, nan: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.mix = nn.Linear(16, 48)
        self.after = Shift(active=leak == "shift")
        self.leak, self.nan = leak, nan

    def forward(self, batch: THDBatch) -> Tensor:
        q, k, v = self.mix(self.embed(batch.input_ids)).view(-1, 3, 2, 8).unbind(1)
        cu, longest = batch.cu_seqlens, batch.max_seqlen
        if self.leak == "attention":
            cu, longest = cu[[0, -1]], int(cu[-1])
        out = varlen_attention(q, k, v, cu, cu, longest, longest).flatten(1)
        if self.leak == "length":
            out = out * batch.input_ids.shape[0]
        return self.after(out) * (float("nan") if self.nan else 1.0)


class Shift(nn.Module):
    def __init__(self, *, active: bool) -> None:
        super().__init__()
        self.active = active

    def forward(self, x: Tensor) -> Tensor:
        return x + x.roll(1, 0) if self.active else x


def test_a_model_of_ones_own_passes() -> None:
    report = check_packing(Own(), vocab_size=32)
    assert report.ok
    assert (report.attention, report.layers) == (None, None)
    assert str(report).startswith("Own, lengths (")
    assert check_packing(Own(), vocab_size=32, grad=False).gradient_leak is None
    assert check_packing(Own().double(), vocab_size=32).tolerance == 1e-9


def test_a_leak_of_ones_own_is_found_where_it_is() -> None:
    with pytest.raises(PackingLeakError, match=r"Own lets sequences .* is after \(Shift\)") as caught:
        check_packing(Own("shift"), vocab_size=32)
    assert "call varlen_attention" in str(caught.value)  # not transformers' options
    with pytest.raises(PackingLeakError, match=r"the model itself \(Own\)|the first module"):
        check_packing(Own("attention"), vocab_size=32)


def test_a_result_that_depends_on_the_pack_without_a_leak_is_found() -> None:
    with pytest.raises(PackingLeakError, match="differs between packed and alone") as caught:
        check_packing(Own("length"), vocab_size=32)
    assert not caught.value.report.leaks
    assert caught.value.report.leak == 0


class Gated(Own):
    """A model that leaks through a projection, which may be zero as many are when training begins."""

    def __init__(self, leak: str | None = None) -> None:
        super().__init__(leak)
        self.out = nn.Linear(16, 16)

    def forward(self, batch: THDBatch) -> Tensor:
        x: Tensor = self.embed(batch.input_ids)
        return x + self.out(self.after(x))


def test_weights_of_zero_hide_no_leak_and_are_zero_again() -> None:
    for leak in ("shift", None):
        model = Gated(leak)
        for weight in model.out.parameters():
            nn.init.zeros_(weight)
        assert check_packing(model, vocab_size=32, raise_on_leak=False).ok == (leak is None)
        assert not any(weight.any() for weight in model.out.parameters())


def test_a_head_of_zero_is_checked_and_a_constant_of_zero_is_refused() -> None:
    model: Any = build("llama", "thd")
    nn.init.zeros_(model.lm_head.weight)
    assert check_packing(model).ok
    assert not model.lm_head.weight.any()
    with pytest.raises(ValueError, match="Own gives logits that are all zero, so that no leak could be seen"):
        check_packing(Own(), vocab_size=32, forward=lambda model, batch: model(batch) * 0.0)


class Averaging(Own):
    """A model whose batch norm mixes the sequences of a pack while it trains, and not in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.unused = nn.BatchNorm1d(16)

    def forward(self, batch: THDBatch) -> Tensor:
        return self.norm(super().forward(batch))


def test_a_batch_norm_that_trains_is_a_leak_and_a_frozen_one_is_not() -> None:
    model = Averaging()
    with pytest.raises(
        PackingLeakError, match=r"batch norms, which average .*; the first .* is norm\."
    ) as caught:
        check_packing(model, vocab_size=32)
    assert caught.value.report.batch_norms == ("norm",)
    assert "averages in training        norm" in str(caught.value.report)
    assert model.norm.num_batches_tracked == 0
    model.norm.eval()
    assert check_packing(model, vocab_size=32).ok


@pytest.mark.parametrize(
    ("family", "model_class"),
    [
        pytest.param(
            "nemotron_h", "NemotronHForCausalLM", marks=pytest.mark.slow
        ),  # casts its logits to fp32
        ("qwen3_moe", "Qwen3MoeForCausalLM"),  # rounding sends tokens to other experts
        ("gemma4_text", "Gemma4ForCausalLM"),
    ],
)
def test_rounding_of_half_precision_is_no_leak(family: str, model_class: str) -> None:
    model = build_tiny(family, model_class, "thd").to(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert check_packing(model).ok
    after = model.state_dict()
    assert all(tensor.dtype == before[name].dtype for name, tensor in after.items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_rounding_under_autocast_is_no_leak() -> None:
    model = build_tiny("qwen3_moe", "Qwen3MoeForCausalLM", "thd")
    with torch.autocast("cpu", torch.bfloat16):
        assert check_packing(model).ok
        assert torch.is_autocast_enabled("cpu")
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert check_packing(build_tiny("qwen3_moe", "Qwen3MoeForCausalLM", "thd").to(torch.bfloat16)).ok
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_fault_in_half_precision_is_one_in_fp32_too() -> None:
    with pytest.raises(PackingLeakError, match="differs between packed and alone") as caught:
        check_packing(Own("length").to(torch.bfloat16), vocab_size=32)
    assert "rounding of half precision: differs, so measured in fp32" in caught.value.report.skipped
    assert caught.value.report.tolerance == 1e-4
    with pytest.raises(PackingLeakError, match="lets sequences of a pack see each other"):
        check_packing(Own("shift").to(torch.float16), vocab_size=32)


class NaNOnce(Own):
    """A model with NaN in one of many runs: in the logits of one sequence, or in its gradient."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, batch: THDBatch) -> Tensor:
        out = super().forward(batch)
        if batch.lengths != (7,):
            return out
        return out * float("nan") if self.where == "logits" else out + (out * 0.0).sqrt() * 0.0


@pytest.mark.parametrize("where", ["logits", "gradient"])
def test_nan_in_one_run_is_not_overwritten_by_the_next(where: str) -> None:
    report = check_packing(NaNOnce(where), vocab_size=32, raise_on_leak=False)
    assert not report.ok


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": (5,)}, r"lengths=\(5,\): a leak needs at least two sequences"),
        ({"lengths": (5, 0)}, r"at least one token"),
        ({"vocab_size": None}, r"vocab_size=None of Own: pass the number of tokens"),
        ({"vocab_size": 3}, r"vocab_size=3"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_packing(Own(), **{"vocab_size": VOCAB // 2, **arguments})


def test_a_model_without_an_embedding_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear has no nn\.Embedding"):
        check_packing(nn.Linear(2, 2), vocab_size=8)


def test_a_model_of_keywords_gets_those_that_it_names() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
            self.state = nn.GRU(8, 8, batch_first=True)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.head(self.state(self.tokens(input_ids))[0])  # type: ignore[no-any-return]

    with pytest.raises(PackingLeakError, match="state"):
        check_packing(Recurrent(), vocab_size=64)
