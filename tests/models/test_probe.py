"""The probe: it catches every class of leak in stock models and names the layer; it passes what is right."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

from benchmarks.families import build as build_tiny
from benchmarks.families import families, samples
from lightning_thd import varlen_attention
from lightning_thd._pages import see
from lightning_thd.batch import THDBatch
from lightning_thd.boundaries import Boundaries
from lightning_thd.models import PackingLeakError, attend, check_packing, masks, register_thd
from lightning_thd.models.families import gemma3n, roberta, ropes
from lightning_thd.models.preparing import is_prepared
from tests.models.families import FAMILIES, VOCAB, build
from tests.models.support import build_rope

register_thd()
Call = Callable[[Any, THDBatch], Any]


def called_with(*names: str, **given: Any) -> Call:
    """Return a plain loop's call of a stock model: tokens, and what is named beside them."""

    def call(model: Any, batch: THDBatch) -> Any:
        ids = batch.input_ids[None]
        beside = {"position_ids": batch.position_ids[None], "attention_mask": torch.ones_like(ids)}
        return model(input_ids=ids, **{name: beside[name] for name in names}, **given)

    return call


# Everything that transformers asks for, short of kernels that are not installed.
with_everything = called_with("position_ids", use_cache=False)
TRAPS: dict[str, tuple[Call, dict[str, str]]] = {
    "cache trap": (  # the cache is on by default
        called_with("position_ids"),
        {"llama": "LlamaAttention", "qwen3": "Qwen3Attention", "gemma3": "Gemma3Attention"},
    ),
    "mask trap": (  # a tokenizer's all-ones mask
        called_with("position_ids", "attention_mask", use_cache=False),
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
    "state-space trap, no attention": (
        called_with(use_cache=False),
        {"mamba": "MambaMixer", "mamba2": "Mamba2Mixer"},
    ),
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
    assert min(report.leak, report.gradient_leak or 0.0) > 1e-3


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral", "gpt2"])
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_the_stock_model_called_right_passes_also_without_gradients(name: str, without: Any) -> None:
    model = build(name, "eager")
    with without():
        assert check_packing(model, forward=with_everything).gradient_error is not None


KINDS = {family.kind: name for name, family in FAMILIES.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in KINDS.values() else pytest.mark.slow) for x in FAMILIES]
)
def test_thd_passes(name: str) -> None:
    report = check_packing(build(name, "thd"), lengths=(3, 1, 8), tolerance=1e-5)
    assert (report.ok, report.module, report.attention) == (True, None, "thd")
    assert report.layers == FAMILIES[name].arguments.get("num_hidden_layers", 2)
    assert report.leak == 0 or FAMILIES[name].experts
    assert report.gradient_leak is not None
    assert report.gradient_leak <= 1e-6


def test_a_compiled_model_is_probed_as_it_is_written() -> None:
    model: Any = build("llama", "thd")
    model.compile(backend="eager")
    assert check_packing(model).ok
    stock: Any = torch.compile(build("mamba", "eager"), backend="eager")
    with pytest.raises(PackingLeakError, match="MambaMixer"):
        check_packing(stock)


class Own(nn.Module):
    """A user's model without transformers, that may use its boundaries or not."""

    def __init__(self, leak: str | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.mix = nn.Linear(16, 48)
        self.leak = leak
        self.after = Shift(active=leak == "shift")

    def forward(self, batch: THDBatch) -> Tensor:
        q, k, v = self.mix(self.embed(batch.input_ids)).view(-1, 3, 2, 8).unbind(1)
        cu = batch.cu_seqlens
        longest = batch.max_seqlen
        if self.leak == "attention":
            cu = cu[[0, -1]]
            longest = int(cu[-1])
        out = varlen_attention(q, k, v, cu, cu, longest, longest).flatten(1)
        if self.leak == "nan" and batch.lengths == (7,):  # in one run of many
            out = out * float("nan")
        if self.leak == "length":
            out = out * batch.input_ids.shape[0]
        return self.after(out)


class Shift(nn.Module):
    def __init__(self, *, active: bool) -> None:
        super().__init__()
        self.active = active

    def forward(self, x: Tensor) -> Tensor:
        return x + x.roll(1, 0) if self.active else x


def test_a_model_of_ones_own_passes() -> None:
    report = check_packing(Own(), vocab_size=32)
    assert (report.ok, report.attention, report.layers) == (True, None, None)
    assert str(report).startswith("Own, lengths (")
    assert check_packing(Own(), vocab_size=32, grad=False).gradient_leak is None
    assert check_packing(Own().double(), vocab_size=32).tolerance == 1e-9


def test_a_leak_of_ones_own_is_found_where_it_is() -> None:
    with pytest.raises(PackingLeakError, match=r"Own lets sequences .* is after \(Shift\)") as caught:
        check_packing(Own("shift"), vocab_size=32)
    assert "call varlen_attention" in str(caught.value)  # not transformers' options
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # as from a process pool
    with pytest.raises(PackingLeakError, match=r"the model itself \(Own\)|the first module"):
        check_packing(Own("attention"), vocab_size=32)
    assert not check_packing(Own("nan"), vocab_size=32, raise_on_leak=False).ok  # the next run is finite
    with pytest.raises(PackingLeakError):  # once, all ids that this seed draws were equal
        check_packing(Own("attention"), vocab_size=8, lengths=(1, 1), grad=False, seed=12)


class Gated(Own):
    """A model that leaks through a projection, which may be zero as many are when training begins."""

    def __init__(self, leak: str | None = None) -> None:
        super().__init__(leak)
        self.out = nn.Linear(16, 16)

    def forward(self, batch: THDBatch) -> Tensor:
        x: Tensor = self.embed(batch.input_ids)
        return x + self.out(self.after(x))


def test_the_probe_seeds_no_gpu_that_the_model_is_not_on(monkeypatch: Patch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    model = Gated(None)
    before = torch.get_rng_state()
    check_packing(model, vocab_size=32)
    assert not seeded
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_of_zero_hide_no_leak_and_are_zero_again() -> None:
    for leak in ("shift", None):
        model = Gated(leak)
        for weight in model.out.parameters():
            nn.init.zeros_(weight)
        assert check_packing(model, vocab_size=32, raise_on_leak=False).ok == (leak is None)
        assert not any(weight.any() for weight in model.out.parameters())
    headless: Any = build("llama", "thd")
    nn.init.zeros_(headless.lm_head.weight)
    assert check_packing(headless).ok
    assert not headless.lm_head.weight.any()


class Mixing(nn.Module):
    """A layer of causal attention over the whole pack."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).view(1, -1, 3, 2, 8).unbind(2)
        heads = (each.transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(*heads, is_causal=True)
        return out.transpose(1, 2).flatten(2)[0]


class Nearly(Own):
    """A model that leaks through a gate."""

    def __init__(self, gate: float) -> None:
        super().__init__()
        self.gate = gate
        self.leaking = Mixing()

    def forward(self, batch: THDBatch) -> Tensor:
        out = super().forward(batch)
        leaked: Tensor = self.gate * self.leaking(out)
        return out + leaked


def in_bf16(model: nn.Module, batch: THDBatch) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model(batch)


@pytest.mark.parametrize("gate", [1e-2, 1e-3, 1e-4, 0.0])
def test_a_small_leak_in_half_precision_is_measured_in_fp32(gate: float) -> None:
    model = Nearly(gate)
    reports = [check_packing(model, 32, forward=in_bf16, raise_on_leak=False)]
    with torch.autocast("cpu", torch.bfloat16):
        reports.append(check_packing(model, 32, raise_on_leak=False))
        assert model.mix(torch.ones(1, 16)).dtype == torch.bfloat16, "no cast of the fp32 run is left"
    reports.append(check_packing(Nearly(gate).to(torch.bfloat16), 32, raise_on_leak=False))

    for report in reports:
        assert report.leaks == (gate > 0), report
        assert report.leak_tolerance == 1e-6
        assert "differs, so measured in fp32" not in str(report)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba2", "qwen3_next", "mixtral", "gpt_oss"])
def test_right_models_leak_nothing_in_half_precision(name: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        report = check_packing(build(name, "thd"))
    assert report.leak_tolerance == 1e-6
    assert report.leak == 0 or FAMILIES[name].experts


def test_a_small_leak_that_cannot_be_measured_in_fp32_is_said() -> None:
    def only_in_half(model: Any, batch: THDBatch) -> Any:
        assert model.mix.weight.dtype == torch.bfloat16
        return model(batch)

    report = check_packing(Nearly(1e-2).to(torch.bfloat16), 32, forward=only_in_half)
    assert (report.ok, report.leak_tolerance) == (True, 1e-2)
    assert any("the model did not run in fp32" in reason for reason in report.skipped)


class InTraining(Own):
    """A model that does something else while it trains."""

    def __init__(self, branch: str) -> None:
        super().__init__()
        self.branch = branch
        self.register_buffer("average", torch.zeros(16))
        self.calls = 0
        self.seen: list[float] = []
        self.dropout = nn.Dropout(0.5)

    def forward(self, batch: THDBatch) -> Tensor:
        out = super().forward(batch)
        if not self.training:
            return out
        if self.branch == "mean":
            out = out - out.mean(0)
        elif self.branch == "batch norm":
            self.average = 0.9 * self.average + 0.1 * out.detach().mean(0)
            out = out / out.std(0)
        elif self.branch == "shift":
            out = out + out.roll(1, 0)
        elif self.branch == "state":
            self.calls += 1
            self.seen.append(out.sum().item())
            self.average += out.detach().mean(0)
            self.new = out
        elif self.branch == "noise":
            out = out + torch.rand(int(out.sum().abs() * 100) % 7 + 2).sum()
        elif self.branch == "error":
            raise RuntimeError
        dropped: Tensor = F.dropout(self.dropout(out), 0.3, self.training)
        return dropped


@pytest.mark.parametrize("branch", ["mean", "batch norm", "shift"])
@pytest.mark.parametrize("training", [True, False])
def test_a_leak_only_in_training_is_found(branch: str, training: bool) -> None:
    model = InTraining(branch).train(training)
    with pytest.raises(
        PackingLeakError, match="see each other in training mode; the first wrong module is the"
    ):
        check_packing(model, 32, lengths=(3, 5))
    assert not model.average.any()
    assert model.dropout.training == model.training == training


def test_the_run_in_training_leaves_no_trace() -> None:
    model = InTraining("state")
    report = check_packing(model, 32)
    assert report.training_leak == 0
    assert "in a sequence; eval() and train()" in str(report)
    assert (model.calls, model.seen, hasattr(model, "new")) == (0, [], False)
    assert not model.average.any()


@pytest.mark.parametrize(
    ("branch", "reason"),
    [("noise", "draws random numbers beside dropout"), ("error", "RuntimeError in train")],
)
def test_a_run_in_training_that_cannot_be_compared_is_said(branch: str, reason: str) -> None:
    report = check_packing(InTraining(branch), 32)
    assert report.training_leak is None
    assert any(reason in text for text in report.skipped)
    assert "in a sequence; eval()\n" in str(report)


class Far(Own):
    """A model that leaks only over many slots."""

    def __init__(self, leak: str | None, positions: int = 4_096) -> None:
        super().__init__()
        self.kind = leak
        self.positions = nn.Embedding(positions, 16)

    def forward(self, batch: THDBatch) -> Tensor:
        out = super().forward(batch) + self.positions(batch.position_ids)
        slots = len(out)
        if self.kind == "dilated" and slots > 64:
            out = torch.cat([out[:64], out[64:] + out[:-64]])
        elif self.kind == "branch" and slots >= 400:
            out = out + out.cumsum(0)
        return out


@pytest.mark.parametrize("positions", [4_096, 40, 17])
def test_a_leak_over_many_slots_is_found(positions: int) -> None:
    for kind in ("dilated", "branch"):
        with pytest.raises(
            PackingLeakError, match=r"see each other in a pack of \d+ tokens; .* the model itself"
        ):
            check_packing(Far(kind, positions), 32)
    report = check_packing(Far(None, positions), 32)
    assert report.far_leak == 0
    assert sum(report.far_lengths) > 400
    assert max(report.far_lengths) == {4_096: 247, 40: 30, 17: 16}[positions]
    assert f"up to {sum(report.far_lengths)} tokens in a pack, {max(report.far_lengths)} in a seq" in str(
        report
    )
    assert check_packing(Far("branch"), 32, lengths=(3, 5)).far_lengths == ()  # only what was asked for


class Scaled(Gated):
    """A model whose leak is behind a gate that is nearly closed."""

    def __init__(self, leak: str | None, gate: float) -> None:
        super().__init__(leak)
        self.gate = nn.Parameter(torch.full((16,), gate))

    def forward(self, batch: THDBatch) -> Tensor:
        x: Tensor = self.embed(batch.input_ids)
        return x + self.gate.log().exp() * self.out(self.after(x))  # the noise is no negative number


@pytest.mark.parametrize("gate", [1e-6, 9e-4])
def test_a_gate_that_is_nearly_closed_hides_no_leak(gate: float) -> None:
    for leak in ("shift", None):
        model = Scaled(leak, gate)
        before = model.gate.detach().clone()
        report = check_packing(model, vocab_size=32, raise_on_leak=False)
        assert report.ok == (leak is None)
        assert leak is None or report.leak > 1e-4
        assert torch.equal(model.gate, before)


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
    assert f"such as LayerNorm, or running statistics in eval(). {see('leaks')}" in str(caught.value)
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
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_fault_in_half_precision_is_one_in_fp32_too() -> None:
    with pytest.raises(PackingLeakError, match="differs between packed and alone") as caught:
        check_packing(Own("length").to(torch.bfloat16), vocab_size=32)
    assert caught.value.report.leak == 0
    assert "rounding of half precision: differs, so measured in fp32" in caught.value.report.skipped
    assert caught.value.report.tolerance == 1e-4
    with pytest.raises(PackingLeakError, match="lets sequences of a pack see each other"):
        check_packing(Own("shift").to(torch.float16), vocab_size=32)


class Wrapped(L.LightningModule):
    """A module with a training_step and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Identity()
        self.net = Own()

    def training_step(self, batch: THDBatch) -> Tensor:
        return self.net(batch).square().mean()


class AsRows(nn.Module):
    """Runs a model of packs on one row of ids ``[1, L]``, with weights of the same names."""

    def __init__(self, own: Own) -> None:
        super().__init__()
        self.leak = own.leak
        self.embed = own.embed
        self.mix = own.mix
        self.after = own.after

    def forward(self, ids: Tensor) -> Tensor:
        batch = THDBatch.collate([{"input_ids": ids[0]}])
        return Own.forward(self, batch)  # type: ignore[arg-type]


class Unported(nn.Module):
    """Takes rows of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 4)

    def forward(self, idx: Tensor) -> Tensor:
        return self.tokens(idx)


class Asking(Unported):
    def forward(self, idx: Tensor) -> Tensor:
        rows, length = idx.size()
        return self.tokens(idx)[:rows, :length]


class WithMore(nn.Module):
    """Takes more than a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Own()

    def forward(self, ids: Tensor, places: Tensor, boundaries: Any) -> Tensor:
        raise AssertionError(ids, places, boundaries)


class WithIds(WithMore):
    """Takes ids by their name, and what no batch gives."""

    def forward(self, input_ids: Tensor, places: Tensor) -> Tensor:  # type: ignore[override]
        raise AssertionError(input_ids, places)


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (
            WithMore,
            {},
            r"as model\(batch\), but its forward takes \(ids, places, boundaries\): missing .*forward=",
        ),
        (WithIds, {}, r"model\(input_ids=\.\.\.\), but its forward takes \(input_ids, places\): missing"),
        (Own, {"lengths": (5,)}, r"lengths=\(5,\): a leak needs at least two sequences"),
        (Own, {"lengths": (5, 0)}, "two sequences, none empty"),
        (Own, {"vocab_size": None}, "vocab_size=None of Own: pass the number of tokens"),
        (Own, {"vocab_size": 3}, "vocab_size=3"),
        (Own, {"forward": lambda model, batch: model(batch) * 0.0}, "Own gives logits that are all zero"),
        (Own, {"forward": lambda model, batch: model(batch)[:3]}, "Own gives 3 rows for 35 slots of 5 seq"),
        (lambda: nn.Linear(2, 2), {}, r"Linear has no nn\.Embedding"),
        (
            Wrapped,
            {},
            r"model is a Wrapped, which has no forward.*module\.net, or pass forward=.*model='net'",
        ),
        (Unported, {}, r"Unported was called as model\(batch\) .*not THDBatch\. Port it.*batch\.input_ids"),
        (Asking, {}, r"Asking was called as model\(batch\) .*A THDBatch has no size\. .*[^.]\. Port it"),
        (Own, {"reference": Wrapped()}, r"reference is a Wrapped, which has no forward.*module\.net"),
    ],
)
def test_what_cannot_be_probed_is_refused(
    model: Callable[[], nn.Module], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_packing(model(), **{"vocab_size": VOCAB // 2, **arguments})


def test_a_report_says_that_no_reference_was_compared() -> None:
    report = check_packing(Own(), VOCAB // 2)
    assert report.skipped == ("what it was ported from: pass that model as reference=",)
    assert check_packing(Own(), VOCAB // 2, reference=AsRows(Own())).skipped == ()


def test_one_row_a_sequence_and_models_without_heads_are_probed() -> None:
    assert not check_packing(build_tiny("bert", "BertModel", "thd")).skipped
    model = build_tiny("llama", "LlamaForSequenceClassification", "thd")
    assert not check_packing(model).skipped
    with pytest.raises(PackingLeakError, match="sequences of a pack see each other"):  # by the mean
        check_packing(model, forward=lambda m, batch: (x := m(**batch.hf_kwargs()).logits) - x.mean(0))


# ---- Families that were once silently wrong: right as they are, caught with their fix off

Patch = pytest.MonkeyPatch


def as_given(input_ids: Tensor, position_ids: Tensor, padding_idx: int, pack: Boundaries) -> Tensor:
    return position_ids


def along_the_row(pack: Boundaries) -> Tensor:
    return torch.arange(pack.slots)


def as_the_layer_says(module: Any, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def of_any_length(patch: Patch) -> None:
    patch.setattr(ropes, "_depends_on_length", lambda kind: False)


def takes_blocks_for_nothing(patch: Patch) -> None:
    patch.setattr(masks, "UnreadMask", lambda family: None)
    patch.setattr(attend, "_INERT", attend._INERT | {"block_indices"})


# Family, model class, its fix switched off, and what the probe then says.
STOCK = "differs between a pack and stock eager attention"
ROPE = f"differs between packed and alone|sequences of a pack see each other|{STOCK}"
WRONG: dict[str, tuple[str, str, Callable[[Patch], None], str]] = {
    "roberta's offset": (
        "roberta",
        "RobertaForCausalLM",
        lambda patch: patch.setattr(roberta, "padded_positions", as_given),
        STOCK,
    ),
    "paligemma's mask": (
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        lambda patch: patch.setattr(attend, "_is_causal", as_the_layer_says),
        STOCK,
    ),
    "minimax's blocks": (
        "minimax_m3_vl_text",
        "MiniMaxM3VLForCausalLM",
        takes_blocks_for_nothing,
        STOCK,
    ),
    "phi3's longrope": ("phi3 longrope", "", of_any_length, ROPE),
    "llama's dynamic rope": ("llama dynamic", "", of_any_length, ROPE),
    "gemma3n's pad": (
        "gemma3n_text",
        "Gemma3nForCausalLM",
        lambda patch: patch.setattr(gemma3n, "_TINY", 0.0),
        "gets different or non-finite gradients if a trailing pad is added",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_right_as_it_is_and_caught_with_its_fix_off(case: str, monkeypatch: Patch) -> None:
    family, model_class, switch_off, verdict = WRONG[case]
    model = build_tiny(family, model_class, "thd") if model_class else build_rope(family, "thd")
    if case == "minimax's blocks":
        with pytest.raises(ValueError, match="MiniMaxM3VLAttention passes block_indices to its attention"):
            check_packing(model)
    else:
        report = check_packing(model)
        assert report.ok
        assert report.reference_error is not None
        assert report.pad_error is not None
    switch_off(monkeypatch)
    with pytest.raises(PackingLeakError, match=verdict):
        check_packing(model)


FAR = {"floor_scale": 8192, "attention_chunk_size": 8192, "no_rope_layers": [0, 1]}


def scaled_by_the_row(embeds: Tensor, masked: Tensor, _: Any) -> Tensor:
    """Scale embeddings by the masked tokens of the whole row."""
    return embeds * (1 - masked.float().mean())


@pytest.mark.parametrize("what", ["Llama 4's scales", "ESM's masked tokens"])
def test_what_depends_on_the_row_is_seen_behind_far_limits(what: str, monkeypatch: Patch) -> None:
    if what == "ESM's masked tokens":
        model: Any = build_tiny("esm", "EsmForMaskedLM", "thd", {"token_dropout": True, "mask_token_id": 4})
        module = roberta
        name = "_without_masked"
        wrong: Any = scaled_by_the_row
    else:
        model = build_tiny("llama4_text", "Llama4ForCausalLM", "thd", FAR)
        module = Boundaries
        name = "positions"
        wrong = property(along_the_row)
    assert check_packing(model).ok
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(PackingLeakError):
        check_packing(model)


REFUSED = "config of (Gemma2|OlmoHybrid)ForCausalLM was changed"
FULL = ["full_attention"] * 2
STATES = ["linear_attention"] * 2
CHANGED: dict[str, tuple[str, Callable[[Any], None], str | None]] = {
    "window": ("gemma2", lambda config: setattr(config, "sliding_window", 3), REFUSED),
    "layers": ("gemma2", lambda config: setattr(config, "layer_types", FULL), REFUSED),
    "states": ("olmo_hybrid", lambda config: setattr(config, "layer_types", STATES), REFUSED),
    "followed": ("mistral", lambda config: setattr(config, "sliding_window", 3), None),
    "both ways": ("mistral", lambda config: setattr(config, "is_causal", False), None),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_config_changed_after_construction_is_followed_or_refused(name: str) -> None:
    family, change, refused = CHANGED[name]
    models = [build_tiny(family, families("causal")[family], kind) for kind in ("eager", "thd")]
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

    for ids, ours in zip(docs, batch.unpack(models[1](**batch.hf_kwargs()).logits), strict=True):
        expected = models[0](input_ids=ids[None], use_cache=False).logits[0]
        torch.testing.assert_close(ours.view_as(expected), expected, rtol=1e-4, atol=1e-5)


def test_a_window_put_on_a_layer_is_refused() -> None:
    model: Any = build_tiny("gemma2", "Gemma2ForCausalLM", "thd")
    model.model.layers[0].self_attn.sliding_window = None
    batch = THDBatch.collate([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    with pytest.raises(ValueError, match="Gemma2Attention was built with sliding_window=8 and now has None"):
        model(**batch.hf_kwargs())


def test_a_model_whose_config_was_switched_by_hand_is_prepared_by_the_check() -> None:
    model = build("mamba2", "eager")
    model.config._attn_implementation = "thd"  # type: ignore[union-attr]
    assert check_packing(model, lengths=(3, 1, 5), grad=False, thorough=False).ok
    assert is_prepared(model)
