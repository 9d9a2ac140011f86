"""Every way to a model with "thd": built, switched, in part, by hand, copied, wrapped, compiled."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers

from benchmarks import families
from benchmarks.families import samples
from lightning_thd.batch import THDBatch
from lightning_thd.models import register_thd
from tests.models.families import build
from tests.models.matrix import relative_error
from tests.scripts import run_python

register_thd()
Way = Callable[[Any], Any]
LLAVA, GEMMA = ("llava", "LlavaForConditionalGeneration"), ("gemma3", "Gemma3ForConditionalGeneration")
NON_LEAF = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def pack(**arguments: int) -> THDBatch:
    return THDBatch.collate([{"input_ids": ids} for ids in samples()], **arguments)


def small_pack() -> THDBatch:
    """Build a pack for the models of tests.models.families, whose vocabulary is smaller."""
    return THDBatch.collate([{"input_ids": ids % 60 + 3} for ids in samples()])


def loss_alone(stock: Any) -> Tensor:
    """Average the loss over the predicted tokens of all sequences, each alone."""
    total, tokens = torch.zeros(()), 0
    for ids in samples():
        if len(ids) > 1:
            total = total + stock(input_ids=ids[None], labels=ids[None]).loss * (len(ids) - 1)
            tokens += len(ids) - 1
    return total / tokens


def assert_exact(model: Any, stock: Any, call: Way | None = None) -> None:
    """Compare the model's own loss on a pack with the sequences' losses under stock eager attention."""
    batch = pack(pad_to=48)
    labels = batch.input_ids.clone()
    labels[sum(batch.lengths) :] = -100
    got = (model if call is None else call)(**batch.hf_kwargs(), labels=labels[None])
    torch.testing.assert_close(got.loss, loss_alone(stock), rtol=2e-5, atol=0)
    stock.set_attn_implementation("eager")
    want = [stock(input_ids=ids[None]).logits[0] for ids in samples()]
    for ours, theirs in zip(batch.unpack(got.logits), want, strict=True):
        assert relative_error(ours, theirs) <= 2e-5


def switched(family: str, name: str, *attentions: Any) -> Any:
    model = families.build(family, name, "eager")
    for attention in attentions:
        model.set_attn_implementation(attention)
    return model


# What a user may ask for, each of which gives the language model "thd".
ASKED: dict[str, tuple[Any, ...]] = {
    "text": ({"text_config": "thd"},),
    "whole": ({"": "thd", "text_config": "thd"},),
    "there and back": ("thd", {"text_config": "eager"}, {"text_config": "thd"}),
    "all, none, text": ("thd", "eager", {"text_config": "thd"}),
    "outer eager": ({"": "eager", "text_config": "thd"},),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("family", [LLAVA, GEMMA], ids=["llava", "gemma3"])
def test_a_language_model_with_thd_gives_it_to_the_models_around_it(
    family: tuple[str, str], asked: str
) -> None:
    assert_exact(switched(*family, *ASKED[asked]), families.build(*family, "eager"))


@pytest.mark.parametrize("asked", [{"text_config": "thd"}, {"": "thd", "text_config": "thd"}])
def test_built_with_a_dict(asked: dict[str, str]) -> None:
    model = families.build(*LLAVA, asked)  # type: ignore[arg-type]
    assert model.config.vision_config._attn_implementation != "thd"
    assert_exact(model, families.build(*LLAVA, "eager"))


def test_thd_leaves_the_models_around_a_language_model_that_loses_it() -> None:
    model = switched(*LLAVA, "thd", {"text_config": "eager"})
    assert {x.config._attn_implementation for x in (model, model.model, model.model.language_model)} == {
        "eager"
    }


HALVES: dict[str, Way] = {
    "named": lambda model: model.set_attn_implementation({"": "thd", "text_config": "eager"}),
    "part": lambda model: (
        model.set_attn_implementation("thd"),
        model.model.language_model.set_attn_implementation("eager"),
    ),
    "by hand": lambda model: (
        model.set_attn_implementation("thd"),
        setattr(model.config.text_config, "_attn_implementation", "eager"),
    ),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", HALVES)
def test_a_language_model_without_thd_inside_one_with_it_is_refused(way: str, compiled: bool) -> None:
    torch._dynamo.reset()
    model = families.build(*LLAVA, "eager")
    HALVES[way](model)
    call = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises(
        ValueError, match=r"got a pack, and its language model runs attn_implementation='eager'"
    ):
        call(**pack().hf_kwargs())


def test_a_deeper_language_model_without_thd_is_refused_where_it_is_called() -> None:
    model = build("llama", "thd")
    model.model = transformers.LlamaModel._from_config(  # type: ignore[assignment]
        copy.deepcopy(model.config), attn_implementation="eager"
    )
    with pytest.raises(ValueError, match=r"LlamaForCausalLM got a pack, and its language model runs"):
        model(**small_pack().hf_kwargs())


BEHIND: dict[str, tuple[str, Way]] = {
    "config": ("llama", lambda model: setattr(model.config, "_attn_implementation", "thd")),
    "no attention": ("mamba2", lambda model: setattr(model.config, "_attn_implementation", "thd")),
    "recurrence": ("recurrent_gemma", lambda model: setattr(model.config, "_attn_implementation", "thd")),
    "part": ("llama", lambda model: model.model.set_attn_implementation("thd")),
    "part of a state-space model": ("mamba2", lambda m: m.backbone.set_attn_implementation("thd")),
}


@NON_LEAF
@pytest.mark.parametrize(
    ("way", "compiled"),
    [
        *((way, False) for way in BEHIND),
        ("no attention", True),
        *(pytest.param(way, True, marks=pytest.mark.slow) for way in BEHIND if way != "no attention"),
    ],
)
def test_a_model_switched_behind_its_back_is_refused_until_it_is_told(way: str, compiled: bool) -> None:
    torch._dynamo.reset()
    family, switch = BEHIND[way]
    model, batch = build(family, "eager").eval(), small_pack()
    switch(model)
    call: Any = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises(
        ValueError, match=r"has a config that says 'thd', but was built with another attention"
    ):
        call(**batch.hf_kwargs(), labels=batch.input_ids[None])
    model.set_attn_implementation("thd")  # type: ignore[operator]
    want: Any = build(family, "thd").eval()
    got = call(**batch.hf_kwargs(), labels=batch.input_ids[None])
    assert torch.equal(got.logits, want(**batch.hf_kwargs()).logits)


def test_a_part_of_a_multimodal_model_switched_alone() -> None:
    model = families.build(*LLAVA, "eager")
    model.model.language_model.set_attn_implementation("thd")
    with pytest.raises(ValueError, match=r"LlavaForConditionalGeneration has a config that says 'thd'"):
        model(**pack().hf_kwargs(), labels=pack().input_ids[None])
    model.set_attn_implementation("thd")
    assert_exact(model, families.build(*LLAVA, "eager"))


@NON_LEAF
@pytest.mark.parametrize("compiled", [False, True])
def test_a_language_model_put_into_a_model_that_knows_nothing_of_it(compiled: bool) -> None:
    torch._dynamo.reset()
    stock, batch = families.build(*LLAVA, "eager"), pack()
    model = copy.deepcopy(stock)
    model.model.language_model = families.build(*LLAVA, "thd").model.language_model
    model.load_state_dict(stock.state_dict())
    call: Any = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises(
        ValueError, match=r"LlavaForConditionalGeneration got labels, and \w+, a model inside it, a pack"
    ):
        call(**batch.hf_kwargs(), labels=batch.input_ids[None])
    want = [stock(input_ids=ids[None]).logits[0] for ids in samples()]
    for ours, theirs in zip(batch.unpack(call(**batch.hf_kwargs()).logits), want, strict=True):
        assert relative_error(ours, theirs) <= 2e-5
    model.set_attn_implementation("thd")
    assert_exact(model, stock)


def test_a_classifier_around_a_model_that_works_on_packs_is_refused() -> None:
    model = families.build("llama", "LlamaForSequenceClassification", "eager")
    model.model = transformers.LlamaModel._from_config(copy.deepcopy(model.config), attn_implementation="thd")
    with pytest.raises(ValueError, match=r"LlamaForSequenceClassification returns one row of logits"):
        model(**pack().hf_kwargs())


def test_stock_models_stay_as_they_are_beside_one_with_thd() -> None:
    build("llama", "thd")
    stock, ids = build("llama", "eager").eval(), torch.arange(3, 12)[None]
    whole: Any = stock(ids, labels=ids)
    forward = type(stock).forward._thd_unguarded  # type: ignore[attr-defined]
    assert torch.equal(whole.loss, forward(stock, ids, labels=ids).loss)


PAST: dict[str, Way] = {
    "forward": lambda model: model.forward,
    "forward compiled": lambda model: torch.compile(model.forward, backend="eager"),
    "class": lambda model: lambda **kwargs: type(model).forward(model, **kwargs),
    "deep copy": lambda model: copy.deepcopy(model).forward,
    "super": lambda model: _SubForCausalLM.of(model),
}


class _SubForCausalLM(transformers.LlamaForCausalLM):
    """A user's own subclass."""

    @classmethod
    def of(cls, model: Any) -> Any:
        mine = cls._from_config(model.config, attn_implementation="thd")
        mine.load_state_dict(model.state_dict())
        return mine.eval().forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("way", PAST)
def test_a_forward_called_past_the_hooks_announces_the_pack_itself(way: str) -> None:
    torch._dynamo.reset()
    name = ("llama", "LlamaForCausalLM")
    model = families.build(*name, "thd")
    assert_exact(model, families.build(*name, "eager"), PAST[way](model))


@pytest.mark.parametrize("stock_first", [False, True])
def test_a_classifier_called_past_its_hooks(stock_first: bool) -> None:
    name = ("gpt2", "GPT2ForSequenceClassification")
    order = ("eager", "thd") if stock_first else ("thd", "eager")
    made = {attention: families.build(*name, attention) for attention in order}
    want = torch.cat([made["eager"](input_ids=ids[None]).logits for ids in samples()])
    for call in (made["thd"], made["thd"].forward):
        assert relative_error(call(**pack().hf_kwargs()).logits, want) <= 2e-5


def test_arguments_given_by_position_are_looked_at_too() -> None:
    stock, model = (families.build("llama", "LlamaForCausalLM", x) for x in ("eager", "thd"))
    batch = pack()
    given = batch.hf_kwargs()
    ids, positions = given.pop("input_ids"), given.pop("position_ids")
    given = {name: value for name, value in given.items() if name not in ("use_cache", "attention_mask")}
    labels = batch.input_ids[None]
    got = model(ids, None, positions, None, None, labels, **given)
    torch.testing.assert_close(got.loss, loss_alone(stock), rtol=2e-5, atol=0)
    assert torch.equal(model(ids, None, positions).logits, got.logits)  # a pack by its positions
    with pytest.raises(ValueError, match=r"got a pack and an attention_mask"):
        model(ids, torch.ones_like(ids), positions, **given)
    with pytest.raises(TypeError, match="multiple values"):
        model(ids, input_ids=ids, position_ids=positions, **given)


def test_a_class_that_knows_no_packs_is_taught_when_its_model_is_unpickled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = build("mamba2", "thd").eval()
    batch, mixer = small_pack(), type(model.backbone.layers[0].mixer)
    want, pickled = model(**batch.hf_kwargs()).logits, pickle.dumps(model)
    monkeypatch.setattr(mixer, "forward", mixer.forward.__wrapped__)  # as in a new process
    assert not torch.equal(model(**batch.hf_kwargs()).logits, want)
    assert torch.equal(pickle.loads(pickled)(**batch.hf_kwargs()).logits, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba2", "recurrent_gemma", "opt"])
def test_a_model_unpickled_in_a_new_process_knows_its_packs(name: str, tmp_path: Path) -> None:
    """The classes of a new process have not been taught by the model's construction."""
    model: Any = build(name, "thd").eval()
    batch = small_pack()
    want = model(**batch.hf_kwargs()).logits.detach()
    torch.save((model, batch.hf_kwargs(), want), tmp_path / "model.pt")
    code = (
        "import torch\n"
        f"model, given, want = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "for call in (model, model.forward): print(torch.equal(call(**given).logits, want))"
    )
    assert run_python("-c", code).split() == ["True", "True"]


TWINS: dict[str, Way] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: _saved(model),
    "moved": lambda model: model.to("meta").to_empty(device="cpu").to(torch.float64),
    "shared config": lambda model: type(model)(model.config),
}


def _saved(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    ("way", "asked"),
    [
        ("pickle", {"text_config": "thd"}),
        *(pytest.param(way, "thd", marks=pytest.mark.slow) for way in TWINS),
    ],
)
def test_twins_of_a_model_mask_their_labels_too_compiled_before_the_first_call(way: str, asked: Any) -> None:
    torch._dynamo.reset()
    stock = families.build(*LLAVA, "eager")
    twin = TWINS[way](switched(*LLAVA, asked)).float().eval()
    gc.collect()
    twin.load_state_dict(stock.state_dict())
    for x in (twin, stock):  # buffers of ropes are no weights
        x.model.language_model.rotary_emb = copy.deepcopy(stock.model.language_model.rotary_emb)
    assert_exact(twin, stock, torch.compile(twin, backend="eager"))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft
def test_adapters_around_a_model() -> None:
    peft = pytest.importorskip("peft")
    name = ("llama", "LlamaForCausalLM")
    stock, model = (families.build(*name, attention) for attention in ("eager", {"": "thd"}))  # type: ignore[arg-type]
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, lora_alpha=4, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, config).eval()
    assert_exact(wrapped, stock)  # fresh adapters add nothing
    assert_exact(wrapped, stock, wrapped.base_model.forward)
    assert_exact(wrapped, stock, wrapped.base_model.model.forward)
    with wrapped.disable_adapter():
        assert_exact(wrapped, stock)


def test_a_refused_switch_leaves_the_model_as_it_was() -> None:
    model = families.build("bloom", "BloomForCausalLM", "eager")
    with pytest.raises(ValueError, match=r"BloomForCausalLM has an attention of its own"):
        model.set_attn_implementation("thd")
    assert model.config._attn_implementation == "eager"
    ids = samples()[2][None]
    torch.testing.assert_close(
        model(ids).logits, families.build("bloom", "BloomForCausalLM", "eager")(ids).logits
    )


@pytest.mark.parametrize(
    ("family", "name"),
    [("rwkv", "RwkvForCausalLM"), ("xlstm", "xLSTMForCausalLM"), ("jamba", "JambaForCausalLM")],
)
def test_models_that_transformers_cannot_switch_are_switched(family: str, name: str) -> None:
    """It only logs that it keeps the attention of classes without its AttentionInterface."""
    model, want = switched(family, name, "thd"), families.build(family, name, "thd")
    batch = pack()
    assert torch.equal(model(**batch.hf_kwargs()).logits, want(**batch.hf_kwargs()).logits)


class _Plain(torch.nn.Module):
    """A user's own head around a model."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base

    def forward(self, **kwargs: Any) -> Any:
        return self.base(**kwargs)


def test_a_plain_module_around_a_model_changes_nothing() -> None:
    name = ("llama", "LlamaForCausalLM")
    model = families.build(*name, "thd")
    for wrapped in (
        _Plain(model),
        torch.nn.Sequential(),
        torch.nn.parallel.DataParallel(model, device_ids=[]),
    ):
        call = wrapped if not isinstance(wrapped, torch.nn.Sequential) else model
        assert_exact(model, families.build(*name, "eager"), call)


class _Mine(transformers.PreTrainedModel):  # type: ignore[misc]
    """A user's own model class, which builds the language model inside with "thd"."""

    config_class = transformers.LlavaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.language = transformers.AutoModelForCausalLM.from_config(
            config.text_config, attn_implementation="thd"
        )
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        return self.language(input_ids=input_ids, labels=labels, **kwargs)


def test_a_class_of_the_users_own_is_told_when_it_is_built() -> None:
    config = families.build(*LLAVA, "eager").config
    model = _Mine(copy.deepcopy(config))
    assert model.config._attn_implementation == "thd"
    batch = pack()
    whole = model(**batch.hf_kwargs()).logits
    for ours, ids in zip(batch.unpack(whole), samples(), strict=True):
        assert relative_error(ours, model(input_ids=ids[None], use_cache=False).logits[0]) <= 2e-5
    with pytest.raises(ValueError, match=r"_Mine got a pack and labels, and its loss is not known to stay"):
        model(**batch.hf_kwargs(), labels=batch.input_ids[None])


class _OneRow(transformers.LlamaPreTrainedModel):  # type: ignore[misc]
    """A user's own model whose name promises logits a token and which gives one score a row."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = transformers.LlamaModel(config)
        self.post_init()

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, **kwargs).last_hidden_state
        return {"scores": hidden[:, -1]}


class ScoringModel(_OneRow):
    """Its name ends like a base model's."""


@NON_LEAF
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("cls", [_OneRow, ScoringModel])
def test_one_row_for_a_whole_pack_is_refused_compiled_or_not(cls: Any, compiled: bool) -> None:
    torch._dynamo.reset()
    config = families.build("llama", "LlamaForCausalLM", "eager").config
    model = cls._from_config(copy.deepcopy(config), attn_implementation="thd").eval()
    call: Any = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises(
        ValueError, match=rf"{cls.__name__} returns one row of scores, \(1, 32\), for a pack of 4"
    ):
        call(**pack().hf_kwargs())


ONE_ROW = {
    "bert": ("BertModel", {"return_dict": False}, r"one row of output 1"),
    "gpt2": ("GPT2DoubleHeadsModel", {}, r"one row of mc_logits"),
    "clip": ("CLIPTextModel", {}, r"CLIPTextModel"),
}


@NON_LEAF
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", ONE_ROW)
def test_stock_heads_of_one_row_are_refused_compiled_or_not(family: str, compiled: bool) -> None:
    torch._dynamo.reset()
    name, given, message = ONE_ROW[family]
    if family == "clip":
        config = transformers.CLIPTextConfig(
            vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
        )
        model = transformers.CLIPTextModel._from_config(config, attn_implementation="thd").eval()
    else:
        model = families.build(family, name, "thd")
    call: Any = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises(ValueError, match=message):
        call(**pack().hf_kwargs(), **given)
